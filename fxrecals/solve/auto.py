"""The solver that everything else calls: many starts, one judge, the best answer.

`Frontier` explores a graph once, whatever the limit: everything kept, chains of blocks (`chain`),
and greedy descents from the lowest of them, down to the floor. Given a limit, it starts from the
explored states that fit, from the nearest that do not, lowered, from what the chains say of this
limit, and from what the relaxation cuts (`bound`); spends on each what is left; and improves the
best of them by local search. On a small graph it looks for the optimum too (`exact`), if highspy
is installed. Effort is counted in moves, not in seconds, so that the same
graph and limit give the same schedule on every machine, unless a deadline cuts the work short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from itertools import product
from math import inf
from time import monotonic

from fxrecals.errors import InfeasibleLimitError
from fxrecals.ir import Trait, is_charged
from fxrecals.schedule import saved
from fxrecals.solve import bound, exact, greedy, refine
from fxrecals.solve.chain import Chain, cuts, dearest
from fxrecals.solve.problem import Problem
from fxrecals.solve.state import Snapshot, State

BLOCKS = (16, 48)
"""Into how many blocks the forward is cut."""

ONCE = (0.0, 0.1, 0.25)
"""Shares of the forward's bytes whose ops, the dearest for them, do not run again."""

CHAINED = 3
"""At how many limits each chain is asked before a limit is given."""

DESCENTS = 3
"""How many states are brought down to their floor, beside the one that keeps everything."""

FITTING = 6
"""How many explored states within the limit a search starts from."""

LOWERED = 4
"""How many explored states above the limit a search lowers to it."""

IMPROVED = 12
"""How many of its best states a search improves, if effort is left after those before."""

VARIED = 0.4
"""Share of the effort for a search that takes back recomputes at random."""

TIGHTER = (0.95, 0.9)
"""Shares of the limit at which a search looks too, on a graph so small that half its effort is
left: what a tighter limit needs is at times a better start."""

NEAR = 0.001
"""A local search ends where the extra time is within this part of a step from the lower bound."""

SMALL = 100
"""Recomputes to choose from up to which the optimum is sought."""

DEAREST = 4.0
"""Extra time, in steps, beyond which no lower floor is sought: nobody trains that slowly."""

EFFORT = 26_000
"""Work that one descent may take on a graph of `LARGE` positions or fewer; on larger ones, where
a toggle takes longer, so much less."""

LARGE = 1_200

EXACTLY = 120.0
"""Seconds after which the optimum is given up where no deadline says otherwise."""

USUAL = 10.0
"""Seconds within which the usual effort comes to its end, on one core and ten thousand ops. Another
deadline changes the effort in proportion."""

Progress = Callable[[float, float, float], None]
"""Told of every better answer: its extra seconds, the lower bound on them, seconds searched."""


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
        deadline: seconds after `start`; None for as long as the usual effort takes.
        start: by `time.monotonic`.
    """

    deadline: float | None = None
    start: float = field(default_factory=monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return monotonic() - self.start

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return inf if self.deadline is None else max(0.0, self.deadline - self.elapsed)

    def goes_on(self) -> bool:
        """Whether there is time left."""
        return self.left > 0.0


@dataclass
class Budget:
    """How much work is left for local search."""

    left: int


@dataclass(frozen=True)
class Frontier:
    """What is known of a graph before a limit is given.

    Attributes:
        problem: the graph, by number.
        clock: how long all of it may take; what was begun is brought to an end.
        exactly: whether to look for the optimum; by default on small graphs, if highspy is there.
    """

    problem: Problem
    clock: Clock = field(default_factory=Clock)
    exactly: bool | None = None
    _bounds: dict[int, float] = field(default_factory=dict[int, float], init=False, repr=False)

    @property
    def effort(self) -> int:
        """Work that one descent, or all local search for a limit, may take."""
        patience = 1.0 if self.clock.deadline is None else self.clock.deadline / USUAL
        return max(1, int(EFFORT * patience * LARGE / max(LARGE, self.problem.end)))

    @cached_property
    def is_small(self) -> bool:
        """Whether the optimum can be had in no time."""
        problem = self.problem
        stages = range(problem.forward_count, problem.end)
        ops = [op for op in range(problem.forward_count) if problem.may_run_again[op]]
        if len(ops) * len(stages) > 4 * SMALL or len(problem.loads) > 1:
            return False
        return sum(problem.may_run_at(op, stage) for op in ops for stage in stages) <= SMALL

    @property
    def seeks_optimum(self) -> bool:
        """Whether `exact` takes part."""
        if self.exactly is None:
            return self.is_small and find_spec("highspy") is not None
        return self.exactly

    @cached_property
    def kept(self) -> State:
        """The state in which nothing runs again."""
        return State(self.problem)

    @cached_property
    def relaxations(self) -> tuple[bound.Relaxation, ...]:
        """What lower bounds come from, for each load."""
        return tuple(bound.Relaxation(self.kept, k) for k in range(len(self.problem.loads)))

    @property
    def lowest_peak(self) -> int:
        """Bytes below which no schedule can go."""
        return max(relaxation.lowest_peak for relaxation in self.relaxations)

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """The graph as chains of blocks, the coarsest first; none where loads are several."""
        if len(self.problem.loads) > 1:
            return ()
        cut = dict.fromkeys(cuts(self.problem, blocks) for blocks in BLOCKS)
        once = dict.fromkeys(dearest(self.problem, share) for share in ONCE)
        return tuple(Chain(self.kept, *each) for each in product(cut, once))

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """Everything explored, the lowest peak first; the cheapest first among equal peaks."""
        kept = Point.of(self.kept)
        starts = list(self._chained())
        found = [kept, *starts]
        dearest = DEAREST * max(self.problem.graph.seconds, 1e-9)
        lowest = sorted(starts, key=lambda p: (p.peak_bytes, p.seconds))[:DESCENTS]
        for start in [kept, *lowest]:
            state = self.kept.at(start.runs)
            for runs in greedy.descend(state, effort=self.effort, dearest=dearest):
                found.append(Point(state.peak_bytes, state.seconds, runs))
            if not self.clock.goes_on():
                break
        if self.seeks_optimum and self.is_small:
            found.append(Point.of(self.kept.at(exact.lowest(self.problem)[1])))
        return tuple(sorted(found, key=lambda p: (p.peak_bytes, p.seconds)))

    def _chained(self) -> Iterator[Point]:
        for chain in self.chains:
            floor = chain.floor_bytes
            if not floor:
                continue
            ratio = max(1.0, self.baseline_bytes / floor) ** (1 / CHAINED)
            for k in range(CHAINED):
                if state := chain.state(int(floor * ratio**k)):
                    yield Point.of(state)

    @property
    def floor(self) -> Point:
        """The explored point of the lowest peak."""
        return self.points[0]

    @cached_property
    def baseline_bytes(self) -> int:
        """The peak when everything is kept."""
        return self.kept.peak_bytes

    def bound_seconds(self, limit: int) -> float:
        """Seconds of extra time that every schedule within `limit` bytes takes at least."""
        if limit not in self._bounds:
            self._bounds[limit] = self.relaxed(limit).seconds
        return self._bounds[limit]

    def relaxed(self, limit: int) -> bound.Bound:
        """The highest of the loads' lower bounds."""
        return max((each.solve(limit) for each in self.relaxations), key=lambda b: b.seconds)

    def cheapest(self, limit: int, progress: Progress | None = None) -> Point | None:
        """The cheapest point found within `limit` bytes, or None below the floor."""
        best: Point | None = None
        for best in self.search(limit, self.effort):
            if progress is not None:
                progress(best.seconds, self.bound_seconds(limit), self.clock.elapsed)
        return best

    def search(self, limit: int, effort: int) -> Iterator[Point]:
        """Ever cheaper points within `limit` bytes; none below the floor.

        `effort` is how much work all local search may take.
        """
        if self.baseline_bytes <= limit:
            yield Point.of(self.kept)
            return
        best: Point | None = None
        enough = self.bound_seconds(limit) + NEAR * self.problem.graph.seconds
        budget = Budget(effort)
        for share in (1.0, *TIGHTER):
            if share < 1.0 and not (self._is_quick and budget.left >= effort // 2):
                break
            for found in self._found(int(share * limit), enough, budget):
                point = found if share == 1.0 else self._spent(self.kept.at(found.runs), limit)
                if best is None or point.seconds < best.seconds:
                    best = point
                    yield best
            if best is None or best.seconds <= enough:
                break
        if best is not None and self.seeks_optimum:
            yield from self._optimum(limit, best.seconds)

    @property
    def _is_quick(self) -> bool:
        """Whether there is time for other limits too."""
        return self.problem.end <= LARGE and self.clock.goes_on()

    def _found(self, limit: int, enough: float, budget: Budget) -> Iterator[Point]:
        """Ever cheaper points within `limit` bytes, by local search from several starts, until
        there is one of `enough` seconds or less."""
        found: list[Point] = []
        for point in self._starts(limit):
            if not found or point.seconds < found[0].seconds:
                yield point
            if all(point.seconds != other.seconds for other in found):
                found = sorted([*found, point], key=lambda p: p.seconds)[:IMPROVED]
        best = found[0] if found else None
        at_random = int(VARIED * budget.left)
        for point in found:
            if best is None or best.seconds <= enough or budget.left <= 0:
                break
            state = self.kept.at(point.runs)
            refine.improve(state, limit, effort=budget.left, go_on=self.clock.goes_on)
            budget.left -= state.work
            if state.seconds < best.seconds:
                best = Point.of(state)
                yield best
        if best is not None and best.seconds > enough:
            state = self.kept.at(best.runs)
            refine.vary(state, limit, effort=at_random, go_on=self.clock.goes_on)
            budget.left -= state.work
            if state.seconds < best.seconds:
                yield Point.of(state)

    def _optimum(self, limit: int, best: float) -> Iterator[Point]:
        answer = exact.search(self.problem, limit, seconds=min(self.clock.left, EXACTLY))
        self._bounds[limit] = max(self.bound_seconds(limit), answer.bound_seconds)
        if answer.runs is not None:
            point = Point.of(self.kept.at(answer.runs))
            if point.seconds < best:
                yield point

    def _starts(self, limit: int) -> Iterator[Point]:
        """Points within `limit` bytes, none of which can spare a single recompute."""
        fits = sorted((p for p in self.points if p.peak_bytes <= limit), key=lambda p: p.seconds)
        if not fits:
            return
        for point in fits[:FITTING]:
            yield self._spent(self.kept.at(point.runs), limit)
        above = [p.runs for p in self.points if p.peak_bytes > limit][:LOWERED]
        chained = [state.snapshot() for chain in self.chains if (state := chain.state(limit))]
        for runs in _distinct([*chained, self._relaxed(limit), *above]):
            if not self.clock.goes_on():
                return
            state = self.kept.at(runs)
            if greedy.lower(state, limit, effort=self.effort, dearest=1.5 * fits[0].seconds):
                yield self._spent(state, limit)

    def _spent(self, state: State, limit: int) -> Point:
        refine.spend(state, limit, refine.by_area, effort=self.effort // 4)
        return Point.of(state)

    def _relaxed(self, limit: int) -> Snapshot:
        """What the relaxation cuts, whether that fits or not."""
        state, problem = self.kept.copy(), self.problem
        for gap in sorted(self.relaxed(limit).cut, key=lambda gap: (gap.last, gap.storage)):
            stretch = greedy.Eviction(gap.storage, gap.first - 1, gap.last + 1)
            able = problem.may_run_at(problem.maker[gap.storage], stretch.before)
            if able and greedy.is_possible(state, stretch):
                for run in greedy.recompute_for(state, stretch):
                    state.toggle(*run)
        return state.snapshot()

    def curve(self, limits: Sequence[int]) -> dict[int, Point]:
        """The cheapest point within each limit, the largest limit first.

        A larger limit never costs more: what a tighter one found, it may take too. The effort of
        one search is shared among all.
        """
        effort = self.effort // max(1, len(limits))
        found: dict[int, Point] = {}
        best: Point | None = None
        for limit in sorted(limits):
            for point in self.search(limit, effort):
                if best is None or point.seconds <= best.seconds:
                    best = point
            if best is not None:
                found[limit] = best
        return dict(reversed(found.items()))


def _distinct(found: Iterable[Snapshot]) -> Iterator[Snapshot]:
    seen: list[Snapshot] = []
    for runs in found:
        if runs not in seen:
            seen.append(runs)
            yield runs


def solve(frontier: Frontier, limit: int, progress: Progress | None = None) -> Point:
    """The cheapest point within `limit` bytes that a frontier offers.

    Raises:
        InfeasibleLimitError: with the floor, if the limit is below it.
    """
    point = frontier.cheapest(limit, progress)
    if point is None:
        raise infeasible(frontier, limit)
    return point


def infeasible(frontier: Frontier, limit: int) -> InfeasibleLimitError:
    """The error that names the floor of a frontier, the op that sets it, and its device."""
    floor = frontier.kept.at(frontier.floor.runs)
    row, position = divmod(int(floor.loads.argmax()), frontier.problem.end)
    load, op = frontier.problem.loads[row], frontier.problem.ops[position]
    peaks = zip(frontier.problem.loads, floor.loads.max(axis=1).tolist(), strict=True)
    floors = tuple((each.device, max(limit, peak) - each.offset) for each, peak in peaks)
    return InfeasibleLimitError(
        limit_bytes=limit - load.offset,
        floor_bytes=floor.peak_bytes - load.offset,
        op=op.name,
        module=op.where.module,
        source=op.where.source,
        device=load.device,
        device_floors=floors if load.device else (),
        lowest_bytes=max(0, frontier.relaxations[row].lowest_peak - load.offset),
        must_save_bytes=_must_save_bytes(frontier),
    )


def _must_save_bytes(frontier: Frontier) -> int:
    """What the floor keeps because the user's checkpoint policy says so."""
    graph = frontier.problem.graph
    kept = saved(graph, frontier.problem.schedule(frontier.floor.runs))
    ours = (graph.values[name] for name in kept if Trait.MUST_SAVE in graph.producer[name].traits)
    return sum({value.storage: value.nbytes for value in ours if is_charged(value)}.values())
