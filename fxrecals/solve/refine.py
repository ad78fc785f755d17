"""Spending what a limit leaves free: recomputes taken back while the peak allows it.

Which recompute to take back first is a knapsack with lifetimes; three orders are tried by
`auto`, and none is best on every graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from fxrecals.solve.greedy import Run
from fxrecals.solve.state import State

Worth = Callable[[State, int, int], float]
"""How much it is worth to take the recompute of an op at a stage back; larger comes first."""


def spend(state: State, limit: int, worth: Worth, *, effort: int) -> None:
    """Undoes recomputes while the peak stays within `limit`, the worthiest first.

    Ends when no single recompute can be taken back, or after about `effort` toggles.
    """
    changed = True
    last = state.toggles + effort
    while changed and state.toggles < last:
        changed = False
        runs = [(op, stage) for op, stages in state.runs.items() for stage in stages]
        runs.sort(key=lambda run: (-worth(state, *run), run))
        for op, stage in runs:
            if state.toggles >= last:
                break
            if state.runs_at(op, stage) and undo(state, op, stage, limit):
                changed = True


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


def undo(state: State, op: int, stage: int, limit: int) -> bool:
    """Takes one recompute back, and those that only it needed, if the peak stays within `limit`."""
    if _is_hopeless(state, op, stage, limit):
        return False
    undone: list[Run] = []
    pending = [op]
    while pending:
        current = pending.pop()
        state.toggle(current, stage)
        undone.append((current, stage))
        for storage in state.problem.reads[current]:
            maker = state.problem.maker[storage]
            if state.runs_at(maker, stage) and is_useless(state, maker, stage):
                pending.append(maker)
    if state.peak_bytes <= limit:
        return True
    for run in reversed(undone):
        state.toggle(*run)
    return False


def _is_hopeless(state: State, op: int, stage: int, limit: int) -> bool:
    """Whether taking a recompute back must pass the limit: a cheap test that saves most trials.

    What it made would live on since its last use; what it read might be freed earlier.
    """
    change = 0
    first = stage
    for storage in state.problem.makes[op]:
        if storage in state.lazy or not is_read_after(state, storage, stage):
            continue
        index = state.starts[storage].index(stage)
        end = state.ends[storage][index - 1]
        if end + 1 >= stage:
            continue
        first = min(first, end + 1) if first == stage else max(first, end + 1)
        change += state.problem.nbytes[storage]
    change -= sum(
        state.problem.nbytes[storage]
        for storage in state.problem.reads[op]
        if state.span(storage, stage)[1] == stage
    )
    return change > 0 and first < stage and state.highest(first, stage) + change > limit


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
