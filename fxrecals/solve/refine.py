"""Spending what a limit leaves free: recomputes taken back while the peak allows it.

Which recompute to take back first is a knapsack with lifetimes; three orders are tried by
`auto`, and none is best on every graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fxrecals.solve import greedy
from fxrecals.solve.state import State

REPLACING = 2_000
"""Work that one try to replace a recompute may take."""

WORTH_REPLACING = 0.002
"""A recompute that takes less than this part of the extra time is left alone."""

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
