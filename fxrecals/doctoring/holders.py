"""Who holds an object: the path of names from a root to it, and around a cycle; and source lines.

>>> class Trainer:
...     def __init__(self):
...         self.losses = [object()]
>>> trainer = Trainer()
>>> edge(trainer, vars(trainer)), edge(vars(trainer), trainer.losses), edge([1, 2], 2)
('.__dict__', "['losses']", '[1]')
"""

from __future__ import annotations

import ast
import gc
import inspect
import linecache
import os
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

DEPTH = 24
"""References between a root and a tensor; what is further away is shown from its nearest holder."""

_INSTALLED = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {sysconfig.get_path(key) for key in ("purelib", "platlib", "stdlib")}
)
_TORCH = os.path.join(os.path.dirname(os.path.realpath(torch.__file__)), "")
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "")

# --- lines --------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _standing(file: str) -> int:
    """0 for torch and this library, 1 for an installed package, 2 for the program itself."""
    path = os.path.realpath(file)
    if file.startswith("<frozen") or path.startswith((_TORCH, _OURS)):
        return 0
    return 1 if path.startswith(_INSTALLED) else 2


def lines(frame: types.FrameType | None) -> tuple[str, str]:
    """The innermost line outside of torch, and the innermost of the program itself."""
    first = ""
    while frame is not None:
        standing = _standing(frame.f_code.co_filename)
        if standing and not first:
            first = shown(frame.f_code.co_filename, frame.f_lineno)
        if standing == 2:
            return first, shown(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return first, first


def shown(file: str, number: int) -> str:
    """A line as ``train.py:12``, seen from the current directory if the file is below it."""
    here = os.path.join(os.getcwd(), "")
    return f"{file[len(here) :] if file.startswith(here) else os.path.basename(file)}:{number}"


def is_ours(file: str) -> bool:
    """Whether a file is part of this library."""
    return os.path.realpath(file).startswith(_OURS)


def is_of_the_program(file: str) -> bool:
    """Whether a file is part of the program, and of no installed package."""
    return _standing(file) == 2


_ADDS = {"append", "add", "appendleft", "extend", "insert", "put", "setdefault", "update"}


@dataclass(frozen=True)
class Scope:
    """Lines of a function's source, the first and the last included."""

    file: str
    first: int
    last: int


def scope_of(code: types.CodeType) -> Scope:
    """The lines of a function, or of a module's own code."""
    numbers = [line for _, _, line in code.co_lines() if line]
    nested = (scope_of(x).last for x in code.co_consts if isinstance(x, types.CodeType))
    return Scope(code.co_filename, code.co_firstlineno, max([*numbers, *nested], default=0))


def line_that_keeps(name: str, scopes: Iterable[Scope]) -> str:
    """The line that puts something into the variable or attribute `name`, or "".

    A call such as ``name.append(...)`` counts before an assignment, that of something new last;
    then the line in the smallest scope.
    """
    return _best(scopes, lambda node: _rank(node, name))


def line_that_calls(ending: str, scopes: Iterable[Scope]) -> str:
    """The line that calls a method with that ending of its name, in the smallest scope, or ""."""

    def rank(node: ast.AST) -> int | None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return 0 if node.func.attr.endswith(ending) else None
        return None

    return _best(scopes, rank)


def _best(scopes: Iterable[Scope], rank: Callable[[ast.AST], int | None]) -> str:
    found = [
        (ranked, scope.last - scope.first, node.lineno, shown(scope.file, node.lineno))
        for scope in dict.fromkeys(scopes)
        for node in _statements(scope.file)
        if scope.first <= node.lineno <= scope.last and (ranked := rank(node)) is not None
    ]
    return min(found, default=(0, 0, 0, ""))[3]


def _rank(node: ast.AST, name: str) -> int | None:
    """How likely it is that a node of the syntax tree puts something into `name`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return 0 if node.func.attr in _ADDS and _names(node.func.value, name) else None
    if isinstance(node, ast.AugAssign):
        return 0 if _names(node.target, name) else None
    if isinstance(node, ast.Assign):
        ranks = [_assigned(target, value, name) for target, value in _pairs(node)]
        return min((rank for rank in ranks if rank is not None), default=None)
    return None


def _pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """What is assigned to what: ``a, b = 1, 2`` is two."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value) for target in node.targets]


def _assigned(target: ast.expr, value: ast.expr, name: str) -> int | None:
    if not _names(target, name):
        return None
    if isinstance(target, ast.Subscript):
        return 0
    return 2 if isinstance(value, (ast.List, ast.Dict, ast.Constant, ast.Set)) else 1


def _names(node: ast.AST, name: str) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, (ast.Tuple, ast.List)):
        return any(_names(each, name) for each in node.elts)
    return getattr(node, "id", getattr(node, "attr", None)) == name


@lru_cache(maxsize=64)
def _statements(file: str) -> list[Any]:
    """What may put something somewhere in a file: its assignments and calls."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    wanted = (ast.Call, ast.AugAssign, ast.Assign)
    return [node for node in ast.walk(tree) if isinstance(node, wanted)]


def scopes_of(x: Any) -> list[Scope]:
    """The lines of a function, or of the methods of an object's class in the program."""
    if isinstance(x, types.MethodType):
        x = x.__func__
    if isinstance(x, (types.FrameType, types.GeneratorType)):
        code = x.f_code if isinstance(x, types.FrameType) else x.gi_code
        return [scope_of(code)]
    if isinstance(x, types.FunctionType):
        return [scope_of(x.__code__)]
    methods = (f for kind in type(x).__mro__ for f in vars(kind).values())
    functions = [f for f in methods if isinstance(f, types.FunctionType)]
    return [scope_of(f.__code__) for f in functions if _standing(f.__code__.co_filename) == 2]


# --- references ---------------------------------------------------------------------------------


def edge(holder: Any, held: Any) -> str:
    """How `holder` refers to `held`, as a piece of Python."""
    if isinstance(holder, dict):
        return next((f"[{_key(key)}]" for key, x in _items(holder) if x is held), "")
    if isinstance(holder, (list, tuple, deque)):
        return next((f"[{i}]" for i, x in enumerate(holder) if x is held), "")
    if isinstance(holder, types.FrameType):
        return next((f".{key}" for key, x in local_variables(holder).items() if x is held), "")
    if isinstance(holder, types.GeneratorType) and holder.gi_frame is not None:
        return edge(holder.gi_frame, held)
    return _of_object(holder, held)


def local_variables(frame: types.FrameType) -> dict[str, Any]:
    """The local variables of a frame, which does not go on to hold them for the reader."""
    found = frame.f_locals
    copy = dict(found)
    if type(found) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        found.clear()  # until Python 3.12 it is a snapshot that the frame keeps
    return copy


def _key(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int)) else type(key).__name__


def _items(mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return list(mapping.items())


_ATTRIBUTES = (
    "__self__",
    "__func__",
    "__defaults__",
    "__kwdefaults__",
    "__traceback__",
    "__context__",
    "__cause__",
    "tb_frame",
    "tb_next",
    "f_back",
    "grad",
    "args",
    "keywords",
    "func",
)


def _of_object(holder: Any, held: Any) -> str:
    own = getattr(holder, "__dict__", None)
    if own is held:
        return ".__dict__"
    if isinstance(own, (dict, types.MappingProxyType)):
        for name, x in _items(own):
            if x is held:
                return f".{name}"
    slots = (getattr(kind, "__slots__", ()) for kind in type(holder).__mro__)
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    for name in (*names, *_ATTRIBUTES):
        if inspect.getattr_static(holder, name, None) is not None and _reads(holder, name) is held:
            return f".{name}"
    return ""


def _reads(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name)
    except Exception:  # a property of the program may raise anything
        return None


@dataclass(frozen=True)
class Path:
    """A way from a root to an object.

    Attributes:
        names: as ``("train", ".losses", "[3]")``: the root, which is a module or a local variable
            (or the nearest holder's type where none was found), and pieces of Python.
        scopes: of functions and classes on the way.
    """

    names: tuple[str, ...]
    scopes: tuple[Scope, ...]


def path_to(held: Any, ignored: Collection[int], frames: Sequence[types.FrameType]) -> Path:
    """The shortest way from a root to an object.

    Args:
        held: the object.
        ignored: by their `id`, objects that do not count as holders.
        frames: of running functions whose local variables are roots.
    """
    roots = _Roots(frames)
    skipped = {*ignored, *map(id, frames)}
    came_from: dict[int, tuple[Any, Any]] = {id(held): (held, None)}
    level = [held]
    for _ in range(DEPTH):
        for each in level:
            root, frame = roots.name(each)
            if root:
                return _path(root, _chain(each, came_from), frame)
        level = _holders(level, came_from, skipped)
        if not level:
            break
    nearest = list(came_from.values())[1:2]
    top = nearest[0][0] if nearest else held
    return _path(type(top).__name__, _chain(top, came_from), None)


def _path(root: str, chain: list[Any], frame: types.FrameType | None) -> Path:
    on_way = [x for x in (*chain, *filter(None, (frame,))) if not isinstance(x, _PLAIN)]
    scopes = [scope for x in on_way for scope in scopes_of(x)]
    return Path((root, *edges(chain)), tuple(scopes))


def _chain(x: Any, came_from: dict[int, tuple[Any, Any]]) -> list[Any]:
    found = [x]
    while (held := came_from[id(found[-1])][1]) is not None:
        found.append(held)
    return found


_PLAIN = (dict, list, tuple, set, deque, types.CellType)


def edges(chain: Sequence[Any]) -> list[str]:
    """How each of some objects refers to the next.

    >>> def made(seen):
    ...     return lambda x, log=[]: seen.append(x)
    >>> hook = made([0])
    >>> log, cells = hook.__defaults__, hook.__closure__
    >>> "".join(edges([hook, cells, cells[0], cells[0].cell_contents, 0]))
    '.seen[0]'
    >>> edges([hook, log, log[0]])
    ['.log', '']
    """
    found = [edge(a, b) for a, b in pairwise(chain)]
    for i, (function, held, further) in enumerate(zip(chain, chain[1:], chain[2:], strict=False)):
        if not isinstance(function, types.FunctionType):
            continue
        code = function.__code__
        if held is function.__closure__:
            index = next(k for k, cell in enumerate(held) if cell is further)
            found[i : i + 2] = f".{code.co_freevars[index]}", ""
        elif held is function.__defaults__:
            index = next(k for k, x in enumerate(held) if x is further) - len(held)
            found[i : i + 2] = f".{code.co_varnames[: code.co_argcount][index]}", ""
    return ["" if isinstance(a, types.CellType) else e for a, e in zip(chain, found, strict=False)]


def _holders(
    level: list[Any], came_from: dict[int, tuple[Any, Any]], skipped: set[int]
) -> list[Any]:
    """What refers to objects of `level`; notes through which of them."""
    found = gc.get_referrers(*level)
    skipped |= {id(level), id(came_from), id(found), *map(id, came_from.values())}
    by_id = {id(each): each for each in level}
    skipped.add(id(by_id))
    result = []
    for holder in found:
        if id(holder) in skipped or id(holder) in came_from or _is_machinery(holder):
            continue
        held = next((by_id[id(x)] for x in gc.get_referents(holder) if id(x) in by_id), None)
        if held is not None:
            came_from[id(holder)] = (holder, held)
            result.append(holder)
    return result


def _is_machinery(x: Any) -> bool:
    """What holds anything for a moment: frames that run, iterators."""
    return isinstance(x, types.FrameType) or type(x).__name__.endswith("_iterator")


def pattern(path: str) -> str:
    """A path with all indices alike.

    >>> pattern("train.losses[3]['x'][0]")
    "train.losses[*]['x'][*]"
    """
    return re.sub(r"\[\d+\]", "[*]", path)


def is_bounded(held: Any) -> bool:
    """Whether what holds an object lets old ones go: a deque of limited length."""
    return any(isinstance(x, deque) and x.maxlen is not None for x in gc.get_referrers(held))


class _Roots:
    """Names of what is reachable by name: variables of modules, local variables."""

    def __init__(self, frames: Sequence[types.FrameType]) -> None:
        self.modules: dict[int, str] = {}
        for name, module in list(sys.modules.items()):
            if isinstance(module, types.ModuleType):
                self.modules.setdefault(id(vars(module)), name)
        self.locals: dict[int, tuple[str, types.FrameType]] = {}
        for frame in frames:
            if frame.f_locals is frame.f_globals:
                self.modules.setdefault(id(frame.f_globals), frame.f_globals.get("__name__", ""))
                continue
            for name, x in local_variables(frame).items():
                self.locals.setdefault(id(x), (f"{name} in {frame.f_code.co_name}()", frame))

    def name(self, x: Any) -> tuple[str, types.FrameType | None]:
        """The name of a root, and the frame that has it if it is a local variable; else ""."""
        if isinstance(x, dict):
            if id(x) in self.modules:
                return self.modules[id(x)], None
            if "__builtins__" in x and "__name__" in x:  # a namespace that was executed
                return str(x["__name__"]), None
        return self.locals.get(id(x), ("", None))


def by_holder(tensors: Sequence[Any], ignored: Collection[int]) -> list[list[int]]:
    """Indices of objects, those together that have their first holder in common."""
    place = {id(x): i for i, x in enumerate(tensors)}
    groups: dict[int, list[int]] = {}
    left = set(range(len(tensors)))
    found = gc.get_referrers(*tensors) if tensors else []
    for holder in found:
        if id(holder) in ignored or holder is tensors or _is_machinery(holder):
            continue
        held = {place[id(x)] for x in gc.get_referents(holder) if id(x) in place} & left
        if held:
            groups[id(holder)] = sorted(held)
            left -= held
    return [*groups.values(), *([i] for i in sorted(left))]


def words(names: Sequence[str]) -> str:
    """A path as Python writes it.

    >>> words(["train", "['trainer']", ".__dict__", "['losses']", "[3]"])
    'train.trainer.losses[3]'
    """
    result, is_namespace = names[0], not names[0].endswith("()")
    for name in names[1:]:
        if name.startswith("['") and is_namespace:
            name = f".{name[2:-2]}"
        is_namespace = name == ".__dict__"
        result += "" if is_namespace else name
    return result


def named(names: Sequence[str]) -> list[str]:
    """The variables and attributes of a path, the innermost first.

    >>> named(["train", "['trainer']", ".__dict__", "['losses']", "[3]"])
    ['losses', 'trainer']
    >>> named(["losses in main()", "[3]"])
    ['losses']
    """
    found = [name.strip(".[]'") for name in names if name[:1] in (".", "[")]
    own = [name for name in found if name.isidentifier() and not name.startswith("__")]
    return own[::-1] or [names[0].split(" in ")[0]]


# --- cycles -------------------------------------------------------------------------------------

MOST = 20_000
"""Objects of a heap of garbage among which cycles are looked for."""


def cycle_around(start: Any, garbage: Mapping[int, Any]) -> list[Any]:
    """The shortest way from an object back to itself through `garbage`; [] if there is none."""
    came_from: dict[int, Any] = {}
    level = [start]
    while level and len(came_from) < MOST:
        following = []
        for holder in level:
            for held in gc.get_referents(holder):
                if held is start:
                    return _way(holder, start, came_from)
                if id(held) in garbage and id(held) not in came_from:
                    came_from[id(held)] = holder
                    following.append(held)
        level = following
    return []


def _way(last: Any, start: Any, came_from: Mapping[int, Any]) -> list[Any]:
    way = [last]
    while way[-1] is not start:
        way.append(came_from[id(way[-1])])
    return way[::-1]


def nearest_cycle(held: Any, garbage: Mapping[int, Any]) -> list[Any]:
    """The objects of a cycle from which `held` is reached, the nearest; [] if none is found."""
    holders: dict[int, list[Any]] = {}
    for x in garbage.values():
        for y in gc.get_referents(x):
            if id(y) in garbage:
                holders.setdefault(id(y), []).append(x)
    seen, level = {id(held)}, [held]
    while level:
        for x in level:
            way = cycle_around(x, garbage)
            if way:
                return way
        upward = [y for x in level for y in holders.get(id(x), ())]
        level = list({id(y): y for y in upward if id(y) not in seen}.values())
        seen |= set(map(id, level))
    return []


def around(way: Sequence[Any]) -> Path:
    """A cycle, once around: objects, their attributes, and the scopes it may be made in."""
    start = next((i for i, x in enumerate(way) if not isinstance(x, _PLAIN)), 0)
    ring = [*way[start:], *way[:start]]
    pieces = edges([*ring, ring[0], ring[1 % len(ring)]])
    names: list[str] = []
    for x, piece in zip(ring, pieces, strict=False):
        names += [piece] if names and isinstance(x, _PLAIN) else [f" -> {_called(x)}", piece]
    frames = [x for x in ring if isinstance(x, (types.FrameType, types.FunctionType))]
    scopes = [scope for x in (*frames, *ring) for scope in scopes_of(x)]
    return Path(tuple(names), tuple(scopes))


def _called(x: Any) -> str:
    name = getattr(x, "__name__", "") if isinstance(x, types.FunctionType) else ""
    return name or type(x).__name__


def line_of_cycle(ring: Path, scopes: Sequence[Scope]) -> str:
    """The line that closes a cycle: the last of those that set its attributes, or ""."""
    lines = [line_that_keeps(name, (*ring.scopes, *scopes)) for name in named(ring.names)]
    return max(lines, key=lambda line: int(line.rpartition(":")[2] or 0), default="")
