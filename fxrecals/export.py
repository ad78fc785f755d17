"""The rewritten forward and backward as Python files that need nothing but torch.

Each file holds one function and says what it takes and returns. It is the program that a plan
runs, op for op and in its order: for reading, and for running where fxrecals is not.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from fxrecals import _torch, rng
from fxrecals.capture import Captured, Joint, Run
from fxrecals.cost import Free
from fxrecals.errors import FxrecalsError
from fxrecals.halves import split
from fxrecals.ir import Graph
from fxrecals.package import dot, write_runtime
from fxrecals.plans import Plan
from fxrecals.reading import read

CONSTANTS = "constants.pt"
"""File of tensors that the trace met and that are no inputs, by name; written if there are any."""

REPLAY = ("_module", "state", "set_state", "replay")
"""Functions of `fxrecals.rng` that an exported file carries if it replays random numbers."""


def write(plan: Plan, captured: Captured, folder: Path) -> None:
    """Writes ``forward.py`` and ``backward.py``; ``forward_0.py`` and so on for a step of several
    graphs, in the order in which the forwards run. Beside them what trains by them without
    fxrecals, ``runtime.py`` and ``model.json``, and ``graph.dot`` for Graphviz.

    Args:
        plan: a plan of `captured`'s step.
        captured: what the plan was made from.
        folder: exists; files of those names are replaced.

    Raises:
        FxrecalsError: the plan is of another step, or the graph calls what has no text form.

    >>> import tempfile
    >>> from fxrecals.capture import capture, step
    >>> from fxrecals.schedule import Schedule
    >>> captured = capture(torch.nn.Linear(2, 2), torch.ones(1, 2))
    >>> graph = step(captured, Free())
    >>> plan = Plan(graph, Schedule.keeping_everything(graph), None, floor_bytes=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(plan, captured, Path(folder))
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['backward.py', 'forward.py', 'graph.dot', 'model.json', 'runtime.py']
    """
    constants: dict[str, Tensor] = {}
    halves = [_halves(plan, captured, run) for run in captured.runs]
    (folder / "graph.dot").write_text(dot(plan), encoding="utf-8")
    write_runtime(folder, _about(captured, halves))
    for index, half in enumerate(halves):
        suffix = f"_{index}" if len(captured.runs) > 1 else ""
        for name, text in (("forward", _forward(half)), ("backward", _backward(half))):
            (folder / f"{name}{suffix}.py").write_text(text, encoding="utf-8")
        constants.update(_constants(half))
    if constants:
        torch.save(constants, folder / CONSTANTS)


@dataclass(frozen=True)
class _Halves:
    """One run of a joint graph, split along the plan.

    Attributes:
        joint: what was traced.
        run: where its inputs come from.
        graph: the joint graph by itself, as planning sees it.
        forward: its first half.
        backward: its second half.
    """

    joint: Joint
    run: Run
    graph: Graph
    forward: fx.GraphModule
    backward: fx.GraphModule


def _halves(plan: Plan, captured: Captured, run: Run) -> _Halves:
    joint = captured.joints[run.joint]
    graph = read(
        joint.module,
        num_fwd_outputs=joint.num_fwd_outputs,
        parameter_inputs=joint.parameter_inputs,
        cost=Free(),
        stands_for=joint.stands_for,
    )
    schedule = plan.part(run.prefix, graph)
    if schedule is None:
        raise FxrecalsError(
            "the plan is of another step than the captured one; what works: Plan.export, on the "
            "plan that fxrecals.plan returned"
        )
    forward, backward = split(
        joint.module,
        graph,
        schedule,
        num_fwd_outputs=joint.num_fwd_outputs,
        mutated_inputs=_torch.updated_inputs(joint.module, joint.num_fwd_outputs),
    )
    return _Halves(joint, run, graph, forward, backward)


# --- what runs it without fxrecals ---------------------------------------------------------------


def _about(captured: Captured, halves: Sequence[_Halves]) -> dict[str, Any]:
    """What `fxrecals.runtime` reads of a step, or why it cannot run it."""
    signature = captured.signature
    if len(halves) != 1:
        return {"cannot": f"it is {len(halves)} graphs, with Python between them"}
    (half,) = halves
    descs = _torch.output_descs(half.joint.module)[: half.joint.num_fwd_outputs]
    updates, plain = _updates(half, descs), all(map(_torch.is_plain_output, descs))
    if signature is None or signature.result is None or not plain:
        return {"cannot": "its outputs are not all tensors of their own"}
    names = {i: signature.names[number] for i, number in half.run.given.items()}
    inputs = [names.get(i, "tensor") for i in range(len(_placeholders(half.forward)))]
    if "tensor" in inputs:
        return {"cannot": "it reads a tensor that is no parameter, buffer or argument"}
    return {
        "inputs": inputs,
        "tensors": signature.tensors,
        "training": signature.training,
        "leaves": signature.leaves,
        "result": signature.result,
        "outputs": half.joint.num_fwd_outputs,
        "updates": updates,
        **_backward_order(half, descs),
    }


def _updates(half: _Halves, descs: Sequence[Any]) -> list[tuple[int, int]]:
    """Outputs that are new values of inputs, with the indices of these."""
    places = {_torch.input_desc(x): i for i, x in enumerate(_placeholders(half.joint.module))}
    found = ((k, places.get(_torch.mutated_by(desc))) for k, desc in enumerate(descs))
    return [(k, i) for k, i in found if i is not None]


def _backward_order(half: _Halves, descs: Sequence[Any]) -> dict[str, Any]:
    """What the backward takes, by where the forward returned it, and which gradient is whose."""
    made = {str(x): i for i, x in reversed(list(enumerate(_outputs(half.forward))))}
    places = {desc: k for k, desc in enumerate(descs)}
    nodes = _placeholders(half.backward)
    names = [node.name for node in _placeholders(half.joint.module)]
    owners = [meaning.removeprefix("gradient of ") for meaning in _backward_meanings(half)]
    inputs = names[: len(_placeholders(half.forward))]
    return {
        "saved": [made[node.name] for node in nodes if not _torch.is_tangent(node)],
        "tangents": [places[_torch.tangent_of(x)] for x in nodes if _torch.is_tangent(x)],
        "gradients": [owners.index(name) if name in owners else None for name in inputs],
    }


# --- what comes in and goes out -----------------------------------------------------------------

Line = tuple[str, str, str]
"""Of a table of inputs or outputs: name, shape, meaning."""


def _forward(half: _Halves) -> str:
    updated = _updated(half.forward)
    about = [
        "The forward of a training step, as planned.",
        "",
        "    outputs_and_saved = forward(*inputs)",
        "",
        "Inputs, in order:",
        *_aligned(_primals(half)),
        "",
        "Returns, in order:",
        *_aligned(_numbered(half.forward, _forward_meanings(half))),
    ]
    if updated:
        about += ["", f"Updates in place: {', '.join(updated)}."]
    return _file("forward", half, half.forward, about)


def _backward(half: _Halves) -> str:
    about = [
        "The backward of a training step, as planned.",
        "",
        "    gradients = backward(*saved, *tangents)",
        "",
        "Inputs, in order:",
        *_aligned(_saved_and_tangents(half)),
        "",
        "Returns, in order:",
        *_aligned(_numbered(half.backward, _backward_meanings(half))),
        "",
        "Who calls it holds the saved tensors until it returns. The planned peak is that of a",
        "caller who gives them away, in a list to `backward_of`, as `runtime.py` does.",
    ]
    return _file("backward", half, half.backward, about)


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def _outputs(gm: fx.GraphModule) -> list[Any]:
    (node,) = gm.graph.find_nodes(op="output")
    return tree_leaves(node.args, is_leaf=lambda x: x is None)


def _primals(half: _Halves) -> Iterator[Line]:
    readers: dict[str, str] = {}
    for op in half.graph.ops:
        for name in op.inputs:
            readers.setdefault(name, op.where.module)
    for index, node in enumerate(_placeholders(half.forward)):
        module = readers.get(node.name)
        where = f", first read in {module}" if module else ""
        yield node.name, _shape(node), _primal(half, index) + where


def _primal(half: _Halves, index: int) -> str:
    if index in half.run.sources:
        run, output = half.run.sources[index]
        return f"output {output} of forward_{run}.py"
    if index in half.run.made:
        return "made between the graphs"
    return "parameter or buffer" if index in half.joint.parameter_inputs else "input"


def _numbered(gm: fx.GraphModule, meanings: Sequence[str]) -> Iterator[Line]:
    for index, (output, meaning) in enumerate(zip(_outputs(gm), meanings, strict=True)):
        yield f"{index}: {output}", _shape(output), meaning


def _forward_meanings(half: _Halves) -> list[str]:
    count = half.joint.num_fwd_outputs
    names = _names_by_desc(half)
    found: list[str] = []
    for index, desc in enumerate(_torch.output_descs(half.joint.module)[:count]):
        updated = names.get(_torch.mutated_by(desc))
        found.append(f"new value of {updated}" if updated else f"output {index}")
    return found + ["saved for the backward"] * (len(_outputs(half.forward)) - count)


def _saved_and_tangents(half: _Halves) -> Iterator[Line]:
    made = {str(x): i for i, x in reversed(list(enumerate(_outputs(half.forward))))}
    count = half.joint.num_fwd_outputs
    by_desc = {d: i for i, d in enumerate(_torch.output_descs(half.joint.module)[:count])}
    for node in _placeholders(half.backward):
        if _torch.is_tangent(node):
            output = by_desc.get(_torch.tangent_of(node))
            meaning = "tangent" if output is None else f"gradient of output {output}"
        else:
            number = made.get(node.name)
            meaning = "saved" if number is None else f"returned by the forward as {number}"
        yield node.name, _shape(node), meaning


def _backward_meanings(half: _Halves) -> list[str]:
    names = _names_by_desc(half)
    descs = _torch.output_descs(half.joint.module)[half.joint.num_fwd_outputs :]
    found = (names.get(_torch.gradient_of(desc)) for desc in descs)
    return [f"gradient of {name}" if name else "no gradient" for name in found]


def _names_by_desc(half: _Halves) -> dict[Any, str]:
    nodes = _placeholders(half.joint.module)
    return {_torch.input_desc(node): node.name for node in nodes}


def _updated(gm: fx.GraphModule) -> list[str]:
    """Placeholders that a graph writes to."""
    written = (
        node.args[0]
        for node in gm.graph.nodes
        if node.op == "call_function" and node.args and _torch.writes_arguments(node.target)
    )
    nodes = (x for x in written if isinstance(x, fx.Node) and x.op == "placeholder")
    return list(dict.fromkeys(node.name for node in nodes))


def _shape(x: Any) -> str:
    """A tensor's type and shape, as ``float32[8, 16]``."""
    value = x.meta.get("val") if isinstance(x, fx.Node) else x
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "" if value is None else type(value).__name__


def _aligned(lines: Iterable[Line]) -> list[str]:
    rows = list(lines)
    if not rows:
        return ["    nothing"]
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    return [f"    {a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows]


# --- the code -----------------------------------------------------------------------------------


def _file(name: str, half: _Halves, gm: fx.GraphModule, about: Sequence[str]) -> str:
    _check(gm)
    code = gm.graph.python_code("self", verbose=True)
    body = _with_modules(half, _with_constants(half, gm, _body(code.src)))
    used = {key: x for key, x in code.globals.items() if re.search(rf"\b{key}\b", body)}
    loads = _load_constants(gm)
    parts = [
        '"""' + "\n".join([*about, *_libraries(gm)]).replace("\\", "/") + '\n"""',
        "\n".join([*_imports(used, bool(loads)), *loads, ""]),
        *(f"{text}\n" for text in _replay(used)),
        "\n".join([_boxed_header(name, gm), *body.splitlines(), _returns(gm)]),
        "\n".join(["", *_unboxed(name, gm)]),
    ]
    return "\n\n".join(parts) + "\n"


def _check(gm: fx.GraphModule) -> None:
    for node in gm.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(gm)
        if not isinstance(value, Tensor):
            users = ", ".join(str(user.target) for user in node.users)
            raise FxrecalsError(
                f"{users} calls {node.target!r}, a {type(value).__name__}, which has no text "
                "form; the plan and its timeline are written, forward and backward are not"
            )
        if hasattr(value, "fake_mode"):
            raise FxrecalsError(
                f"the constant {node.target!r} was traced without its value, so the forward and "
                "backward cannot be written; the plan and its timeline are"
            )


def _body(src: str) -> str:
    """The lines between the header and the return of what fx writes."""
    _, _, rest = src.partition("def forward(self")
    lines = rest.splitlines()[1:]
    last = max(i for i, line in enumerate(lines) if line.startswith("    return"))
    kept = (line.rstrip() for line in lines[:last] if "# No stacktrace found" not in line)
    return "\n".join(kept)


def _boxed_header(name: str, gm: fx.GraphModule) -> str:
    taken = [f"        {node.target}," for node in _placeholders(gm)]
    return "\n".join(
        [f"def {name}_of(given):", "    (", *taken, "    ) = given", "    given.clear()"]
    )


def _unboxed(name: str, gm: fx.GraphModule) -> list[str]:
    """The function that takes its inputs one by one, and so holds them to its end."""
    annotated = [f'    {node.target}: "{_shape(node)}",' for node in _placeholders(gm)]
    names = [f"            {node.target}," for node in _placeholders(gm)]
    begin, end = f"    return {name}_of(", "    )"
    return [f"def {name}(", *annotated, "):", begin, "        [", *names, "        ]", end]


def _returns(gm: fx.GraphModule) -> str:
    return "\n".join(["    return (", *(f"        {x}," for x in _outputs(gm)), "    )"])


def _with_modules(half: _Halves, body: str) -> str:
    """Says in a comment where a module begins, and what runs again."""
    found: list[str] = []
    now = ""
    for line in body.splitlines():
        assigned = re.match(r"    (\w+)(?:: \"[^\"]*\")? = ", line)
        place = _module_of(half, assigned.group(1)) if assigned else ""
        if place and place != now:
            found.append(f"    # [{place}]")
            now = place
        found.append(line)
    return "\n".join(found)


def _module_of(half: _Halves, name: str) -> str:
    first = re.sub(r"_recompute(_\d+)?$", "", name)
    op = half.graph.by_name.get(first)
    if op is None or not op.where.module:
        return ""
    return op.where.module + (", again" if first != name else "")


# --- what the code needs ------------------------------------------------------------------------


def _imports(used: Mapping[str, Any], has_constants: bool) -> list[str]:
    lines = {_import(name, x) for name, x in used.items() if not _is_replay(x)}
    if has_constants:
        lines.add("from pathlib import Path")
    lines.add("import torch")
    # Names that stand for types come after the imports.
    return sorted(lines, key=lambda line: (not line.startswith(("from", "import")), line))


def _import(name: str, x: Any) -> str:
    if isinstance(x, float):
        return f"from math import {name}"
    if x is type(None):
        return f"{name} = type(None)"
    if isinstance(x, ModuleType):
        return f"import {x.__name__}" if x.__name__ == name else f"import {x.__name__} as {name}"
    called = x.__qualname__
    renamed = "" if called == name else f" as {name}"
    return f"from {x.__module__} import {called}{renamed}"


def _is_replay(x: Any) -> bool:
    return getattr(x, "__module__", "") == rng.__name__


def _replay(used: Mapping[str, Any]) -> list[str]:
    """The functions that note and replay generator states, if they are used."""
    names = {name: x.__name__ for name, x in used.items() if _is_replay(x)}
    if not names:
        return []
    functions = {
        node.name: node
        for node in ast.parse(inspect.getsource(rng)).body
        if isinstance(node, ast.FunctionDef)
    }
    texts = [ast.unparse(_briefly(functions[name])) for name in REPLAY]
    return [*texts, "\n".join(f"{name} = {called}" for name, called in sorted(names.items()))]


def _briefly(function: ast.FunctionDef) -> ast.FunctionDef:
    """A function with one line of docstring and no annotations, which may need imports."""
    doc = ast.get_docstring(function)
    if doc:
        function.body[0] = ast.Expr(ast.Constant(doc.partition("\n")[0]))
    every = function.args
    for argument in (*every.posonlyargs, *every.args, every.vararg, every.kwarg):
        if argument is not None:
            argument.annotation = None
    function.returns = None
    return function


def _libraries(gm: fx.GraphModule) -> list[str]:
    """What must be imported first, as it registers ops of its own."""
    targets = (node.target for node in gm.graph.nodes if node.op == "call_function")
    spaces = {getattr(target, "namespace", "") for target in targets}
    own = sorted(spaces - {"", "aten", "prims", "higher_order"})
    return (
        ["", *(f"Import what registers torch.ops.{space} first." for space in own)] if own else []
    )


def _load_constants(gm: fx.GraphModule) -> list[str]:
    if not gm.graph.find_nodes(op="get_attr"):
        return []
    return ["", f'CONSTANTS = torch.load(Path(__file__).with_name("{CONSTANTS}"))']


def _with_constants(half: _Halves, gm: fx.GraphModule, body: str) -> str:
    for node in gm.graph.find_nodes(op="get_attr"):
        key = half.run.prefix + str(node.target)
        body = re.sub(
            rf"= self\.{re.escape(str(node.target))}(?!\w)", f"= CONSTANTS[{key!r}]", body
        )
    return body


def _constants(half: _Halves) -> dict[str, Tensor]:
    return {
        half.run.prefix + str(node.target): operator.attrgetter(str(node.target))(gm)
        for gm in (half.forward, half.backward)
        for node in gm.graph.find_nodes(op="get_attr")
    }
