"""What an exported folder needs to train without fxrecals, beside its forward and backward.

``model.json`` says which tensors the two take, and ``runtime.py``, which is `fxrecals.runtime`
word for word, runs them as one op of autograd. ``graph.dot`` is the plan for Graphviz.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fxrecals import runtime
from fxrecals.errors import FxrecalsError
from fxrecals.formats import format_bytes
from fxrecals.ir import Op, Phase
from fxrecals.plans import Plan
from fxrecals.report import short_name
from fxrecals.schedule import recomputed, saved

COLORS = {"kept": "#9ecae1", "again": "#fdae6b", "forward": "#ffffff", "backward": "#eeeeee"}


def load(folder: str | Path, model: nn.Module | None = None) -> Any:
    """What `Plan.export` wrote: the plan, or, for a model, a function that trains it so.

    The function runs the Python in the folder: load what you trust. It shares the parameters of
    the model; see `fxrecals.runtime`.

    Args:
        folder: that the plan was exported to.
        model: the model that was planned, whatever its weights.

    Raises:
        FxrecalsError: there is no plan in the folder, it cannot be run from its files, or it is of
            another model; the message names the difference.

    >>> import tempfile, torch, fxrecals
    >>> model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    >>> plan = fxrecals.plan(model, x, "100%")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = plan.export(folder)
    ...     step = load(folder, model)
    ...     load(folder) == plan
    True
    >>> torch.equal(step(x), model(x))
    True
    """
    path = Path(folder)
    if model is not None:
        try:
            return runtime.attach(model, path)
        except FileNotFoundError as error:
            raise FxrecalsError(
                f"{error.filename} is missing: what works is a folder that "
                "Plan.export wrote, of a plan made in the same process"
            ) from None
        except ValueError as error:
            raise FxrecalsError(str(error)) from error
    try:
        return Plan.from_json((path / "plan.json").read_text())
    except FileNotFoundError:
        raise FxrecalsError(
            f"there is no plan.json in {path}; what works: a folder that Plan.export wrote"
        ) from None


def write_runtime(folder: Path, about: Mapping[str, Any]) -> None:
    """Writes ``model.json`` and ``runtime.py``."""
    text = json.dumps(about, indent=1)
    (folder / "model.json").write_text(text + "\n")
    (folder / "runtime.py").write_text(Path(runtime.__file__).read_text())


def dot(plan: Plan) -> str:
    """The plan as Graphviz draws it: blue is kept for the backward, orange runs again.

    Views are left out; what reads one reads what it is a view of.
    """
    graph = plan.graph
    again, kept = recomputed(graph, plan.schedule), set(saved(graph, plan.schedule))
    lines = ["digraph plan {", '  node [shape=box, style=filled, fontname="sans-serif"];']
    lines += [_node(plan, op, again, kept) for op in graph.ops if not op.is_view]
    lines += dict.fromkeys(_edges(plan))
    return "\n".join([*lines, "}"]) + "\n"


def _node(plan: Plan, op: Op, again: Mapping[str, int], kept: set[str]) -> str:
    kind = op.phase.value
    if op.phase is Phase.FORWARD and kept.intersection(op.outputs):
        kind = "kept"
    if op.name in again:
        kind = "again"
    nbytes = sum(
        {v.storage: v.nbytes for v in map(plan.graph.values.get, op.outputs) if v}.values()
    )
    where = f"\\n{op.where.module}" if op.where.module else ""
    label = f"{short_name(op)}{where}\\n{format_bytes(nbytes)}".replace('"', "'")
    return f'  "{op.name}" [label="{label}", fillcolor="{COLORS[kind]}", tooltip="{op.name}"];'


def _edges(plan: Plan) -> Iterator[str]:
    for op in plan.graph.ops:
        if op.is_view:
            continue
        for name in op.inputs:
            source = plan.graph.producer.get(name)
            while source is not None and source.is_view:
                source = plan.graph.producer.get(source.inputs[0])
            if source is not None:
                yield f'  "{source.name}" -> "{op.name}";'
