"""The solver that everything else calls: many starts, one judge, the best answer.

`Frontier` explores a graph once, whatever the limit: everything kept, segmented starts of every
length (`segments`), and greedy descents from the most promising of them, down to the floor. Given
a limit, it takes the explored states that fit, lowers the nearest that do not, spends on each
what is left, and returns the cheapest. All work is counted in toggles, not in seconds, so that
the same graph and limit give the same schedule on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fxrecals.errors import InfeasibleLimitError
from fxrecals.ir import Graph
from fxrecals.schedule import Schedule
from fxrecals.solve import greedy, refine, segments
from fxrecals.solve.problem import Problem, make_problem
from fxrecals.solve.state import Snapshot, State

DESCENTS = 3
"""How many segmented starts are brought down to their floor."""

LOWERED = 4
"""How many explored states above the limit are lowered to it."""

SPENT = 6
"""How many states within the limit are refined."""


DEAREST = 4.0
"""Extra time, in steps, beyond which no lower floor is sought: nobody trains that slowly."""


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
class Frontier:
    """What is known of a graph before a limit is given.

    Attributes:
        problem: the graph, by number.
        effort: toggles that one descent may take.
    """

    problem: Problem
    effort: int = 40_000

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """Everything explored, the lowest peak first; the cheapest first among equal peaks."""
        kept = State(self.problem)
        found = [Point.of(kept)]
        starts = [Point.of(State(self.problem, runs)) for runs in segments.starts(self.problem)]
        found += starts
        dearest = DEAREST * max(self.problem.graph.seconds, 1e-9)
        lowest = sorted(starts, key=lambda p: (p.peak_bytes, p.seconds))[:DESCENTS]
        for start in [found[0], *lowest]:
            state = State(self.problem, start.runs)
            for runs in greedy.descend(state, effort=self.effort, dearest=dearest):
                found.append(Point(state.peak_bytes, state.seconds, runs))
        return tuple(sorted(found, key=lambda p: (p.peak_bytes, p.seconds)))

    @property
    def floor(self) -> Point:
        """The explored point of the lowest peak."""
        return self.points[0]

    @cached_property
    def baseline_bytes(self) -> int:
        """The peak when everything is kept."""
        return State(self.problem).peak_bytes

    def cheapest(self, limit: int) -> Point | None:
        """The cheapest point found within `limit` bytes, or None below the floor."""
        if self.baseline_bytes <= limit:
            return Point.of(State(self.problem))
        if limit < self.floor.peak_bytes:
            return None
        within = sorted((p for p in self.points if p.peak_bytes <= limit), key=lambda p: p.seconds)[
            :SPENT
        ]
        best = min((self._spent(p, limit) for p in within), key=lambda p: p.seconds)
        above = [p for p in self.points if p.peak_bytes > limit][:LOWERED]
        for point in above:
            state = State(self.problem, point.runs)
            if greedy.lower(state, limit, effort=self.effort, dearest=1.5 * best.seconds):
                spent = self._spent(Point.of(state), limit)
                best = min(best, spent, key=lambda p: p.seconds)
        return best

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


def auto(graph: Graph, limit: int) -> Schedule:
    """The cheapest schedule found whose peak is at most `limit` bytes.

    Raises:
        InfeasibleLimitError: with the floor, if the limit is below it.
    """
    return solve(Frontier(make_problem(graph)), limit)


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
