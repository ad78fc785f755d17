"""Greedy descent on the exact timeline: works on any graph, down to low floors.

*Problem.* Choose, for every value and every stretch between two of its uses, whether it stays in
memory or is made again before the second use, so that no position exceeds the limit and the
extra time is least. (Retention intervals, as in MOCCASIN; here without a bound on the copies.)

*Method.* Start with everything kept. While some position is over the limit, look at the values
that merely pass through the highest one, and evict that which relieves most excess per second:
make it again just before its next use, together with whatever of its ancestors is not alive
there. Where there is no room for that, they live on instead, or the value is made some stages
earlier, where there is most room. Every move is played on the exact incremental timeline and taken
back if it does not lower the excess. A value made again is a value like any other: it may be
evicted and made again once more, which is what reaches the low floors. What the limit leaves free
afterwards is spent on undoing recomputes, the most expensive first.

*Why not a knapsack over the saved set?* Because the peak is not there: values recomputed all at
once are alive all at once (PyTorch's budget partitioner peaks *higher* at low budgets for it).

*Bound.* None; see `Plan.bound_seconds` for how far from optimal a result can be.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxrecals.solve.state import Snapshot, State

Run = tuple[int, int]
"""An op and the stage at which it runs again."""

FEW = 16
"""Evictions that need no more runs than this have each of them looked at."""

PRICED = 4
"""So many evictions are priced in the time of a toggle."""

TINY = 1e-9
"""Seconds added to every price, so that of free recomputes the larger one comes first."""


class Eviction(NamedTuple):
    """A stretch of a storage's life that could be cut out.

    Attributes:
        storage: what is evicted.
        after: the last position at which it must be alive before the stretch.
        before: the stage before which it is made again.
    """

    storage: int
    after: int
    before: int


@dataclass(frozen=True)
class Noise:
    """What makes one search differ from another.

    Attributes:
        draw: the source of chance.
        spread: by what factor prices go up or down, at most.
    """

    draw: Random
    spread: float

    def factor(self) -> float:
        """What to multiply a price with."""
        return self.spread ** self.draw.uniform(-1, 1)


def lower(
    state: State,
    limit: int,
    *,
    effort: int,
    dearest: float = float("inf"),
    forbidden: Iterable[Eviction] = (),
    noise: Noise | None = None,
) -> bool:
    """Adds recomputes to `state` until it fits `limit` bytes; says whether it does.

    Gives up after `effort` of work, when no move is left but `forbidden` ones, or when the extra
    time exceeds `dearest` seconds. `state` is then left as low as this could bring it. With
    `noise`, prices vary, and values are also made again at any stage that has room.
    """
    dead = set(forbidden)
    last = state.work + effort
    while state.work < last and state.seconds <= dearest:
        total = state.total
        peak = int(total.argmax())
        if total[peak] <= limit:
            return True
        if not _relieve(state, peak, limit, dead, last, noise):
            return False
    return state.peak_bytes <= limit


def descend(state: State, *, effort: int, dearest: float) -> Iterator[Snapshot]:
    """Ever lower states, from `state` down to the lowest that this can reach.

    Ends after about `effort` of work, or where the extra time would exceed `dearest` seconds.
    """
    last = state.work + effort
    best = state.snapshot()
    shrink = 0.1
    while shrink > 0.005 and state.work < last and state.peak_bytes:
        target = int(state.peak_bytes * (1 - shrink))
        if lower(state, target, effort=last - state.work, dearest=dearest):
            best = state.snapshot()
            yield best
        else:
            state.restore(best)
            shrink /= 2


def _relieve(
    state: State, position: int, limit: int, dead: set[Eviction], last: int, noise: Noise | None
) -> bool:
    """Evicts until `position` fits or `last` work is done; says whether anything was gained."""
    over = np.concatenate(([0], np.cumsum(state.total > limit)))
    found = [
        eviction
        for eviction in evictions(state, position)
        if eviction not in dead and _weighs(state, eviction.storage, position, limit)
    ]
    if noise is not None:
        found += _elsewhere(state, found, position, limit, noise)
    queue = [
        (_price(state, eviction, over) * (noise.factor() if noise else 1.0), eviction)
        for eviction in found
    ]
    state.work += len(queue) // PRICED
    heapq.heapify(queue)
    gained = False
    while queue and state.work < last and state.peak_at(position) > limit:
        price, eviction = heapq.heappop(queue)
        if not is_possible(state, eviction):
            continue
        now = _price(state, eviction, over)
        if queue and now > max(price, 1.1 * queue[0][0]):
            heapq.heappush(queue, (now, eviction))  # dearer than when it was queued
        elif _cut(state, eviction, limit):
            gained = True
        else:
            dead.add(eviction)
            earlier = _earlier(state, eviction, position)
            if earlier is not None and earlier not in dead:
                heapq.heappush(queue, (_price(state, earlier, over), earlier))
    return gained


def _cut(state: State, eviction: Eviction, limit: int) -> bool:
    """Evicts, if that lowers the excess: with all that its recompute needs made again too, or else
    with what it reads living on until then."""
    runs = recompute_for(state, eviction)
    if _try(state, runs, limit):
        return True
    own = (state.problem.maker[eviction.storage], eviction.before)
    return len(runs) > 1 and _try(state, [own], limit)


def _earlier(state: State, eviction: Eviction, position: int) -> Eviction | None:
    """The same, but made again where there is most room after `position`."""
    between = state.total[position + 1 : eviction.before]
    if not len(between):
        return None
    return _made_at(state, eviction, position + 1 + int(between.argmin()))


def _elsewhere(
    state: State, found: Iterable[Eviction], position: int, limit: int, noise: Noise
) -> Iterator[Eviction]:
    """The same, but made again at any stage after `position` that has room."""
    total = state.total
    for eviction in found:
        most = limit - state.problem.nbytes[eviction.storage]
        room = np.flatnonzero(total[position + 1 : eviction.before] <= most)
        if len(room):
            stage = position + 1 + int(noise.draw.choice(room))
            if moved := _made_at(state, eviction, stage):
                yield moved


def _made_at(state: State, eviction: Eviction, stage: int) -> Eviction | None:
    able = state.problem.may_run_at(state.problem.maker[eviction.storage], stage)
    return eviction._replace(before=stage) if able else None


def _weighs(state: State, storage: int, position: int, limit: int) -> bool:
    """Whether a storage is part of a load that is over the limit at a position."""
    loads = state.problem.loads
    if len(loads) == 1:
        return True
    over = state.loads[:, position] > limit
    return any(load.nbytes[storage] for load, heavy in zip(loads, over, strict=True) if heavy)


def _try(state: State, runs: list[Run], limit: int) -> bool:
    """Plays a move; takes it back unless it lowers the excess."""
    before, mark = state.excess(limit), state.mark()
    for op, stage in runs:
        state.toggle(op, stage)
    _drop_followers(state, runs, limit)
    if state.excess(limit) < before:
        return True
    state.rewind(mark)
    return False


def _drop_followers(state: State, runs: list[Run], limit: int) -> None:
    """Where an op now runs earlier than a later recompute of it, lets the earlier one serve both
    if the limit allows it. Runs that are cheap beside the others are left to `refine`."""
    ops = state.problem.ops
    worth = 0.02 * sum(ops[op].seconds for op, _ in runs)
    for op, stage in runs:
        later = state.runs[op]
        index = bisect_right(later, stage)
        if index == len(later) or (len(runs) > FEW and ops[op].seconds < worth):
            continue
        following = later[index]
        made = sum(state.problem.nbytes[s] for s in state.problem.makes[op])
        if following > stage + 1 and state.highest(stage + 1, following) + made > limit:
            continue  # there is no room for it to live on
        before = state.excess(limit)
        state.toggle(op, following)
        if state.excess(limit) > before:
            state.toggle(op, following)


def evictions(state: State, position: int) -> Iterator[Eviction]:
    """Everything that merely passes through `position` and could be made again after it."""
    for storage, start, end in state.passing(position):
        eviction = next_eviction(state, storage, position, start, end)
        if eviction is not None and not _is_held(state, eviction, start):
            yield eviction


def _is_held(state: State, eviction: Eviction, start: int) -> bool:
    """Whether the caller holds the copy that an eviction would free."""
    held = state.problem.held.get(eviction.storage, ())
    return any(start <= position < eviction.before for position in held)


def next_eviction(
    state: State, storage: int, position: int, start: int, end: int
) -> Eviction | None:
    """The stretch around `position` that could be cut out of the span from `start` to `end`."""
    reads = state.reads(storage)
    index = bisect_left(reads, position)
    if index == len(reads) or reads[index] == position:
        return None
    after = max(start, reads[index - 1]) if index else start
    before = reads[index]
    if before > end or not state.problem.may_run_at(state.problem.maker[storage], before):
        return None
    return Eviction(storage, after, before)


def stretch_to(state: State, storage: int, stage: int) -> Eviction | None:
    """The stretch of a storage's life that ends with the first read from `stage` on, if any."""
    reads = state.reads(storage)
    index = bisect_left(reads, stage)
    if index == len(reads):
        return None
    start, _ = state.span(storage, reads[index])
    return Eviction(storage, max(start, reads[index - 1]) if index else start, reads[index])


def is_possible(state: State, eviction: Eviction) -> bool:
    """Whether the storage still passes through the whole stretch."""
    start, end = state.span(eviction.storage, eviction.after)
    if not start <= eviction.after or end < eviction.before:
        return False
    return not state.runs_at(state.problem.maker[eviction.storage], eviction.before)


def recompute_for(state: State, eviction: Eviction) -> list[Run]:
    """The runs that make a storage again: its op, and ancestors that are not alive by then.

    An ancestor that may not run again lives on instead.
    """
    problem = state.problem
    stage = eviction.before
    found: set[int] = set()
    pending = [problem.maker[eviction.storage]]
    while pending:
        op = pending.pop()
        if op in found or state.runs_at(op, stage):
            continue
        found.add(op)
        for storage in problem.reads[op]:
            maker = problem.maker[storage]
            if not state.is_alive(storage, stage) and problem.may_run_at(maker, stage):
                pending.append(maker)
    return [(op, stage) for op in sorted(found)]


def _price(state: State, eviction: Eviction, over: NDArray[np.int64]) -> float:
    """Extra seconds per byte and position over the limit that an eviction relieves.

    `over[k]` counts the positions before `k` that are over the limit. A run that an existing
    later run can be spared for costs nothing.
    """
    seconds = TINY
    for op, stage in recompute_for(state, eviction):
        later = state.runs.get(op, ())
        if not (later and later[-1] > stage):
            seconds += state.problem.ops[op].seconds
    count = max(1, int(over[eviction.before] - over[eviction.after + 1]))
    return seconds / (count * state.problem.nbytes[eviction.storage])
