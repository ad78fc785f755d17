"""Dynamic programming over a chain of blocks, each of which may be run again many times.

After rotor (Beaumont et al., https://hal.inria.fr/hal-02352969) and Rockmate (Zhao et al. 2023,
https://arxiv.org/abs/2307.01236), on a graph instead of a list of layers. The forward is cut
where few bytes cross; skip connections widen a cut, they do not forbid it, because what crosses
two cuts is charged once. With the input of block `s` alive, the region of blocks `s..t` and its
backward take within `m` bytes the least of

- *running ahead* to block `j`: what crosses in front of `j` is held while `j..t` is solved, then
  `s..j-1` is solved, its forward run once more;
- *saving* in block `s` what its backward reads, or the part of it that is dear for its bytes, and
  solving `s+1..t` beside it.

`T[s, t]` holds the extra seconds for every `m` at once, in slots of equal size; bytes are rounded
up to whole slots. Regions that end at the last block belong to the forward proper, whose runs are
no extra. One table serves every limit.

The table takes a backward to walk the blocks in reverse, one after another. Where it does not,
the answer costs more than the table says: `State` judges it, and `greedy` mends it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from fxrecals.solve.problem import Ints, Problem
from fxrecals.solve.refine import drop_useless
from fxrecals.solve.state import Snapshot, State

Floats = NDArray[np.float64]
Bytes = NDArray[np.int64]

SLOTS = 400
"""Into how many parts the bytes are divided."""

CLOSE = 0.7
"""Least distance of two cuts, in parts of what a block makes if all make the same."""

SHARES = (0.0, 0.1, 0.3, 0.6, 1.0)
"""Parts of a block, by time, that are not saved but made again in its backward; the cheapest for
their bytes first."""


@dataclass(frozen=True)
class Pass:
    """One run of a block's forward.

    Attributes:
        ops: what runs.
        seconds: its time.
        peak_bytes: of what it makes itself.
    """

    ops: Ints
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Saving:
    """One way to save a block.

    Attributes:
        saved_bytes: held from its forward to its backward, beside what crosses to the next block.
        onward: its forward, if other blocks follow.
        alone: its forward, if its backward follows at once.
        backward_bytes: peak within its backward, without what other blocks hold.
        again: runs within the backward, as (op, stage).
        seconds: their time.
    """

    saved_bytes: int
    onward: Pass
    alone: Pass
    backward_bytes: int
    again: tuple[tuple[int, int], ...]
    seconds: float


@dataclass(frozen=True)
class Block:
    """Some forward positions in a row.

    Attributes:
        first: the first position.
        last: the last position.
        stage: where its backward begins.
        crossing: storages that are alive behind it for the forward's sake.
        ahead: its forward, if nothing is saved.
        savings: the ways to save it.
        beside_forward: bytes that are alive beside the blocks' own while it runs in the forward.
        beside_backward: bytes that are alive beside the blocks' own where its backward begins.
    """

    first: int
    last: int
    stage: int
    crossing: frozenset[int]
    ahead: Pass
    savings: tuple[Saving, ...]
    beside_forward: int
    beside_backward: int


def cuts(problem: Problem, blocks: int) -> Ints:
    """Forward positions behind which to cut the forward into at most about so many blocks.

    The positions behind which the fewest bytes cross come first; a position too close to one that
    was taken, by the bytes made between them, is passed over.
    """
    count = problem.forward_count
    if count <= blocks:
        return tuple(range(count - 1))
    made = np.cumsum([0, *(sum(problem.nbytes[s] for s in problem.makes[k]) for k in range(count))])
    apart = CLOSE * float(made[-1]) / blocks
    width = _widths(problem)
    taken: list[int] = []
    for k in sorted(range(count - 1), key=lambda k: (width[k], k)):
        at = bisect_left(taken, k)
        near = taken[max(0, at - 1) : at + 1]
        if all(abs(made[k + 1] - made[other + 1]) >= apart for other in near):
            taken.insert(at, k)
    return tuple(taken)


def dearest(problem: Problem, share: float) -> frozenset[int]:
    """The forward ops that are dearest for the bytes that they make, up to a share of all bytes."""
    made = {
        op: sum(problem.nbytes[s] for s in problem.makes[op])
        for op in range(problem.forward_count)
        if problem.may_run_again[op]
    }
    left = share * sum(made.values())
    found: set[int] = set()
    for op in sorted(made, key=lambda op: (-problem.ops[op].seconds / max(made[op], 1), op)):
        left -= made[op]
        if left < 0:
            break
        found.add(op)
    return frozenset(found)


def _widths(problem: Problem) -> list[int]:
    """Bytes that cross from each forward position to the later ones, for the forward's sake."""
    change = np.zeros(problem.forward_count + 1, np.int64)
    for maker, last, nbytes in zip(
        problem.maker, problem.last_forward_reads, problem.nbytes, strict=True
    ):
        if last > maker:
            change[maker] += nbytes
            change[last] -= nbytes
    return np.cumsum(change[:-1]).tolist()


@dataclass(frozen=True)
class Chain:
    """The blocks of a graph and the table that solves them, whatever the limit.

    Attributes:
        kept: the state in which nothing runs again.
        cuts: forward positions behind which it is cut, ascending.
        once: ops that do not run again; what they make is kept.
    """

    kept: State
    cuts: Ints
    once: frozenset[int] = frozenset()

    @property
    def floor_bytes(self) -> int:
        """The smallest limit for which the table has an answer; 0 if it has none."""
        answers = np.flatnonzero(np.isfinite(self.table.seconds[0, len(self.blocks) - 1]))
        return int(answers[0]) * self.table.unit if len(answers) else 0

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The forward from cut to cut."""
        return tuple(_Measure(self.kept, self.once).blocks(self.cuts))

    @cached_property
    def table(self) -> _Table:
        """Extra seconds of every region for every number of slots."""
        return _Table(self.kept.problem, self.blocks, self.kept.peak_bytes)

    def state(self, limit: int) -> State | None:
        """What the table runs again within `limit` bytes; None where it finds nothing."""
        found = self.table.runs(limit)
        if found is None:
            return None
        state = self.kept.at(found)
        drop_useless(state)
        return state


class _Measure:
    """Bytes and seconds of blocks.

    A storage is *free* if a recompute can end its life early: all others are charged to the
    positions at which they are alive when everything is kept.
    """

    def __init__(self, kept: State, once: frozenset[int]) -> None:
        problem = self.problem = kept.problem
        count = problem.forward_count
        self.free = [
            maker < count and problem.may_run_again[maker] and storage not in problem.held
            and problem.rng[maker] != storage and maker not in once
            for storage, maker in enumerate(problem.maker)
        ]  # fmt: skip
        self.last_read = problem.last_forward_reads
        self.late_reads = [readers[bisect_left(readers, count) :] for readers in problem.readers]
        self.fixed: Bytes = kept.total  # bytes at each position but for those of free storages
        self.entering: Bytes = np.zeros(
            problem.end, np.int64
        )  # the same, before the op of the position
        spans = [
            (storage, start, end)
            for storage, nbytes in enumerate(problem.nbytes) if nbytes
            for start, end in zip(kept.starts[storage], kept.ends[storage], strict=True)
            if end >= start
        ]  # fmt: skip
        free = [span for span in spans if self.free[span[0]]]
        self.fixed -= _covered(problem, [(s, start, end + 1) for s, start, end in free])
        fixed = [span for span in spans if not self.free[span[0]]]
        self.entering += _covered(problem, [(s, start + 1, end + 1) for s, start, end in fixed])

    def blocks(self, cuts: Ints) -> Iterable[Block]:
        """The blocks between the cuts."""
        ends = [*cuts, self.problem.forward_count - 1]
        firsts = [0, *(cut + 1 for cut in cuts)]
        crossing = self._crossing(ends)
        stages = self._stages(ends)
        for k, span in enumerate(zip(firsts, ends, strict=True)):
            until = stages[k - 1] if k else self.problem.end
            entering = crossing[k - 1] if k else frozenset[int]()
            entering -= crossing[k - 2] if k > 1 else frozenset[int]()
            yield self._block(span, entering, crossing[k], (stages[k], until))

    def _crossing(self, ends: Sequence[int]) -> list[frozenset[int]]:
        found: list[set[int]] = [set() for _ in ends]
        for storage, maker in enumerate(self.problem.maker):
            if self.free[storage]:
                first = bisect_left(ends, maker)
                for k in range(first, bisect_left(ends, self.last_read[storage])):
                    found[k].add(storage)
        return [frozenset(crossing) for crossing in found]

    def _stages(self, ends: Sequence[int]) -> list[int]:
        """Where the backward of each block begins: with the first stage for which what it and the
        blocks after it read does not suffice."""
        stages = [self.problem.end] * len(ends)
        lowest = len(ends)
        for stage in range(self.problem.forward_count, self.problem.end):
            for storage in self.problem.reads[stage]:
                if self.free[storage]:
                    until = max(self.problem.maker[storage], self.last_read[storage])
                    block = bisect_left(ends, until)
                    while lowest > block:
                        lowest -= 1
                        stages[lowest] = stage
        return stages

    def _block(
        self,
        span: tuple[int, int],
        entering: frozenset[int],
        crossing: frozenset[int],
        turn: tuple[int, int],
    ) -> Block:
        first, last = span
        made = [s for k in range(first, last + 1) for s in self.problem.makes[k] if self.free[s]]
        leaving = [s for s in made if s in crossing]
        beside = self._beside(entering, turn)
        savings = (self._saving(span, made, leaving, turn, beside, share) for share in SHARES)
        return Block(
            first=first,
            last=last,
            stage=turn[0],
            crossing=crossing,
            ahead=self._pass(span, leaving),
            savings=tuple(dict.fromkeys(savings)),
            beside_forward=int(self.entering[first : last + 1].max()),
            beside_backward=int(self.entering[turn[0]]) if turn[0] < self.problem.end else 0,
        )

    def _beside(self, entering: frozenset[int], turn: tuple[int, int]) -> Bytes:
        """Bytes at each stage of a block's backward beside its own and what it was made of.

        What crosses only the cut in front of the block is held for its sake: after its last read
        it makes room.
        """
        begin, end = turn
        beside: Bytes = np.array(self.fixed[begin:end])
        for s in entering:
            last = max((begin - 1, *self.late_reads[s][-1:]))
            beside[last + 1 - begin :] -= self.problem.nbytes[s]
        return beside

    def _pass(self, span: tuple[int, int], wanted: Collection[int]) -> Pass:
        """The run of a block that leaves what is wanted."""
        first, last = span
        ops = self._closure(wanted, first)
        change = [0] * (last - first + 2)
        for op in ops:
            for s in self.problem.makes[op]:
                if self.free[s]:
                    end = last if s in wanted else min(last, max(op, self.last_read[s]))
                    change[op - first] += self.problem.nbytes[s]
                    change[end + 1 - first] -= self.problem.nbytes[s]
        alive = list(accumulate(change))
        peaks = (alive[op - first] + self.problem.ops[op].scratch_bytes for op in ops)
        return Pass(ops, self._seconds(ops), max(peaks, default=0))

    def _closure(self, storages: Iterable[int], first: int, alive: Collection[int] = ()) -> Ints:
        """The ops from position `first` on that make these storages, but for what is alive."""
        found: set[int] = set()
        pending = [s for s in storages if s not in alive]
        while pending:
            maker = self.problem.maker[pending.pop()]
            if maker >= first and maker not in found:
                found.add(maker)
                pending += [s for s in self.problem.reads[maker] if self.free[s] and s not in alive]
        return tuple(sorted(found))

    def _seconds(self, ops: Iterable[int]) -> float:
        return sum(self.problem.ops[op].seconds for op in ops)

    def _saving(
        self,
        span: tuple[int, int],
        made: list[int],
        leaving: list[int],
        turn: tuple[int, int],
        beside: Bytes,
        share: float,
    ) -> Saving:
        begin, end = turn
        late = [s for s in made if self.late_reads[s] and self.late_reads[s][-1] >= begin]
        own = [s for s in late if s not in leaving]
        dropped = self._cheapest(own, share)
        saved = [s for s in own if s not in dropped]
        again, born, passing = self._remade(span[0], made, dropped)
        alive: Bytes = np.array(beside)
        for s in late:
            alive[max(0, born.get(s, begin) - begin) : self.late_reads[s][-1] + 1 - begin] += (
                self.problem.nbytes[s]
            )
        for stage, nbytes in passing.items():
            if begin <= stage < end:
                alive[stage - begin] += nbytes
        return Saving(
            saved_bytes=sum(self.problem.nbytes[s] for s in saved),
            onward=self._pass(span, {*saved, *leaving}),
            alone=self._pass(span, {*late} - dropped),
            backward_bytes=int(np.max(alive, initial=0)),
            again=again,
            seconds=self._seconds(op for op, _ in again),
        )

    def _cheapest(self, wanted: list[int], share: float) -> frozenset[int]:
        """The storages cheapest to make for their bytes, for a part of the time of all."""
        nbytes, maker, ops = self.problem.nbytes, self.problem.maker, self.problem.ops
        budget = share * sum(ops[maker[s]].seconds for s in wanted)
        found: set[int] = set()
        for s in sorted(wanted, key=lambda s: (ops[maker[s]].seconds / max(nbytes[s], 1), s)):
            budget -= ops[maker[s]].seconds
            if budget < 0 or not share:
                break
            found.add(s)
        return frozenset(found)

    def _remade(
        self, first: int, made: list[int], dropped: frozenset[int]
    ) -> tuple[tuple[tuple[int, int], ...], dict[int, int], dict[int, int]]:
        """How the backward makes again what was dropped: the runs, where each storage that it
        reads comes back to life, and the bytes that merely pass through a stage."""
        runs: list[tuple[int, int]] = []
        born: dict[int, int] = {}
        passing: dict[int, int] = {}
        alive = {s for s in made if self.late_reads[s] and s not in dropped}
        for storage in sorted(dropped, key=lambda s: (self.late_reads[s][0], s)):
            stage = self.late_reads[storage][0]
            here = {s for s in alive if self.late_reads[s][-1] >= stage}
            for op in self._closure([storage], first, here):
                runs.append((op, stage))
                for s in self.problem.makes[op]:
                    if s in dropped and self.late_reads[s][-1] >= stage:
                        born.setdefault(s, stage)
                        alive.add(s)
                    elif self.free[s]:
                        passing[stage] = passing.get(stage, 0) + self.problem.nbytes[s]
        return tuple(dict.fromkeys(runs)), born, passing


def _covered(problem: Problem, spans: Iterable[tuple[int, int, int]]) -> Bytes:
    """Bytes at each position of storages that are alive from a position up to another."""
    change = np.zeros(problem.end + 2, np.int64)
    for storage, start, end in spans:
        change[start] += problem.nbytes[storage]
        change[max(start, end)] -= problem.nbytes[storage]
    return np.cumsum(change)[: problem.end]


class _Table:
    """`T[s, t]` of every region for every number of slots, and what attains it.

    A choice is ``-1 - k`` for saving the first block in its way `k`, or the block to run ahead to.
    """

    def __init__(self, problem: Problem, blocks: tuple[Block, ...], most: int) -> None:
        self.problem = problem
        self.blocks = blocks
        self.unit = max(1, -(-most // SLOTS))
        self.slots = -(-most // self.unit)
        self.ahead = np.cumsum([0.0, *(block.ahead.seconds for block in blocks)])
        self.between = self._between()
        self.seconds: dict[tuple[int, int], Floats] = {}
        self.choice: dict[tuple[int, int], NDArray[np.int32]] = {}
        for length in range(len(blocks)):
            for s in range(len(blocks) - length):
                self._solve(s, s + length)

    def _between(self) -> list[list[int]]:
        """Slots of what crosses behind block `j` but not in front of block `s`, as `[s][j]`."""
        blocks, nbytes = self.blocks, self.problem.nbytes
        rows: list[list[int]] = []
        for s in range(len(blocks)):
            before = blocks[s - 1].crossing if s else frozenset[int]()
            rows.append([
                self._need(sum(nbytes[x] for x in block.crossing - before)) if j >= s else 0
                for j, block in enumerate(blocks)
            ])  # fmt: skip
        return rows

    def _need(self, nbytes: int) -> int:
        return -(-nbytes // self.unit)

    def _solve(self, s: int, t: int) -> None:
        self.seconds[s, t] = np.full(self.slots + 1, np.inf)
        self.choice[s, t] = np.zeros(self.slots + 1, np.int32)
        is_first = t == len(self.blocks) - 1
        beside = self.blocks[t].beside_backward
        block = self.blocks[s]
        for k, saving in enumerate(block.savings):
            start = block.beside_forward if is_first else beside
            run = saving.onward if s < t else saving.alone
            extra = saving.seconds + (0.0 if is_first else run.seconds)
            held = self.held(s, s, saving) if s < t else 0
            need = max(held, self._need(max(start + run.peak_bytes, saving.backward_bytes)))
            rest = [(s + 1, t, need - held)] if s < t else []
            self._offer(s, t, -1 - k, need, extra, rest)
        room = 0
        for j in range(s + 1, t + 1):
            passed = self.blocks[j - 1]
            start = passed.beside_forward if is_first else beside
            crossing = self.between[s][j - 2] if j - 1 > s else 0
            room = max(room, crossing + self._need(start + passed.ahead.peak_bytes))
            held = self.held(s, j - 1)
            need = max(held, room)
            extra = 0.0 if is_first else float(self.ahead[j] - self.ahead[s])
            self._offer(s, t, j, need, extra, [(j, t, need - held), (s, j - 1, need)])

    def held(self, s: int, j: int, saving: Saving | None = None) -> int:
        """Slots that a region from block `s` on holds behind block `j` while the rest is solved."""
        return self.between[s][j] + (self._need(saving.saved_bytes) if saving else 0)

    def _offer(
        self, s: int, t: int, which: int, need: int, extra: float, rest: list[tuple[int, int, int]]
    ) -> None:
        """Takes a choice that needs `need` slots, wherever it is the cheapest so far.

        `rest` are the regions left to solve, each with the slots that it has at `need`.
        """
        if need > self.slots:
            return
        count = self.slots + 1 - need
        seconds = np.full(count, extra, np.float64)
        for first, last, slots in rest:
            seconds += self.seconds[first, last][slots : slots + count]
        best, choice = self.seconds[s, t][need:], self.choice[s, t][need:]
        better = seconds < best
        best[better] = seconds[better]
        choice[better] = which

    def runs(self, limit: int) -> Snapshot | None:
        """The runs of the solution within `limit` bytes."""
        found: dict[int, set[int]] = {}
        last = len(self.blocks) - 1
        slots = min(limit // self.unit, self.slots)
        if slots < 0 or not np.isfinite(self.seconds[0, last][slots]):
            return None
        pending = [(0, last, slots)]
        while pending:
            region, runs = self._walk(*pending.pop())
            pending += region
            for op, stage in runs:
                if stage < self.problem.end and self.problem.may_run_at(op, stage):
                    found.setdefault(op, set()).add(stage)
        return {op: tuple(sorted(stages)) for op, stages in found.items()}

    def _walk(
        self, s: int, t: int, slots: int
    ) -> tuple[list[tuple[int, int, int]], Iterator[tuple[int, int]]]:
        """What the solution of a region leaves to solve, and what it runs again itself."""
        which, stage = int(self.choice[s, t][slots]), self.blocks[t].stage
        is_first = t == len(self.blocks) - 1
        if which >= 0:
            passes = [block.ahead for block in self.blocks[s:which]]
            runs = ((op, stage) for each in passes for op in each.ops if not is_first)
            return [(which, t, slots - self.held(s, which - 1)), (s, which - 1, slots)], runs
        saving = self.blocks[s].savings[-1 - which]
        rest = [(s + 1, t, slots - self.held(s, s, saving))] if s < t else []
        ops = (saving.onward if s < t else saving.alone).ops
        return rest, chain(((op, stage) for op in ops if not is_first), saving.again)
