"""The solver that everything else calls: many starts, one judge, the best answer.

`Frontier` explores a graph once, whatever the limit: everything kept, chains of blocks (`chain`),
and greedy descents from the lowest of them, down to the floor. Given a limit, it starts from the
explored states that fit, from the nearest that do not, lowered, from what the chains say of this
limit, and from what the relaxation cuts (`bound`); spends on each what is left; and improves the
best of them by local search. All work is counted in toggles, not in seconds, so that the same
graph and limit give the same schedule on every machine, unless a deadline cuts the work short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from time import monotonic

from fxrecals.errors import InfeasibleLimitError
from fxrecals.schedule import Schedule
from fxrecals.solve import bound, greedy, refine
from fxrecals.solve.chain import Chain, cuts, dearest
from fxrecals.solve.problem import Problem
from fxrecals.solve.state import Snapshot, State

BLOCKS = (16, 48)
"""Into how many blocks the forward is cut."""

ONCE = (0.0, 0.1, 0.2, 0.35)
"""Shares of the forward's bytes whose ops, the dearest for them, do not run again."""

CHAINED = 12
"""At how many limits each chain is asked before a limit is given."""

DESCENTS = 3
"""How many states are brought down to their floor."""

LOWERED = 4
"""How many explored states above the limit are lowered to it."""

SPENT = 6
"""How many states within the limit are refined."""

IMPROVED = 3
"""How many of the best are improved by local search."""

DEAREST = 4.0
"""Extra time, in steps, beyond which no lower floor is sought: nobody trains that slowly."""

Progress = Callable[[float, float, float], None]
"""Told of each better answer: its extra seconds, the lower bound, seconds spent searching."""


@dataclass(frozen=True)
class Point:
    """An explored set of recomputes: its peak, its extra time, its content."""

    peak_bytes: int
    seconds: float
    runs: Snapshot

    @staticmethod
    def of(state: State) -> Point:
        """What a state amounts to."""
        return Point(state.peak_bytes, state.seconds, state.snapshot())


@dataclass(frozen=True)
class Clock:
    """How long a search may take.

    Attributes:
        deadline: seconds after `start`.
        start: by `time.monotonic`.
    """

    deadline: float = float("inf")
    start: float = field(default_factory=monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return monotonic() - self.start

    def goes_on(self) -> bool:
        """Whether there is time left."""
        return self.elapsed < self.deadline


@dataclass(frozen=True)
class Frontier:
    """What is known of a graph before a limit is given.

    Attributes:
        problem: the graph, by number.
        effort: toggles that one descent, or one local search, may take.
        clock: how long all of it may take; what was begun is brought to an end.
    """

    problem: Problem
    effort: int = 40_000
    clock: Clock = field(default_factory=Clock)

    @cached_property
    def relaxation(self) -> bound.Relaxation:
        """What lower bounds come from."""
        return bound.Relaxation(self.problem)

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """The graph as chains of blocks, the coarsest first."""
        cut = dict.fromkeys(cuts(self.problem, blocks) for blocks in BLOCKS)
        once = dict.fromkeys(dearest(self.problem, share) for share in ONCE)
        return tuple(Chain(self.problem, *each) for each in product(cut, once))

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """Everything explored, the lowest peak first; the cheapest first among equal peaks."""
        kept = Point.of(State(self.problem))
        starts = list(self._chained())
        found = [kept, *starts]
        dearest = DEAREST * max(self.problem.graph.seconds, 1e-9)
        lowest = sorted(starts, key=lambda p: (p.peak_bytes, p.seconds))[:DESCENTS]
        for start in [kept, *lowest]:
            state = State(self.problem, start.runs)
            for runs in greedy.descend(state, effort=self.effort, dearest=dearest):
                found.append(Point(state.peak_bytes, state.seconds, runs))
            if not self.clock.goes_on():
                break
        return tuple(sorted(found, key=lambda p: (p.peak_bytes, p.seconds)))

    def _chained(self) -> Iterator[Point]:
        for chain in self.chains:
            floor = chain.floor_bytes
            if not floor:
                continue
            ratio = max(1.0, self.baseline_bytes / floor) ** (1 / CHAINED)
            limits = (int(floor * ratio**k) for k in range(CHAINED))
            for runs in _distinct(map(chain.runs, limits)):
                yield Point.of(State(self.problem, runs))

    @property
    def floor(self) -> Point:
        """The explored point of the lowest peak."""
        return self.points[0]

    @cached_property
    def baseline_bytes(self) -> int:
        """The peak when everything is kept."""
        return State(self.problem).peak_bytes

    def bound_seconds(self, limit: int) -> float:
        """Seconds of extra time that every schedule within `limit` bytes takes at least."""
        return self.relaxation.solve(limit).seconds

    def cheapest(self, limit: int, progress: Progress | None = None) -> Point | None:
        """The cheapest point found within `limit` bytes, or None below the floor."""
        if self.baseline_bytes <= limit:
            return Point.of(State(self.problem))
        if limit < self.floor.peak_bytes:
            return None
        best: list[Point] = []
        for point in self._within(limit):
            best = sorted([*best, point], key=lambda p: p.seconds)[:IMPROVED]
        state = [self._improved(point, limit) for point in best]
        return min(state, key=lambda p: p.seconds)

    def _within(self, limit: int) -> Iterator[Point]:
        within = sorted((p for p in self.points if p.peak_bytes <= limit), key=lambda p: p.seconds)
        dearest = 1.5 * within[0].seconds
        for point in within[:SPENT]:
            yield self._spent(point, limit)
        above = [p.runs for p in self.points if p.peak_bytes > limit][:LOWERED]
        chained = [runs for chain in self.chains if (runs := chain.runs(limit)) is not None]
        for runs in _distinct([*chained, self._relaxed(limit), *above]):
            state = State(self.problem, runs)
            if greedy.lower(state, limit, effort=self.effort, dearest=dearest):
                yield self._spent(Point.of(state), limit)

    def _relaxed(self, limit: int) -> Snapshot:
        """What the relaxation cuts, whether that fits or not."""
        state, problem = State(self.problem), self.problem
        cut = self.relaxation.solve(limit).cut
        for gap in sorted(cut, key=lambda gap: (gap.last, gap.storage)):
            stretch = greedy.Eviction(gap.storage, gap.first - 1, gap.last + 1)
            able = problem.may_run_at(problem.maker[gap.storage], stretch.before)
            if able and greedy.is_possible(state, stretch):
                for run in greedy.recompute_for(state, stretch):
                    state.toggle(*run)
        return state.snapshot()

    def _improved(self, point: Point, limit: int) -> Point:
        state = State(self.problem, point.runs)
        refine.improve(state, limit, effort=self.effort, go_on=self.clock.goes_on)
        return Point.of(state)

    def curve(self, limits: Sequence[int]) -> dict[int, Point]:
        """The cheapest point within each limit, the largest limit first.

        A larger limit never costs more: what a tighter one found, it may take too.
        """
        found: dict[int, Point] = {}
        best: Point | None = None
        for limit in sorted(limits):
            point = self.cheapest(limit)
            if best is None or (point is not None and point.seconds <= best.seconds):
                best = point
            if best is not None:
                found[limit] = best
        return dict(reversed(found.items()))

    def _spent(self, point: Point, limit: int) -> Point:
        found: list[Point] = []
        for worth in refine.WORTHS:
            state = State(self.problem, point.runs)
            refine.spend(state, limit, worth, effort=self.effort // 4)
            found.append(Point.of(state))
        return min(found, key=lambda p: p.seconds)


def _distinct(found: Iterable[Snapshot | None]) -> Iterator[Snapshot]:
    seen: list[Snapshot] = []
    for runs in found:
        if runs is not None and runs not in seen:
            seen.append(runs)
            yield runs


def solve(frontier: Frontier, limit: int) -> Schedule:
    """The cheapest schedule within `limit` bytes that a frontier offers."""
    point = frontier.cheapest(limit)
    if point is None:
        raise infeasible(frontier, limit)
    return frontier.problem.schedule(point.runs)


def infeasible(frontier: Frontier, limit: int) -> InfeasibleLimitError:
    """The error that names the floor of a frontier and the op that sets it."""
    floor = State(frontier.problem, frontier.floor.runs)
    op = frontier.problem.ops[int(floor.total.argmax())]
    return InfeasibleLimitError(
        limit_bytes=limit,
        floor_bytes=floor.peak_bytes,
        op=op.name,
        module=op.where.module,
        source=op.where.source,
    )
