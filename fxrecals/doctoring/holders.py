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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

DEPTH = 12
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


def is_of_the_program(file: str) -> bool:
    """Whether a file is part of the program, and of no installed package."""
    return _standing(file) == 2


_ADDS = {"append", "add", "appendleft", "extend", "insert", "put", "setdefault", "update"}


def line_that_keeps(name: str, files: Iterable[str]) -> str:
    """The line that puts something into the variable or attribute `name`, or "".

    A call such as ``name.append(...)`` counts before an assignment, that of something new last.
    """
    found: list[tuple[int, int, str]] = []
    for file in files:
        for node in ast.walk(_tree(file)):
            rank = _rank(node, name)
            if rank is not None:
                line = getattr(node, "lineno", 0)
                found.append((rank, -line if rank else line, shown(file, line)))
    return min(found, default=(0, 0, ""))[2]


def _rank(node: ast.AST, name: str) -> int | None:
    """How likely it is that a node of the syntax tree puts something into `name`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return 0 if node.func.attr in _ADDS and _names(node.func.value, name) else None
    if isinstance(node, ast.AugAssign):
        return 0 if _names(node.target, name) else None
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _names(target, name):
                return 0
            if _names(target, name):
                is_new = isinstance(node.value, (ast.List, ast.Dict, ast.Constant, ast.Set))
                return 2 if is_new else 1
    return None


def _names(node: ast.AST, name: str) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, (ast.Tuple, ast.List)):
        return any(_names(each, name) for each in node.elts)
    return getattr(node, "id", getattr(node, "attr", None)) == name


def line_that_calls(ending: str, files: Iterable[str]) -> str:
    """The line of the first call of a method with that ending of its name, or ""."""
    for file in files:
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr.endswith(ending):
                    return shown(file, node.lineno)
    return ""


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def source_of(x: Any) -> str:
    """The file that defines a function, a class or an object's class, or ""."""
    for candidate in (inspect.unwrap(x) if callable(x) else x, type(x)):
        try:
            return inspect.getsourcefile(candidate) or ""
        except (TypeError, OSError):
            continue
    return ""


# --- references ---------------------------------------------------------------------------------


def edge(holder: Any, held: Any) -> str:
    """How `holder` refers to `held`, as a piece of Python."""
    if isinstance(holder, dict):
        return next((f"[{_key(key)}]" for key, x in _items(holder) if x is held), "")
    if isinstance(holder, (list, tuple, deque)):
        return next((f"[{i}]" for i, x in enumerate(holder) if x is held), "")
    if isinstance(holder, types.FunctionType):
        return _of_function(holder, held)
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


def _of_function(function: types.FunctionType, held: Any) -> str:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell is held:
            return f".{name}"
    return _of_object(function, held)


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


def path_to(held: Any, ignored: Collection[int], frames: Sequence[types.FrameType]) -> list[str]:
    """The names from a root (module, local variable) to an object, the root first.

    Args:
        held: the object.
        ignored: by their `id`, objects that do not count as holders.
        frames: of running functions whose local variables are roots.

    Returns:
        Names, as ``["train", ".losses", "[3]"]``. The first is the nearest holder's type where no
        root was found.
    """
    roots = _Roots(frames)
    skipped = {*ignored, *map(id, frames)}
    came_from: dict[int, tuple[Any, Any]] = {id(held): (held, None)}
    level = [held]
    for _ in range(DEPTH):
        for each in level:
            root = roots.name(each)
            if root:
                return [root, *_down(each, came_from)]
        level = _holders(level, came_from, skipped)
        if not level:
            break
    nearest = list(came_from.values())[1:2]
    top = nearest[0][0] if nearest else held
    return [type(top).__name__, *_down(top, came_from)]


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


def _down(x: Any, came_from: dict[int, tuple[Any, Any]]) -> Iterator[str]:
    while (held := came_from[id(x)][1]) is not None:
        yield edge(x, held)
        x = held


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
        modules = [(name, vars(m)) for name, m in list(sys.modules.items()) if _is_module(m)]
        self.modules: dict[int, str] = {}
        for name, namespace in modules:
            self.modules.setdefault(id(namespace), name)
        self.locals: dict[int, str] = {}
        for frame in frames:
            if frame.f_locals is frame.f_globals:
                self.modules.setdefault(id(frame.f_globals), frame.f_globals.get("__name__", ""))
                continue
            for name, x in local_variables(frame).items():
                self.locals.setdefault(id(x), f"{name} in {frame.f_code.co_name}()")

    def name(self, x: Any) -> str:
        if isinstance(x, dict):
            if id(x) in self.modules:
                return self.modules[id(x)]
            if "__builtins__" in x and "__name__" in x:  # a namespace that was executed
                return str(x["__name__"])
        return self.locals.get(id(x), "")


def _is_module(x: Any) -> bool:
    return isinstance(x, types.ModuleType)


def words(path: Sequence[str]) -> str:
    """A path as Python writes it.

    >>> words(["train", "['trainer']", ".__dict__", "['losses']", "[3]"])
    'train.trainer.losses[3]'
    """
    result, is_namespace = path[0], "." not in path[0] and " in " not in path[0]
    for i, name in enumerate(path[1:]):
        if name == ".__dict__" or name == ".cell_contents" or not name:
            is_namespace = name == ".__dict__"
            continue
        is_root = i == 0 and not result.endswith("()")
        if name.startswith("['") and (is_namespace or is_root):
            name = f".{name[2:-2]}"
        is_namespace = False
        result += name
    return result


def named(path: Sequence[str]) -> list[str]:
    """The variables and attributes of a path, the innermost first.

    >>> named(["train", "['trainer']", ".__dict__", "['losses']", "[3]"])
    ['losses', 'trainer']
    """
    found = [name.strip(".[]'") for name in path[1:] if not name[1:2].isdigit()]
    names = [name for name in found if name.isidentifier() and not name.startswith("__")]
    return [*reversed(names), path[0].split(" in ")[0]] if " in " in path[0] else names[::-1]


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


_PLAIN = (dict, list, tuple, set, deque, types.CellType)


def around(way: Sequence[Any]) -> tuple[str, list[tuple[Any, str]]]:
    """A cycle in words, and each object of it that has a name, with its attribute on the way."""
    start = next((i for i, x in enumerate(way) if not isinstance(x, _PLAIN)), 0)
    ring = [*way[start:], *way[:start]]
    parts: list[tuple[Any, list[str]]] = []
    for i, x in enumerate(ring):
        if not parts or not isinstance(x, _PLAIN):
            parts.append((x, [_called(x)]))
        parts[-1][1].append(edge(x, ring[(i + 1) % len(ring)]))
    text = " -> ".join(words(path) for _, path in parts)
    return text, [(x, (named(path) or [""])[0]) for x, path in parts]


def _called(x: Any) -> str:
    name = getattr(x, "__name__", "") if isinstance(x, types.FunctionType) else ""
    return name or type(x).__name__


def line_of_cycle(ring: Sequence[tuple[Any, str]], files: Sequence[str]) -> str:
    """The line that closes a cycle: the last of those that set its attributes, or ""."""
    found = []
    for x, name in ring:
        own = source_of(x)
        line = partial(line_that_keeps, name)
        if name:
            found.append(line([own] if own else []) or line(files))
    return next((line for line in reversed(found) if line), "")
