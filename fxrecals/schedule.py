"""A schedule: which op runs when. Everything else about a plan follows from it.

The forward part runs each forward op once, in the graph's order. The backward part runs each
backward op once, in the graph's order, and forward ops again, wherever and as often as it says.
A value is alive from a run of its op to its last use before the next run of that op: so to drop
a value between two uses is to run its op again before the second.

    >>> from fxrecals.ir import Graph, Op, Phase, Value, Kind
    >>> values = {n: Value(n, 8, n) for n in "abcd"} | {"x": Value("x", 8, "x", Kind.PRIMAL)}
    >>> ops = (
    ...     Op("f", "sin", ("x",), ("a",), Phase.FORWARD),
    ...     Op("g", "cos", ("a",), ("b",), Phase.FORWARD),
    ...     Op("h", "mul", ("a", "b"), ("c",), Phase.BACKWARD),
    ... )
    >>> graph = Graph(ops, values, outputs=("b", "c"))
    >>> keep = Schedule.keeping_everything(graph)
    >>> saved(graph, keep)
    ('a', 'b')
    >>> again = Schedule(("f", "g"), ("f", "h"))
    >>> saved(graph, again), recomputed(graph, again)
    (('b',), {'f': 1})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fxrecals.ir import Graph, Op, Phase


@dataclass(frozen=True)
class Schedule:
    """Names of ops in the order in which they run, split at the end of the forward."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the ops of the whole step, in order."""
        return self.forward + self.backward

    @staticmethod
    def keeping_everything(graph: Graph) -> Schedule:
        """The schedule without recompute."""
        return Schedule(
            tuple(op.name for op in graph.forward), tuple(op.name for op in graph.backward)
        )


@dataclass(frozen=True)
class Region:
    """A maximal run of recomputed ops in the backward.

    Attributes:
        ops: names of the ops that run again, in order.
        before: the backward op in front of which they run.
    """

    ops: tuple[str, ...]
    before: str


def reads(op: Op, again: bool) -> tuple[str, ...]:
    """The values that a run of `op` reads; a random op run again reads its generator state too."""
    if again and op.is_random:
        return (*op.inputs, op.outputs[-1])
    return op.inputs


def makes(op: Op, again: bool) -> tuple[str, ...]:
    """The values that a run of `op` makes; a random op run again makes no generator state."""
    if again and op.is_random:
        return op.outputs[:-1]
    return op.outputs


def saved(graph: Graph, schedule: Schedule) -> tuple[str, ...]:
    """Values made in the forward that the backward part reads before they are made again.

    Inputs of the step are not among them; forward outputs are, where the backward reads them.
    """
    made = {name for op in graph.forward for name in op.outputs}
    found: dict[str, None] = {}
    again: set[str] = set()
    for name in schedule.backward:
        op = graph.op(name)
        runs_again = op.phase is Phase.FORWARD
        for value in reads(op, runs_again):
            if value in made and value not in again:
                found[value] = None
        if runs_again:
            again.update(makes(op, True))
    order = {name: i for i, name in enumerate(graph.values)}
    return tuple(sorted(found, key=order.__getitem__))


def recomputed(graph: Graph, schedule: Schedule) -> Mapping[str, int]:
    """How often each forward op runs again, views left out, in order of first recompute."""
    counts: dict[str, int] = {}
    for name in schedule.backward:
        op = graph.op(name)
        if op.phase is Phase.FORWARD and not op.is_view:
            counts[name] = counts.get(name, 0) + 1
    return counts


def extra_seconds(graph: Graph, schedule: Schedule) -> float:
    """Estimated time of all the runs that the step would not need without a limit."""
    again = (graph.op(name) for name in schedule.backward)
    return sum(op.seconds for op in again if op.phase is Phase.FORWARD)


def extra_flops(graph: Graph, schedule: Schedule) -> int:
    """Floating point operations of all the runs that only the limit makes necessary."""
    again = (graph.op(name) for name in schedule.backward)
    return sum(op.flops for op in again if op.phase is Phase.FORWARD)


def regions(graph: Graph, schedule: Schedule) -> tuple[Region, ...]:
    """The recomputed runs of the backward, views left out, each with the op it runs for."""
    return tuple(_regions(graph, schedule))


def _regions(graph: Graph, schedule: Schedule) -> Iterator[Region]:
    ops: list[str] = []
    for name in schedule.backward:
        op = graph.op(name)
        if op.phase is Phase.BACKWARD:
            if ops:
                yield Region(tuple(ops), name)
            ops = []
        elif not op.is_view:
            ops.append(name)


def verify(graph: Graph, schedule: Schedule) -> None:
    """Raises `ValueError` with every reason why `schedule` is no schedule of `graph`."""
    wrong = list(_faults(graph, schedule))
    if wrong:
        raise ValueError("not a valid schedule:\n" + "\n".join(f"- {line}" for line in wrong))


def is_valid(graph: Graph, schedule: Schedule) -> bool:
    """Whether `verify` would accept `schedule`."""
    return next(_faults(graph, schedule), None) is None


def _faults(graph: Graph, schedule: Schedule) -> Iterator[str]:
    if schedule.forward != tuple(op.name for op in graph.forward):
        yield "the forward part is not the graph's forward"
    unknown = [name for name in schedule.runs if name not in graph.by_name]
    if unknown:
        yield f"unknown ops {unknown}"
        return
    own = tuple(n for n in schedule.backward if graph.op(n).phase is Phase.BACKWARD)
    if own != tuple(op.name for op in graph.backward):
        yield "the backward part does not run each backward op once, in order"
    for name in schedule.backward:
        op = graph.op(name)
        if op.phase is Phase.FORWARD and not op.may_run_again:
            yield f"op {name!r} may not run again"
    if schedule.backward and graph.op(schedule.backward[-1]).phase is Phase.FORWARD:
        yield "recompute after the last backward op"
