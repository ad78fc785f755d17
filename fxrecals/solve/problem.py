"""A graph as solvers see it: views folded away, ops and storages by number.

*Positions.* The forward ops that are no views come first, in order, then every backward op. Op
``k`` runs at position ``k``. A backward position is a *stage*: the ops that run again in front of
that backward op, in forward order, then the op itself. Recompute just in time is no loss for the
recomputed value, and forward order inside a stage makes any set of (op, stage) pairs a valid
schedule: a value that is not made again simply lives on.

*Views* cost nothing, so they are no decision. `Problem.schedule` puts them back: a view is made
again where its reader would otherwise read an older storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxrecals.errors import FxrecalsError
from fxrecals.ir import Graph, Op, Phase, Trait, is_charged
from fxrecals.schedule import Schedule
from fxrecals.timeline import scratch_device

Ints = tuple[int, ...]


MOST_BYTES = 2**62
"""In all values and scratch of a graph: sums of more would not fit 64 bits."""


@dataclass(frozen=True)
class Load:
    """What one limit bounds.

    Attributes:
        device: whose bytes count, or "" for those of all.
        nbytes: of each storage; 0 where it does not count.
        scratch: of each position; 0 where it does not count.
        offset: bytes added to every position, so that all loads share the largest limit.
    """

    device: str
    nbytes: Ints
    scratch: Ints
    offset: int = 0


@dataclass(frozen=True)
class Problem:
    """Everything a solver needs, by number.

    Attributes:
        graph: what it was made from.
        ops: the op at each position.
        forward_count: how many positions are forward ops; the others are stages.
        reads: storages read at each position, views resolved.
        makes: storages made at each position.
        nbytes: bytes of each storage.
        loads: what is limited: all bytes, or those of each device that has a limit.
        maker: position at which each storage is first made.
        readers: positions of the ops that read each storage, ascending.
        looks: for each forward position, storages of which a view is made right after it. That
            is a read too, but one that does not happen again when the op runs again.
        held: for each storage that the caller holds to the end, the positions at which the copy
            is made that it holds: a forward output's first, or a backward view's.
        rng: for each position, the storage of its generator state, or -1.
        may_run_again: for each position, whether its op may run again.
        pinned: for each position, the (first, last) positions between which its op may not run
            again because a backward view of what it made is still read.
    """

    graph: Graph
    ops: tuple[Op, ...]
    forward_count: int
    reads: tuple[Ints, ...]
    makes: tuple[Ints, ...]
    nbytes: Ints
    loads: tuple[Load, ...]
    maker: Ints
    readers: tuple[Ints, ...]
    looks: Mapping[int, Ints]
    held: Mapping[int, Ints]
    rng: Ints
    may_run_again: tuple[bool, ...]
    pinned: Mapping[int, tuple[tuple[int, int], ...]]

    @property
    def end(self) -> int:
        """The position after the last one: to this the caller holds what it holds."""
        return len(self.ops)

    @cached_property
    def looked(self) -> Mapping[int, Ints]:
        """The forward positions right after which a view of each storage is made."""
        found: dict[int, list[int]] = {}
        for position, storages in self.looks.items():
            for storage in storages:
                found.setdefault(storage, []).append(position)
        return {storage: _numbers(positions) for storage, positions in found.items()}

    @cached_property
    def last_forward_reads(self) -> Ints:
        """Where the forward reads each storage last, by an op or for a view; -1 if it does not."""
        reads = zip(self.readers, map(self.looked.get, range(len(self.nbytes))), strict=True)
        return tuple(
            max((k for k in (*readers, *(looks or ())) if k < self.forward_count), default=-1)
            for readers, looks in reads
        )

    def may_run_at(self, op: int, stage: int) -> bool:
        """Whether `op` may run again at `stage`."""
        if not self.may_run_again[op] or stage < self.forward_count:
            return False
        if Trait.CALLER in self.ops[stage].traits:
            return False  # there the caller is in control
        return not any(first < stage <= last for first, last in self.pinned.get(op, ()))

    def schedule(self, runs: Mapping[int, Iterable[int]]) -> Schedule:
        """The schedule in which each op of `runs` runs again at its stages."""
        stages: dict[int, list[int]] = {}
        for op in sorted(runs):
            for stage in runs[op]:
                stages.setdefault(stage, []).append(op)
        emitter = _Emitter(self)
        for stage in range(self.forward_count, self.end):
            for op in stages.get(stage, ()):
                emitter.run(self.ops[op], again=True)
            emitter.run(self.ops[stage], again=False)
        return Schedule(tuple(op.name for op in self.graph.forward), tuple(emitter.names))


def make_problem(graph: Graph, limits: Mapping[str, int] | None = None) -> Problem:
    """Folds the views of `graph` away and numbers what is left.

    With `limits`, bytes by device, each of these devices is a load of its own, as if all had the
    largest of the limits; other devices have none.
    """
    charged = _charged_storages(graph)
    positions = [op for op in graph.ops if op.phase is Phase.BACKWARD or not op.is_view]
    at = {op.name: k for k, op in enumerate(positions)}
    storages: dict[str, int] = {}
    nbytes: list[int] = []
    maker: list[int] = []
    makes: list[Ints] = []
    reads: list[Ints] = []
    rng: list[int] = []
    for k, op in enumerate(positions):
        sources = {graph.values[name].storage for name in op.inputs}
        reads.append(_numbers(storages[s] for s in sources if s in storages))
        fresh = dict.fromkeys(graph.values[name].storage for name in op.outputs)
        made = [s for s in fresh if s in charged and s not in storages]
        for s in made:
            storages[s] = len(storages)
            nbytes.append(charged[s])
            maker.append(k)
        makes.append(_numbers(storages[s] for s in made))
        state = op.outputs[-1] if op.is_random else None
        rng.append(storages[graph.values[state].storage] if state else -1)
    readers: list[list[int]] = [[] for _ in storages]
    for k, read in enumerate(reads):
        for s in read:
            readers[s].append(k)
    if sum(nbytes) + sum(op.scratch_bytes for op in positions) >= MOST_BYTES:
        raise FxrecalsError(f"the values of the graph have {MOST_BYTES} bytes or more")
    return Problem(
        graph=graph,
        ops=tuple(positions),
        forward_count=sum(op.phase is Phase.FORWARD for op in positions),
        reads=tuple(reads),
        makes=tuple(makes),
        nbytes=tuple(nbytes),
        loads=_loads(graph, positions, storages, nbytes, limits),
        maker=tuple(maker),
        readers=tuple(map(tuple, readers)),
        looks=_looks(graph, storages),
        held=_held(graph, positions, storages),
        rng=tuple(rng),
        may_run_again=_may_run_again(graph, positions),
        pinned=_pinned(graph, at),
    )


def _loads(
    graph: Graph,
    positions: Sequence[Op],
    storages: Mapping[str, int],
    nbytes: Sequence[int],
    limits: Mapping[str, int] | None,
) -> tuple[Load, ...]:
    if limits is None:
        return (Load("", tuple(nbytes), tuple(op.scratch_bytes for op in positions)),)
    lives = {value.storage: value.device for value in graph.values.values()}
    most = max(limits.values())
    return tuple(
        Load(
            device,
            tuple(nbytes[k] * (lives[storage] == device) for storage, k in storages.items()),
            tuple(op.scratch_bytes * (scratch_device(graph, op) == device) for op in positions),
            most - limit,
        )
        for device, limit in sorted(limits.items())
    )


def _looks(graph: Graph, storages: Mapping[str, int]) -> dict[int, Ints]:
    position = -1
    found: dict[int, list[int]] = {}
    for op in graph.forward:
        if not op.is_view:
            position += 1
            continue
        sources = (graph.values[name].storage for name in op.inputs)
        found.setdefault(position, []).extend(storages[s] for s in sources if s in storages)
    return {position: _numbers(seen) for position, seen in found.items() if seen}


def _held(graph: Graph, positions: Sequence[Op], storages: Mapping[str, int]) -> dict[int, Ints]:
    outputs = frozenset(graph.outputs)
    found: dict[int, list[int]] = {}
    first = {
        storage: k for k, op in reversed(list(enumerate(positions))) for storage in _made(graph, op)
    }
    at = {op.name: k for k, op in enumerate(positions)}
    for op in graph.ops:
        for name in op.outputs:
            storage = graph.values[name].storage
            if name in outputs and storage in storages:
                position = at[op.name] if op.phase is Phase.BACKWARD else first[storage]
                found.setdefault(storages[storage], []).append(position)
    return {storage: tuple(sorted(set(at))) for storage, at in found.items()}


def _made(graph: Graph, op: Op) -> set[str]:
    return {graph.values[name].storage for name in op.outputs}


def _read(graph: Graph, op: Op) -> set[str]:
    return {graph.values[name].storage for name in op.inputs}


def _numbers(found: Iterable[int]) -> Ints:
    return tuple(sorted(set(found)))


def _charged_storages(graph: Graph) -> dict[str, int]:
    """Bytes of the storages that count, by name; one kind that is not charged exempts it."""
    exempt = {v.storage for v in graph.values.values() if not is_charged(v)}
    return {v.storage: v.nbytes for v in graph.values.values() if v.storage not in exempt}


def _may_run_again(graph: Graph, positions: Sequence[Op]) -> tuple[bool, ...]:
    """Which ops may run again.

    Beside the op itself, everything that makes aliases of its storages must be a view that is
    free to run again. An op whose outputs are partly aliases is kept.
    """
    blocked: set[str] = (
        set()
    )  # storages that something shows which would go on showing the old copy
    for op in graph.forward:
        if not (op.is_view and op.may_run_again):
            blocked |= _made(graph, op) & _read(graph, op)

    def free(op: Op) -> bool:
        return op.may_run_again and not op.is_view and not _made(graph, op) & blocked

    return tuple(free(op) for op in positions)


def _pinned(graph: Graph, at: Mapping[str, int]) -> dict[int, tuple[tuple[int, int], ...]]:
    """Where backward views of forward storages are alive: a backward op never runs again."""
    maker: dict[str, int] = {}
    for op in graph.forward:
        if not op.is_view:
            for name in op.outputs:
                maker.setdefault(graph.values[name].storage, at[op.name])
    born: dict[str, int] = {}
    spans: dict[int, list[tuple[int, int]]] = {}
    last: dict[str, int] = {}
    for op in graph.backward:
        for name in op.inputs:
            if name in born:
                last[name] = at[op.name]
        for name in op.outputs:
            if graph.values[name].storage in maker:
                born[name] = at[op.name]
    held = frozenset(graph.outputs)
    for name, first in born.items():
        until = len(graph.ops) if name in held else last.get(name, first)
        spans.setdefault(maker[graph.values[name].storage], []).append((first, until))
    return {op: tuple(found) for op, found in spans.items()}


class _Emitter:
    """Writes the backward part of a schedule, re-making views whose storage was made again."""

    def __init__(self, problem: Problem) -> None:
        self.graph = problem.graph
        self.names: list[str] = []
        self.copy: dict[str, int] = {}  # storage -> how often it was made again
        self.seen: dict[str, int] = {}  # value -> the copy of its storage that it shows

    def run(self, op: Op, again: bool) -> None:
        """Adds a run, and before it the views that it reads and that show an old copy."""
        for name in op.inputs:
            self.refresh(name)
        self.names.append(op.name)
        if again:
            for storage in {self.graph.values[name].storage for name in op.outputs}:
                self.copy[storage] = self.copy.get(storage, 0) + 1
        for name in op.outputs:
            self.seen[name] = self.copy.get(self.graph.values[name].storage, 0)

    def refresh(self, name: str) -> None:
        """Makes a view again, and the views that it is made of, if it shows an old copy."""
        pending = [name]
        while pending:
            op = self.graph.producer.get(pending[-1])
            if op is None or self._is_current(pending[-1]) or not op.is_view:
                pending.pop()
                continue
            stale = [n for n in op.inputs if self._is_stale_view(n)]
            if stale:
                pending.extend(stale)
                continue
            self.run_view(op)
            pending.pop()

    def run_view(self, op: Op) -> None:
        """Adds a run of a view."""
        self.names.append(op.name)
        for name in op.outputs:
            self.seen[name] = self.copy.get(self.graph.values[name].storage, 0)

    def _is_current(self, name: str) -> bool:
        copy = self.copy.get(self.graph.values[name].storage, 0)
        return self.seen.get(name, 0) == copy

    def _is_stale_view(self, name: str) -> bool:
        op = self.graph.producer.get(name)
        return op is not None and op.is_view and not self._is_current(name)
