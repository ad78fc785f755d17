"""Spending what a limit leaves free: recomputes taken back while the peak allows it.

Which recompute to take back first is a knapsack with lifetimes; several orders are tried, and none
is best on every graph. Two local searches go on from there: `improve` rules out one recompute at a
time, `vary` takes back a few at random (large neighbourhood search; Shaw 1998,
https://doi.org/10.1007/3-540-49481-2_30).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from random import Random

import numpy as np
from numpy.typing import NDArray

from fxrecals.solve import greedy
from fxrecals.solve.state import State

REPLACING = 2_000
"""Work that one try to replace a recompute may take."""

WORTH_REPLACING = 0.002
"""A recompute that takes less than this part of the extra time is left alone."""

FEW = 10
"""How many recomputes are taken back at once, at most, to be replaced."""

SPREADS = (1.2, 2.0, 4.0)
"""By what factor prices go up or down then."""

DEARER = (0.0, 0.0, 0.03, 0.1)
"""By what part more extra time may be accepted on the way."""

AWAY = 12
"""After so many tries without a gain, the search starts from the cheapest set again."""

TRIES = 20
"""So many tries for each recompute, and none gained anything: then there is no more to gain."""

Worth = Callable[[State, int, int], float]
"""How much it is worth to take the recompute of an op at a stage back; larger comes first."""


def always() -> bool:
    """Says yes."""
    return True


def spend(
    state: State, limit: int, worth: Worth, *, effort: int, fallen: NDArray[np.bool_] | None = None
) -> None:
    """Undoes recomputes while the peak stays within `limit`, the worthiest first.

    Ends when no single recompute can be taken back, or after about `effort` of work. Where
    `fallen` is given, only recomputes are tried whose going would weigh on positions that it marks.
    """
    before = None if fallen is None else np.concatenate(([0], np.cumsum(fallen)))
    changed = True
    last = state.work + effort
    while changed and state.work < last:
        changed = False
        runs = [
            (op, stage)
            for op, stages in state.runs.items()
            for stage in stages
            if before is None or before[stage] > before[_lived_until(state, op, stage)]
        ]
        runs.sort(key=lambda run: (-worth(state, *run), run))
        for op, stage in runs:
            if state.work >= last:
                break
            if state.runs_at(op, stage) and undo(state, op, stage, limit):
                changed = True


def _lived_until(state: State, op: int, stage: int) -> int:
    """Where what `op` makes again at `stage` was last alive before."""
    ends = [
        state.ends[storage][state.starts[storage].index(stage) - 1]
        for storage in state.problem.makes[op]
        if storage not in state.lazy
    ]
    return min(ends, default=stage)


def by_seconds(state: State, op: int, stage: int) -> float:
    """The most expensive first."""
    return state.problem.ops[op].seconds


def by_bytes(state: State, op: int, stage: int) -> float:
    """Most seconds per byte that would have to live on."""
    nbytes = sum(state.problem.nbytes[s] for s in state.problem.makes[op])
    return state.problem.ops[op].seconds / max(nbytes, 1)


def by_area(state: State, op: int, stage: int) -> float:
    """Most seconds per byte and position that would have to be held."""
    area = 0
    for storage in state.problem.makes[op]:
        if storage in state.lazy or not is_read_after(state, storage, stage):
            continue
        index = state.starts[storage].index(stage)
        gap = stage - state.ends[storage][index - 1]
        area += max(1, gap) * state.problem.nbytes[storage]
    return state.problem.ops[op].seconds / max(area, 1)


WORTHS: tuple[Worth, ...] = (by_area, by_seconds, by_bytes)


def improve(state: State, limit: int, *, effort: int, go_on: Callable[[], bool] = always) -> None:
    """Local search: one recompute at a time, the dearest first, is ruled out; what that needs to
    fit `limit` again is found by `greedy.lower`, and kept if the whole is cheaper.

    Ends when a round over all recomputes has gained nothing, after about `effort` of work, or
    when `go_on` says so.
    """
    last = state.work + effort
    gained = True
    while gained:
        gained = False
        runs = [(op, stage) for op, stages in state.runs.items() for stage in stages]
        ops = state.problem.ops
        runs.sort(key=lambda run: (-ops[run[0]].seconds, run))
        for op, stage in runs:
            if ops[op].seconds < WORTH_REPLACING * state.seconds:
                break
            if state.work >= last or not go_on():
                return
            if state.runs_at(op, stage) and _replace(state, op, stage, limit, last):
                gained = True


def _replace(state: State, op: int, stage: int, limit: int, last: int) -> bool:
    """Finds something cheaper than a recompute, if it can."""
    mark, seconds, total = state.mark(), state.seconds, state.total
    take_back(state, op, stage)
    lived_on = [
        eviction
        for storage in state.problem.makes[op]
        if (eviction := greedy.stretch_to(state, storage, stage)) is not None
    ]
    effort = min(last - state.work, REPLACING)
    dearest = seconds + 0.5 * state.problem.ops[op].seconds
    if greedy.lower(state, limit, effort=effort, dearest=dearest, forbidden=lived_on):
        spend(state, limit, by_area, effort=effort, fallen=state.total < total)
        if state.seconds < seconds * (1 - 1e-9):
            return True
    state.rewind(mark)
    return False


def vary(
    state: State,
    limit: int,
    *,
    effort: int,
    seed: int = 0,
    go_on: Callable[[], bool] = always,
) -> None:
    """Local search: a few recomputes at random are taken back, and `greedy.lower` finds others,
    with some chance in its prices. Dearer sets are accepted for a while, the cheapest remains.

    Ends when many tries have gained nothing, after about `effort` of work, or when `go_on` says so.
    One seed gives one result.
    """
    draw = Random(seed)
    last = state.work + effort
    best, failed = state.copy(), 0
    while failed < TRIES * _count(best) and state.work < last and go_on():
        mark, dearest = state.mark(), best.seconds * (1 + draw.choice(DEARER))
        for op, stage in _some(state, draw):
            if state.runs_at(op, stage):
                take_back(state, op, stage)
        noise = greedy.Noise(draw, draw.choice(SPREADS))
        left = min(last - state.work, REPLACING)
        fits = greedy.lower(state, limit, effort=left, dearest=dearest, noise=noise)
        if fits:
            spend(state, limit, draw.choice(WORTHS), effort=last - state.work)
        if not fits or state.seconds > dearest:
            state.rewind(mark)
        failed += 1
        if state.seconds < best.seconds * (1 - 1e-9):
            best, failed = state.copy(), 0
        elif failed % AWAY == 0:
            state.restore(best.snapshot())
    state.restore(best.snapshot())


def _count(state: State) -> int:
    """How many recomputes there are."""
    return sum(map(len, state.runs.values()))


def _some(state: State, draw: Random) -> list[tuple[int, int]]:
    """A few recomputes at random: neighbours by stage, or any."""
    runs = sorted((stage, op) for op, stages in state.runs.items() for stage in stages)
    count = min(len(runs), draw.randint(1, FEW))
    first = draw.randrange(len(runs) - count + 1)
    some = runs[first : first + count] if draw.random() < 0.5 else draw.sample(runs, count)
    return [(op, stage) for stage, op in some]


def undo(state: State, op: int, stage: int, limit: int) -> bool:
    """Takes one recompute back, and those that only it needed, if the peak stays within `limit`."""
    if _is_hopeless(state, op, stage, limit):
        return False
    mark = state.mark()
    take_back(state, op, stage)
    if state.peak_bytes <= limit:
        return True
    state.rewind(mark)
    return False


def take_back(state: State, op: int, stage: int) -> None:
    """Takes one recompute back, and those that only it needed."""
    pending = [op]
    while pending:
        current = pending.pop()
        state.toggle(current, stage)
        for storage in state.problem.reads[current]:
            maker = state.problem.maker[storage]
            if state.runs_at(maker, stage) and is_useless(state, maker, stage):
                pending.append(maker)


def drop_useless(state: State) -> None:
    """Takes back recomputes of which nothing is read."""
    runs = [(stage, op) for op, stages in state.runs.items() for stage in stages]
    for stage, op in sorted(runs, reverse=True):
        if is_useless(state, op, stage):
            state.toggle(op, stage)


def _is_hopeless(state: State, op: int, stage: int, limit: int) -> bool:
    """Whether taking a recompute back must pass the limit: a cheap test that saves most trials.

    What it made would live on since its last use; what it read might be freed earlier, after the
    read before.
    """
    problem = state.problem
    if len(problem.loads) > 1:
        return False
    first, made = stage, 0
    for storage in problem.makes[op]:
        if storage in state.lazy or not is_read_after(state, storage, stage):
            continue
        index = state.starts[storage].index(stage)
        end = state.ends[storage][index - 1]
        if end + 1 < stage:
            first = end + 1 if first == stage else max(first, end + 1)
            made += problem.nbytes[storage]
    if first == stage:
        return False
    relief, freed = stage, 0
    for storage in problem.reads[op]:
        start, end = state.span(storage, stage)
        if end == stage and start < stage and storage not in problem.reads[stage]:
            reads = state.reads(storage)
            relief = min(relief, max(start, reads[bisect_left(reads, stage) - 1]) + 1)
            freed += problem.nbytes[storage]
    relief = max(first, relief)
    if relief > first and state.highest(first, relief) + made > limit:
        return True
    return relief < stage and state.highest(relief, stage) + made - freed > limit


def is_useless(state: State, op: int, stage: int) -> bool:
    """Whether nothing that `op` makes again at `stage` is read."""
    return not any(
        is_read_after(state, storage, stage)
        for storage in state.problem.makes[op]
        if storage not in state.lazy
    )


def is_read_after(state: State, storage: int, stage: int) -> bool:
    """Whether the copy of `storage` made at `stage` is read."""
    reads = state.reads(storage)
    index = bisect_left(reads, stage)
    return index < len(reads) and reads[index] <= state.span(storage, stage)[1]
