"""Slow and plain answers, written apart from the library, to hold it against.

`live_bytes` plays a schedule on a heap of reference-counted blocks, freeing what nobody will read
any more by looking ahead; `cheapest` tries every set of recomputes of a small graph.
"""

from collections.abc import Iterator
from itertools import combinations

from fxrecals.ir import Graph, Kind, Phase
from fxrecals.schedule import Schedule, makes, reads
from fxrecals.solve.problem import Problem
from fxrecals.timeline import simulate


def live_bytes(graph: Graph, schedule: Schedule) -> list[int]:
    """Activation bytes alive during each run."""
    free_of_charge = {v.storage for v in graph.values.values() if v.kind is Kind.PRIMAL}
    runs = [(graph.op(name), False) for name in schedule.forward]
    runs += [(graph.op(name), graph.op(name).phase is Phase.FORWARD) for name in schedule.backward]
    block_of: dict[str, int] = {}  # value -> block that its newest copy lives in
    size: dict[int, int] = {}
    for_ever: set[int] = set()
    found: list[int] = []
    for now, (op, again) in enumerate(runs):
        here = {graph.values[n].storage: block_of[n] for n in reads(op, again) if n in block_of}
        for name in makes(op, again):
            value = graph.values[name]
            if value.kind is Kind.RNG_STATE and not _is_read_later(graph, runs, now, name):
                continue
            if value.storage in free_of_charge:
                continue
            if value.storage not in here:
                here[value.storage] = len(size)
                size[len(size)] = 0 if value.kind is Kind.GRADIENT else value.nbytes
            block_of[name] = here[value.storage]
            if name in graph.outputs and not again:
                for_ever.add(block_of[name])
        alive = set(here.values()) | for_ever
        alive |= {b for n, b in block_of.items() if _is_read_later(graph, runs, now, n)}
        found.append(sum(size[b] for b in alive) + op.scratch_bytes)
    return found


def _is_read_later(graph: Graph, runs: list, now: int, name: str) -> bool:
    """Whether the copy of a value that exists after run `now` is read by a later run."""
    for op, again in runs[now + 1 :]:
        if name in reads(op, again):
            return True
        if name in makes(op, again):
            return False
    return False


def every_set(problem: Problem, most: int) -> Iterator[dict[int, tuple[int, ...]]]:
    """Every set of at most `most` recomputes."""
    able = [
        (op, stage)
        for op in range(problem.forward_count)
        for stage in range(problem.forward_count, problem.end)
        if problem.may_run_at(op, stage)
    ]
    for count in range(min(most, len(able)) + 1):
        for chosen in combinations(able, count):
            runs: dict[int, tuple[int, ...]] = {}
            for op, stage in chosen:
                runs[op] = (*runs.get(op, ()), stage)
            yield runs


def cheapest(problem: Problem, most: int) -> dict[int, float]:
    """The least extra seconds for each peak that at most `most` recomputes reach."""
    best: dict[int, float] = {}
    for runs in every_set(problem, most):
        schedule = problem.schedule(runs)
        peak = simulate(problem.graph, schedule).peak_bytes
        seconds = sum(problem.ops[op].seconds * len(at) for op, at in runs.items())
        best[peak] = min(seconds, best.get(peak, seconds))
    return best
