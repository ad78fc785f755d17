"""Small training steps and schedules of them, drawn by Hypothesis.

The graphs are shaped like those that are captured: a forward with fan-out and skips, then the
caller's loss, then a backward that walks the forward in reverse and reads of it what it needs.
All oddities that planning must bear are in them: views, views of inputs, ops with several
outputs, outputs that share a storage, random ops, ops that may not run again, values without
bytes, scratch, equal costs, outputs that nothing reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fxrecals.ir import Graph, Kind, Op, Phase, Trait, Value
from fxrecals.schedule import Schedule

RNG_BYTES = 3


@dataclass(frozen=True)
class Shape:
    """What a drawn graph may contain."""

    max_bytes: int
    devices: tuple[str, ...]
    views: bool
    multi_output: bool
    random: bool
    once: bool


@dataclass
class _Draft:
    """A graph in the making."""

    draw: DrawFn
    shape: Shape
    values: dict[str, Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def new_value(self, name: str, kind: Kind, device: str, nbytes: int | None = None) -> str:
        """A value in a storage of its own."""
        if nbytes is None:
            nbytes = self.draw(st.integers(0, self.shape.max_bytes))
        self.values[name] = Value(name, nbytes, name, kind, device)
        return name

    def new_view(self, name: str, base: str, kind: Kind) -> str:
        source = self.values[base]
        if source.kind is Kind.PRIMAL:
            kind = Kind.PRIMAL
        self.values[name] = replace(source, name=name, kind=kind)
        return name

    def readable(self, *kinds: Kind) -> list[str]:
        return [name for name, value in self.values.items() if value.kind in kinds]


@st.composite
def joint_graphs(
    draw: DrawFn,
    max_ops: int = 8,
    *,
    max_bytes: int = 12,
    devices: tuple[str, ...] = ("cpu",),
    views: bool = True,
    multi_output: bool = True,
    random: bool = True,
    once: bool = True,
) -> Graph:
    """Draws a valid `Graph` with at least one op in each half and the caller's loss between them.

    Args:
        max_ops: at most so many forward ops, and as many backward ops beside the loss.
        max_bytes: of one storage, and of one op's scratch.
        devices: where storages may live.
        views: whether some ops make views.
        multi_output: whether some ops make several values.
        random: whether some forward ops draw random numbers.
        once: whether some forward ops may not run again.
    """
    draft = _Draft(draw, Shape(max_bytes, devices, views, multi_output, random, once))
    for index in range(draw(st.integers(1, 3))):
        draft.new_value(f"primals_{index}", Kind.PRIMAL, draw(st.sampled_from(devices)))
    for index in range(draw(st.integers(1, max_ops))):
        _add_forward_op(draft, f"f{index}")
    held = draw(_some(draft.readable(Kind.ACTIVATION), 1, 2))
    tangents = _add_loss(draft, held)
    results = _add_backward(draft, tangents, max_ops)
    return Graph(tuple(draft.ops), draft.values, (*held, *tangents, *results))


def _some(names: Sequence[str], least: int, most: int) -> SearchStrategy[list[str]]:
    """Some of the names, each once, the newest most likely."""
    newest_first = list(reversed(names))
    return st.lists(
        st.sampled_from(newest_first),
        min_size=min(least, len(names)),
        max_size=min(most, len(names)),
        unique=True,
    )


def _add_forward_op(draft: _Draft, name: str) -> None:
    draw, shape = draft.draw, draft.shape
    inputs = draw(_some(draft.readable(Kind.PRIMAL, Kind.ACTIVATION), 1, 3))
    traits: set[Trait] = set()
    if shape.once and draw(st.integers(0, 5)) == 5:
        traits.add(draw(st.sampled_from((Trait.MUST_SAVE, Trait.OPAQUE, Trait.COLLECTIVE))))
    # The first op makes bytes, so that there is something to return.
    if shape.views and draft.ops and draw(st.integers(0, 3)) == 3:
        _add_views(draft, name, inputs, Phase.FORWARD, traits)
        return
    outputs = _new_outputs(draft, name, Kind.ACTIVATION, inputs[0])
    if shape.random and draw(st.integers(0, 4)) == 4:
        traits.add(Trait.RANDOM)
        device = draft.values[inputs[0]].device
        outputs.append(draft.new_value(f"{name}:rng", Kind.RNG_STATE, device, RNG_BYTES))
    _add_op(draft, name, "compute", inputs, outputs, Phase.FORWARD, traits)


def _add_views(
    draft: _Draft, name: str, inputs: list[str], phase: Phase, traits: set[Trait]
) -> list[str]:
    """An op all of whose outputs are views of its first input, as `transpose` or `split`."""
    kind = Kind.ACTIVATION if phase is Phase.FORWARD else Kind.BACKWARD
    outputs = [draft.new_view(out, inputs[0], kind) for out in _output_names(draft, name)]
    op = Op(name, "view", tuple(inputs[:1]), tuple(outputs), phase)
    draft.ops.append(replace(op, traits=frozenset(traits | {Trait.VIEW})))
    return outputs


def _output_names(draft: _Draft, name: str) -> list[str]:
    if not draft.shape.multi_output or draft.draw(st.integers(0, 3)) < 3:
        return [name]
    return [f"{name}:{index}" for index in range(draft.draw(st.integers(2, 3)))]


def _new_outputs(draft: _Draft, name: str, kind: Kind, like: str) -> list[str]:
    """Values in new storages, now and then in one that they share."""
    devices = draft.shape.devices
    device = draft.values[like].device
    if len(devices) > 1:
        device = draft.draw(st.sampled_from((device, *devices)))
    names = _output_names(draft, name)
    draft.new_value(names[0], kind, device)
    for other in names[1:]:
        if draft.shape.views and draft.draw(st.booleans()):
            draft.new_view(other, names[0], kind)
        else:
            draft.new_value(other, kind, device)
    return names


def _add_op(
    draft: _Draft,
    name: str,
    target: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    phase: Phase,
    traits: set[Trait],
) -> None:
    op = Op(
        name,
        target,
        tuple(inputs),
        tuple(outputs),
        phase,
        seconds=draft.draw(st.sampled_from((1.0, 2.0, 0.0, 3.5))),
        flops=draft.draw(st.integers(0, 5)),
        scratch_bytes=draft.draw(st.sampled_from((0, 0, 1, draft.shape.max_bytes))),
        traits=frozenset(traits),
    )
    draft.ops.append(op)


def _add_loss(draft: _Draft, held: Sequence[str]) -> list[str]:
    """What the caller does with the forward's outputs: at least one tangent comes back."""
    tangents = [
        draft.new_value(f"tangents_{index}", Kind.TANGENT, draft.values[name].device)
        for index, name in enumerate(held[: draft.draw(st.integers(1, len(held)))])
    ]
    _add_op(draft, "loss", "caller", held, tangents, Phase.BACKWARD, {Trait.CALLER})
    draft.ops[-1] = replace(draft.ops[-1], seconds=0.0, flops=0)
    return tangents


def _add_backward(draft: _Draft, tangents: Sequence[str], max_ops: int) -> list[str]:
    """Backward ops against the order of the forward; returns what the backward returns."""
    forward = [op for op in draft.ops if op.phase is Phase.FORWARD]
    made: list[str] = []
    count = 0
    for op in reversed(forward):
        for _ in range(draft.draw(st.sampled_from((1, 0, 2)))):
            if count < max_ops:
                made += _add_backward_op(draft, f"b{count}", op, [*tangents, *made])
                count += 1
    if not count:
        made += _add_backward_op(draft, "b0", forward[0], tangents)
    results = sorted(draft.draw(_some(made, 1, 3)), key=list(draft.values).index)
    _mark_gradients(draft, results)
    return results


def _add_backward_op(draft: _Draft, name: str, of: Op, upstream: Sequence[str]) -> list[str]:
    """One op that reads a gradient from upstream and what the forward op `of` read and made."""
    near = [n for n in (*of.inputs, *of.outputs) if draft.values[n].kind is not Kind.RNG_STATE]
    if draft.shape.views and draft.draw(st.integers(0, 4)) == 4:
        base = draft.draw(st.sampled_from([*reversed(upstream), *near]))
        return _add_views(draft, name, [base], Phase.BACKWARD, set())
    inputs = draft.draw(_some(upstream, 1, 2)) + draft.draw(_some(near, 0, 2))
    outputs = _new_outputs(draft, name, Kind.BACKWARD, inputs[0])
    _add_op(draft, name, "backward", inputs, outputs, Phase.BACKWARD, set())
    return outputs


def _mark_gradients(draft: _Draft, results: Sequence[str]) -> None:
    """Some results become gradients of parameters, with all that lives in their storage.

    A storage that the forward or the caller made stays what it is.
    """
    others = {v.storage for v in draft.values.values() if v.kind is not Kind.BACKWARD}
    for result in results:
        storage = draft.values[result].storage
        if storage in others or not draft.draw(st.booleans()):
            continue
        for name, value in draft.values.items():
            if value.storage == storage:
                draft.values[name] = replace(value, kind=Kind.GRADIENT)


@st.composite
def schedules(draw: DrawFn, graph: Graph, *, max_again: int = 4) -> Schedule:
    """Draws a valid `Schedule` of `graph`.

    Before each backward op after the caller's part, at most `max_again` forward ops run again:
    a stretch of the forward, or any in any order and number.
    """
    able = [op.name for op in graph.forward if op.may_run_again]
    backward: list[str] = []
    for index, op in enumerate(graph.backward):
        if able and index:
            backward += draw(_again(able, max_again))
        backward.append(op.name)
    return Schedule(tuple(op.name for op in graph.forward), tuple(backward))


def _again(able: Sequence[str], most: int) -> SearchStrategy[list[str]]:
    stretch = st.tuples(st.integers(0, len(able) - 1), st.integers(1, most)).map(
        lambda pair: list(able[pair[0] : pair[0] + pair[1]])
    )
    return st.just([]) | stretch | st.lists(st.sampled_from(able), max_size=most)


@st.composite
def graphs_with_schedules(draw: DrawFn, max_ops: int = 8) -> tuple[Graph, Schedule]:
    """Draws a graph and a valid schedule of it."""
    graph = draw(joint_graphs(max_ops))
    return graph, draw(schedules(graph))
