"""A lower bound on the extra time within a limit, by Lagrangian relaxation over lifetimes.

*Gaps.* Between two reads that every schedule has of a storage `v` (by ops of the graph, not by
recomputes) lies a gap. If `v` does not live through the whole gap, its op runs again within it.
Gaps of one storage are disjoint in time, so each costs a run of its own. Whatever a schedule
does, position `p` holds at least what it holds when everything is kept, less the storages whose
gap around `p` was cut.

*Price of a cut.* A run of the op of `v` needs what it reads. A storage `w` that no backward op
reads is dead in the backward unless it is held on or made again as well, for the sake of those
that read it; its bytes and seconds are divided among these. So to cut a gap costs the least of:
the op of `v` and holding its inputs through the gap; or the op, theirs, and holding what they
read; and so on. Every choice is a line, seconds + bytes x rent: switching between choices within
the gap is no cheaper than the best single one, because whatever is held at any moment must be a
choice whose seconds are still to be paid. What a backward op reads counts as available for free.

*Relaxation.* Let a byte held at position `p` cost a rent of `m[p] >= 0` seconds, and drop the
limit. Then every gap decides by itself, and for every `m`

    extra time  >=  sum of p:  m[p] * (kept bytes at p - limit)
                  - sum of gaps:  max(0, rent of the gap - cheapest choice)

because a schedule within the limit pays no more rent at `p` than `m[p] * limit`. The rents are
improved by subgradient steps (Polyak); the best value found is returned. Any rents prove a bound,
so that rounding within them does no harm.

Where cutting every gap around a position leaves it above the limit, no schedule exists: that gives
`lowest_peak`, the physical floor.

After Held and Karp 1971 (https://doi.org/10.1007/BF01584070) for the method.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fxrecals.solve.problem import Ints, Problem
from fxrecals.solve.state import State

Line = tuple[float, float]
"""Bytes held through the gap, and seconds."""

PATIENCE = 6
"""Rounds without progress before smaller steps are taken."""

MOST_LINES = 32
"""A storage with more choices than this counts as available for free."""


@dataclass(frozen=True)
class Gap:
    """A stretch of a storage's life that a schedule may cut out.

    Attributes:
        storage: what lives there.
        first: the first position strictly inside.
        last: the last position strictly inside.
        choices: the ways to cut it.
    """

    storage: int
    first: int
    last: int
    choices: tuple[Line, ...]


@dataclass(frozen=True)
class Bound:
    """What the relaxation says of a limit.

    Attributes:
        seconds: no schedule within the limit takes less extra time; infinite if there is none.
        cut: the gaps that are cut at these rents.
    """

    seconds: float
    cut: tuple[Gap, ...]


@dataclass(frozen=True)
class Relaxation:
    """What the bound of one load is made of, whatever the limit.

    Attributes:
        state: the state in which nothing runs again.
        load: index of the load.
    """

    state: State
    load: int = 0

    @property
    def nbytes(self) -> Ints:
        """Bytes of each storage."""
        return self.state.problem.loads[self.load].nbytes

    @cached_property
    def kept(self) -> NDArray[np.int64]:
        """Peak bytes within each position if nothing runs again."""
        return self.state.loads[self.load]

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Every gap that some recompute could cut."""
        return tuple(_gaps(self.state.problem, self.nbytes))

    @cached_property
    def least(self) -> NDArray[np.int64]:
        """Bytes within each position with every gap cut: no schedule has less."""
        change = np.zeros(len(self.kept) + 1, np.int64)
        for gap in self.gaps:
            change[gap.first] -= self.nbytes[gap.storage]
            change[gap.last + 1] += self.nbytes[gap.storage]
        return self.kept + np.cumsum(change[:-1])

    @property
    def lowest_peak(self) -> int:
        """Bytes below which no schedule can go."""
        return int(self.least.max(initial=0))

    def solve(self, limit: int, *, rounds: int = 300) -> Bound:
        """A proved lower bound on the extra seconds within `limit` bytes."""
        if self.lowest_peak > limit:
            return Bound(float("inf"), ())
        over = self.kept > limit
        if not over.any():
            return Bound(0.0, ())
        return _Dual(self, over, limit).solve(rounds)


class _Dual:
    """The bound as a function of the rents, one for each position over the limit.

    Rents are per unit of the limit, to keep the numbers near one another.
    """

    def __init__(self, relaxation: Relaxation, over: NDArray[np.bool_], limit: int) -> None:
        nbytes = relaxation.nbytes
        unit = max(1, limit)
        before = np.concatenate(([0], np.cumsum(over)))
        inside = [
            (gap, first, last)
            for gap in relaxation.gaps
            if (first := int(before[gap.first])) < (last := int(before[gap.last + 1]))
        ]
        self.gaps = [gap for gap, _, _ in inside]
        self.excess = (relaxation.kept[over] - limit) / unit
        self.first = np.array([first for _, first, _ in inside], np.int64)
        self.last = np.array([last for _, _, last in inside], np.int64)
        self.kept = np.array([nbytes[gap.storage] / unit for gap, _, _ in inside])
        counts = np.array([len(gap.choices) for gap, _, _ in inside], np.int64)
        self.starts = np.cumsum(counts) - counts
        self.owner = np.repeat(np.arange(len(inside)), counts)
        choices = [line for gap, _, _ in inside for line in gap.choices]
        self.held = np.array([held / unit for held, _ in choices])
        self.seconds = np.array([seconds for _, seconds in choices])

    def solve(self, rounds: int) -> Bound:
        """The best bound after some rounds of ascent.

        Polyak's step needs an estimate of how much higher the best bound is; it starts from what
        it takes to cut everything, and is halved whenever it seems out of reach.
        """
        if not len(self.first):
            return Bound(0.0, ())
        rents = best_rents = np.zeros(len(self.excess))
        best, margin, stalled = 0.0, self.all_cut(), 0
        for _ in range(rounds):
            value, slope, _ = self.at(rents)
            stalled = 0 if value > best + 0.01 * margin else stalled + 1
            if value > best:
                best, best_rents = value, rents
            if stalled > PATIENCE:
                margin, stalled, rents = margin / 2, 0, best_rents
                value, slope, _ = self.at(rents)
            norm = float(slope @ slope)
            if norm == 0.0 or margin < 1e-4 * best:
                break
            rents = np.maximum(0.0, rents + (best + margin - value) / norm * slope)
        cut = np.flatnonzero(self.at(best_rents)[2])
        return Bound(max(best, 0.0), tuple(self.gaps[k] for k in cut))

    def all_cut(self) -> float:
        """Seconds to cut every gap by its dearest choice."""
        return float(np.maximum.reduceat(self.seconds, self.starts).sum())

    def at(
        self, rents: NDArray[np.float64]
    ) -> tuple[float, NDArray[np.float64], NDArray[np.bool_]]:
        """The bound at these rents, the direction in which it grows, and which gaps are cut."""
        paid = np.concatenate(([0.0], np.cumsum(rents)))
        rent = paid[self.last] - paid[self.first]
        cost = self.seconds + self.held * rent[self.owner]
        cheapest = np.minimum.reduceat(cost, self.starts)
        gain = self.kept * rent - cheapest
        cut = gain > 0.0
        chosen = np.flatnonzero(cost <= cheapest[self.owner])
        chosen = chosen[np.unique(self.owner[chosen], return_index=True)[1]]
        freed = np.where(cut, self.kept - self.held[chosen], 0.0)
        size = len(rents) + 1
        change = np.bincount(self.last, freed, size) - np.bincount(self.first, freed, size)
        slope = self.excess + np.cumsum(change[:-1])
        slope[(rents <= 0.0) & (slope < 0.0)] = 0.0
        return float(rents @ self.excess - gain[cut].sum()), slope, cut


def _gaps(problem: Problem, nbytes: Ints) -> Iterable[Gap]:
    choices = _Choices(problem, nbytes)
    for storage, maker in enumerate(problem.maker):
        if not nbytes[storage] or not problem.may_run_again[maker]:
            continue
        if problem.rng[maker] == storage:
            continue  # it is not there when everything is kept
        held = min(problem.held.get(storage, ()), default=problem.end)
        reads = sorted({maker, *problem.readers[storage], *problem.looked.get(storage, ())})
        for before, after in pairwise(reads):
            if after == before + 1 or after > held:
                continue
            stages = range(max(before + 1, problem.forward_count), after + 1)
            if any(problem.may_run_at(maker, stage) for stage in stages):
                found = choices.of(storage, before)
                yield Gap(storage, before + 1, after - 1, tuple(found))


class _Choices:
    """The ways to make a storage again, as lines.

    The cost of an op is charged to one of the storages that it makes, the largest that matters;
    the bytes and seconds of a storage that no backward op reads, in equal shares to the ops that
    read it and matter. An op matters if a storage that it makes is read in the backward, or by an
    op that matters.
    """

    def __init__(self, problem: Problem, nbytes: Ints) -> None:
        self.problem = problem
        self.nbytes = nbytes
        self.last_read = problem.last_forward_reads
        self.is_free = [
            bool(readers and readers[-1] >= problem.forward_count) or storage in problem.held
            for storage, readers in enumerate(problem.readers)
        ]
        self.charged = [-1] * problem.forward_count
        self.share = [0.0] * len(nbytes)
        for op in reversed(range(problem.forward_count)):
            self._settle(op)
        self.known: dict[int, tuple[Line, ...]] = {}

    def _settle(self, op: int) -> None:
        """Decides who pays for `op`; those that read what it makes are settled already."""
        nbytes, readers = self.nbytes, self.problem.readers
        mattering: list[int] = []
        for storage in self.problem.makes[op]:
            payers = sum(self.charged[k] >= 0 for k in readers[storage] if k < len(self.charged))
            self.share[storage] = 1.0 if self.is_free[storage] else 1.0 / max(payers, 1)
            if self.is_free[storage] or payers:
                mattering.append(storage)
        if mattering and self.problem.may_run_again[op]:
            self.charged[op] = max(mattering, key=lambda s: (nbytes[s], -s))

    def of(self, storage: int, before: int) -> tuple[Line, ...]:
        """The choices for a gap of `storage` that starts after position `before`."""
        maker = self.problem.maker[storage]
        if self.charged[maker] != storage:
            return ((0.0, 0.0),)
        if all(self.last_read[s] <= before for s in self._ancestors(maker)):
            return self._run(maker)
        return ((0.0, self.problem.ops[maker].seconds),)

    def _ancestors(self, op: int) -> Iterable[int]:
        """Storages that are not free and that a run of `op` needs, if need be."""
        pending, seen = [op], set[int]()
        while pending:
            for storage in self.problem.reads[pending.pop()]:
                if not self.is_free[storage] and storage not in seen:
                    seen.add(storage)
                    pending.append(self.problem.maker[storage])
        return seen

    def _run(self, op: int) -> tuple[Line, ...]:
        """The choices for a run of `op`."""
        if op not in self.known:
            lines: tuple[Line, ...] = ((0.0, self.problem.ops[op].seconds),)
            for storage in self.problem.reads[op]:
                if not self.is_free[storage]:
                    added = _added(lines, self._have(storage))
                    lines = added if len(added) <= MOST_LINES else lines
            self.known[op] = lines
        return self.known[op]

    def _have(self, storage: int) -> tuple[Line, ...]:
        """The choices for one of the ops that read `storage` to find it alive."""
        share, maker = self.share[storage], self.problem.maker[storage]
        lines: list[Line] = [(float(self.nbytes[storage]), 0.0)]
        if not self.problem.may_run_again[maker]:
            pass
        elif self.charged[maker] == storage:
            lines += self._run(maker)
        else:
            lines = [(0.0, 0.0)]
        return _envelope([(share * held, share * seconds) for held, seconds in lines])


def _added(some: tuple[Line, ...], others: tuple[Line, ...]) -> tuple[Line, ...]:
    """The lines of the sum of two functions, each the least of its lines."""
    return _envelope([(a + c, b + d) for a, b in some for c, d in others])


def _envelope(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Those lines that are the least for some rent >= 0, the flattest first."""
    kept: list[Line] = []
    for held, seconds in sorted(lines):
        if kept and seconds >= kept[-1][1]:
            continue
        while len(kept) > 1 and _is_below(kept[-2], (held, seconds), kept[-1]):
            kept.pop()
        kept.append((held, seconds))
    return tuple(kept)


def _is_below(flat: Line, steep: Line, middle: Line) -> bool:
    """Whether the lesser of two lines is nowhere above a third, whose slope lies between."""
    left = (middle[0] - flat[0]) * (flat[1] - steep[1])
    right = (steep[0] - flat[0]) * (flat[1] - middle[1])
    return left >= right
