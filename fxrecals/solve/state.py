"""The incremental timeline: a set of (op, stage) recomputes whose peak is always known.

`State.toggle(op, stage)` adds or removes one recompute and brings the bytes of every position up
to date in time proportional to what changed. It must agree with `timeline.simulate` on the
schedule that `Problem.schedule` makes of it, byte for byte; a test holds it to that.

Every storage has one *span* per run of its maker: from that run to the last read before the next.
A span charges the positions strictly inside it (`through`); what is made or freed within a
position is charged by walking that position's runs (`local`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from copy import copy

import numpy as np
from numpy.typing import NDArray

from fxrecals.solve.problem import Ints, Load, Problem

Bytes = NDArray[np.int64]

Snapshot = dict[int, tuple[int, ...]]
"""The stages at which each op runs again."""

UNREAD = -1
"""End of the span of a generator state that nobody needs: it is not even taken."""


class State:
    """A set of recomputes and its memory profile. Mutable; `runs` is its whole content.

    Attributes:
        work: toggles done, and what else has taken as long; a measure of effort that is the same
            on every machine.
        runs: the stages at which each op runs again.
        seconds: extra time.
        stage: the ops that run again at each stage.
        starts: for each storage, where its spans start.
        ends: for each storage, where its spans end.
        through: for each load, bytes of what passes through each position.
        local: for each load, peak bytes of what is made or freed within each position.
    """

    def __init__(self, problem: Problem, runs: Mapping[int, Iterable[int]] | None = None) -> None:
        self.problem = problem
        self.work = 0
        self._log: list[tuple[int, int]] = []
        self.runs: dict[int, list[int]] = {op: sorted(at) for op, at in (runs or {}).items() if at}
        self.seconds = sum(problem.ops[op].seconds * len(at) for op, at in self.runs.items())
        self.stage: dict[int, list[int]] = {}
        for op in sorted(self.runs):
            for at in self.runs[op]:
                self.stage.setdefault(at, []).append(op)
        self.lazy = frozenset(s for s in problem.rng if s >= 0)
        self._inputs = [  # what a second run reads
            (*reads, state) if state >= 0 else reads
            for reads, state in zip(problem.reads, problem.rng, strict=True)
        ]
        self._outputs = [  # what a second run makes
            tuple(s for s in makes if s != state)
            for makes, state in zip(problem.makes, problem.rng, strict=True)
        ]
        self.evictable: NDArray[np.bool_] = np.array(
            [
                nbytes > 0 and problem.may_run_again[maker] and storage not in self.lazy
                for storage, (nbytes, maker) in enumerate(
                    zip(problem.nbytes, problem.maker, strict=True)
                )
            ],
            np.bool_,
        )
        self._makers = np.array(problem.maker, np.int64)
        self._last: Bytes = np.zeros(len(problem.maker), np.int64)  # where the last span ends
        self.starts: list[list[int]] = []
        self.ends: list[list[int]] = []
        self.through: Bytes = np.zeros((len(problem.loads), problem.end), np.int64)
        self.local: Bytes = np.zeros_like(self.through)
        for row, load in zip(self.through, problem.loads, strict=True):
            row += load.offset
        self._stale = set(range(problem.end))
        for storage in range(len(problem.nbytes)):
            starts, ends = self._spans(storage)
            self.starts.append(starts)
            self.ends.append(ends)
            self._last[storage] = ends[-1]
            self._charge(storage, zip(starts, ends, strict=True), 1)

    def snapshot(self) -> Snapshot:
        """The content, to be given to a new state or to `Problem.schedule`."""
        return {op: tuple(at) for op, at in sorted(self.runs.items())}

    @property
    def loads(self) -> Bytes:
        """Peak bytes of each load within each position."""
        self._settle()
        return self.through + self.local

    @property
    def total(self) -> Bytes:
        """Peak bytes of the heaviest load within each position."""
        loads = self.loads
        return loads[0] if len(loads) == 1 else loads.max(axis=0)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the step."""
        return int(self.loads.max(initial=0))

    def peak_at(self, position: int) -> int:
        """Peak bytes within one position."""
        return self.highest(position, position + 1)

    def highest(self, start: int, end: int) -> int:
        """Peak bytes within the positions from `start` up to, not including, `end`."""
        self._settle()
        return int((self.through[:, start:end] + self.local[:, start:end]).max())

    def excess(self, limit: int) -> int:
        """Bytes over the limit, summed over loads and positions."""
        return int(np.maximum(self.loads - limit, 0).sum())

    def mark(self) -> int:
        """A moment that `rewind` can go back to."""
        return len(self._log)

    def rewind(self, mark: int) -> None:
        """Takes back every toggle since a moment."""
        while len(self._log) > mark:
            self.toggle(*self._log[-1])
            del self._log[-2:]

    def copy(self) -> State:
        """A state of the same content that changes by itself."""
        other = copy(self)
        other.work, other._log = 0, []
        other.runs = {op: list(stages) for op, stages in self.runs.items()}
        other.stage = {stage: list(ops) for stage, ops in self.stage.items()}
        other.starts, other.ends = list(self.starts), list(self.ends)
        other._last = np.array(self._last)
        other.through, other.local = np.array(self.through), np.array(self.local)
        other._stale = set(self._stale)
        return other

    def at(self, snapshot: Snapshot) -> State:
        """A state of another content: cheaper than a new one where most is alike."""
        other = self.copy()
        other.restore(snapshot)
        other.work, other._log = 0, []
        return other

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to another content."""
        wanted = {(op, at) for op, stages in snapshot.items() for at in stages}
        present = {(op, at) for op, stages in self.runs.items() for at in stages}
        touched: set[int] = set()
        for op, at in sorted(wanted ^ present):
            touched.update(self._flip(op, at))
        for storage in touched:
            self._respan(storage)

    def runs_at(self, op: int, stage: int) -> bool:
        """Whether `op` runs again at `stage`."""
        return stage in self.runs.get(op, ())

    def span(self, storage: int, position: int) -> tuple[int, int]:
        """The span that serves a read of `storage` at `position`."""
        index = bisect_right(self.starts[storage], position) - 1
        return self.starts[storage][index], self.ends[storage][index]

    def passing(self, position: int) -> Iterator[tuple[int, int, int]]:
        """The storages that could be made again and whose life passes through `position`, with
        the start and the end of the span there."""
        born_before = self.evictable & (self._makers < position) & (self._last > position)
        for storage in np.flatnonzero(born_before).tolist():
            start, end = self.span(storage, position)
            if start < position < end:
                yield storage, start, end

    def is_alive(self, storage: int, position: int) -> bool:
        """Whether a read of `storage` at `position` would not lengthen its life."""
        return position <= self.span(storage, position)[1]

    def toggle(self, op: int, stage: int) -> None:
        """Adds the recompute of `op` at `stage`, or removes it."""
        for storage in self._flip(op, stage):
            self._respan(storage)

    def _flip(self, op: int, stage: int) -> Ints:
        """Adds or removes a recompute; returns the storages whose spans that may change."""
        self.work += 1
        self._log.append((op, stage))
        runs = self.runs.setdefault(op, [])
        ops = self.stage.setdefault(stage, [])
        if stage in runs:
            runs.remove(stage)
            ops.remove(op)
            self.seconds -= self.problem.ops[op].seconds
        else:
            insort(runs, stage)
            insort(ops, op)
            self.seconds += self.problem.ops[op].seconds
        if not runs:
            del self.runs[op]
        self._stale.add(stage)
        return self.problem.reads[op] + self.problem.makes[op]

    def _settle(self) -> None:
        """Walks every position that has changed: not until someone asks, for toggles come in
        groups that change the same stage."""
        for position in self._stale:
            for row, load in zip(self.local, self.problem.loads, strict=True):
                row[position] = self._walk(position, load)
        self._stale.clear()

    def _respan(self, storage: int) -> None:
        """Brings the spans of a storage up to date."""
        starts, ends = self._spans(storage)
        if starts == self.starts[storage] and ends == self.ends[storage]:
            return
        old = set(zip(self.starts[storage], self.ends[storage], strict=True))
        new = set(zip(starts, ends, strict=True))
        self.starts[storage], self.ends[storage] = starts, ends
        self._last[storage] = ends[-1]
        self._charge(storage, old - new, -1)
        self._charge(storage, new - old, 1)
        for span in old ^ new:
            self._stale.update(span)
        self._stale -= {UNREAD, self.problem.end}

    def _charge(self, storage: int, spans: Iterable[tuple[int, int]], sign: int) -> None:
        for start, end in spans:
            if end > start + 1:
                for row, load in zip(self.through, self.problem.loads, strict=True):
                    row[start + 1 : end] += sign * load.nbytes[storage]

    def _spans(self, storage: int) -> tuple[list[int], list[int]]:
        """Where the spans of a storage start and end."""
        problem = self.problem
        maker = problem.maker[storage]
        lazy = storage in self.lazy
        again = self.runs.get(maker, [])
        if lazy:
            return [maker], [again[-1] if again else UNREAD]
        starts = [maker, *again]
        reads = self.reads(storage)
        ends: list[int] = []
        for index, start in enumerate(starts):
            after = starts[index + 1] if index + 1 < len(starts) else problem.end
            last = bisect_left(reads, after) - 1
            ends.append(max(start, reads[last]) if last >= 0 else start)
        for position in problem.held.get(storage, ()):
            ends[bisect_right(starts, position) - 1] = problem.end
        return starts, ends

    def reads(self, storage: int) -> list[int]:
        """The positions at which a storage is read, ascending."""
        readers = self.problem.readers[storage]
        again = [at for op in readers if op in self.runs for at in self.runs[op]]
        looked = self.problem.looked.get(storage, ())
        return sorted({*readers, *again, *looked}) if again or looked else list(readers)

    def _walk(self, position: int, load: Load) -> int:
        """Peak bytes of what is made or freed within a position."""
        runs = [*self.stage.get(position, ()), position]
        nbytes = load.nbytes
        last = self._last_reads(runs, position)
        live, freed = self._entering(last, len(runs), position, nbytes)
        peak = live
        for index, op in enumerate(runs):
            unread = 0
            for storage in self._outputs[op] if op != position else self._first(op):
                live += nbytes[storage]
                if storage not in last and self.span(storage, position)[1] == position:
                    unread += nbytes[storage]
            if live + load.scratch[op] > peak:
                peak = live + load.scratch[op]
            live -= freed[index] + unread
        return peak

    def _last_reads(self, runs: list[int], position: int) -> dict[int, int]:
        """For each storage read within a position, the index of the run that reads it last."""
        last: dict[int, int] = {}
        for index, op in enumerate(runs):
            for storage in self._inputs[op] if op != position else self.problem.reads[op]:
                last[storage] = index
        for storage in self.problem.looks.get(position, ()):
            last[storage] = len(runs) - 1
        return last

    def _entering(
        self, last: dict[int, int], count: int, position: int, nbytes: Ints
    ) -> tuple[int, list[int]]:
        """Bytes that enter a position and die in it, and those that die after each of its runs."""
        freed = [0] * count
        live = 0
        for storage, index in last.items():
            starts = self.starts[storage]
            span = bisect_right(starts, position) - 1 if len(starts) > 1 else 0
            if self.ends[storage][span] == position:
                freed[index] += nbytes[storage]
                if starts[span] < position:
                    live += nbytes[storage]
        return live, freed

    def _first(self, op: int) -> tuple[int, ...]:
        """What the first run of `op` makes: its generator state only if another run follows."""
        state = self.problem.rng[op]
        needed = state >= 0 and self.ends[state][0] != UNREAD
        return self.problem.makes[op] if needed else self._outputs[op]
