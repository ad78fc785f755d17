"""Segmented starts: keep the values at narrow cuts, run everything between them again once.

After Chen et al. 2016 (https://arxiv.org/abs/1604.06174), on a graph instead of a list of
layers. The forward is cut where few bytes cross from what is made before to what is read after;
skip connections widen a cut, they do not forbid it. Each segment is recomputed when the backward
reaches it. The result is a set of recomputes like any other, for `greedy` to improve.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from fxrecals.solve.problem import Problem

Runs = dict[int, tuple[int, ...]]


def widths(problem: Problem) -> list[int]:
    """Bytes that cross from each forward position to the later ones, for the forward's sake."""
    change = np.zeros(problem.forward_count + 1, np.int64)
    for storage, nbytes in enumerate(problem.nbytes):
        maker = problem.maker[storage]
        last = max((k for k in problem.readers[storage] if k < problem.forward_count), default=-1)
        if maker < problem.forward_count and last > maker:
            change[maker] += nbytes
            change[last] -= nbytes
    return np.cumsum(change[:-1]).tolist()


def cuts(problem: Problem, segment_bytes: int) -> list[int]:
    """Positions after which to cut, so that about `segment_bytes` are made between two cuts."""
    width = widths(problem)
    found: list[int] = []
    made, best = 0, -1
    for k in range(problem.forward_count - 1):
        made += sum(problem.nbytes[s] for s in problem.makes[k])
        if made < 0.75 * segment_bytes:
            continue
        if best < 0 or width[k] <= width[best]:
            best = k
        if made >= 1.25 * segment_bytes:
            found.append(best)
            made = sum(problem.nbytes[s] for j in range(best + 1, k + 1) for s in problem.makes[j])
            best = -1
    return found


def crossing(problem: Problem, positions: Collection[int]) -> frozenset[int]:
    """The storages that cross some cut for the forward's sake."""
    found: set[int] = set()
    for storage in range(len(problem.nbytes)):
        maker = problem.maker[storage]
        last = max((k for k in problem.readers[storage] if k < problem.forward_count), default=-1)
        if any(maker <= cut < last for cut in positions):
            found.add(storage)
    return frozenset(found)


def recompute_all_but(problem: Problem, kept: Collection[int]) -> Runs:
    """Every op that the backward needs runs again once, when first needed, but for `kept`."""
    runs: dict[int, tuple[int, ...]] = {}
    for stage in range(problem.forward_count, problem.end):
        pending = list(problem.reads[stage])
        while pending:
            storage = pending.pop()
            maker = problem.maker[storage]
            if storage in kept or storage in problem.held or maker in runs:
                continue
            if problem.may_run_at(maker, stage):
                runs[maker] = (stage,)
                pending.extend(problem.reads[maker])
    return runs


def starts(problem: Problem) -> Iterator[Runs]:
    """Segmented starts with ever shorter segments; those with the same cuts come once."""
    total = sum(problem.nbytes[s] for k in range(problem.forward_count) for s in problem.makes[k])
    seen: set[tuple[int, ...]] = set()
    parts = 1.0
    while parts < problem.forward_count:
        found = tuple(cuts(problem, max(1, int(total / parts))))
        if found not in seen:
            seen.add(found)
            yield recompute_all_but(problem, crossing(problem, found))
        parts *= 1.3
