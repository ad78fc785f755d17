"""What the live bytes of a step are made of: kept, made again, temporary, scratch, gradients.

`timeline` says how many bytes are alive at each run; this sorts the same bytes by why they are.

    >>> from fxrecals.ir import Op
    >>> values = {n: Value(n, 8, n) for n in "abc"} | {"x": Value("x", 8, "x", Kind.PRIMAL)}
    >>> ops = (
    ...     Op("f", "sin", ("x",), ("a",), Phase.FORWARD),
    ...     Op("g", "cos", ("a",), ("b",), Phase.FORWARD),
    ...     Op("h", "mul", ("a", "b"), ("c",), Phase.BACKWARD),
    ... )
    >>> graph = Graph(ops, values, outputs=("b", "c"))
    >>> found = compose(graph, Schedule(("f", "g"), ("f", "h")))
    >>> found[Category.SAVED], found[Category.RECOMPUTED]
    ((0, 8, 8, 8), (0, 0, 8, 8))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import accumulate

from fxrecals.ir import Graph, Kind, Phase, Value
from fxrecals.schedule import Schedule
from fxrecals.timeline import Lifetime, lifetimes


class Category(str, Enum):
    """Why bytes are alive."""

    SAVED = "saved"  # made in the forward and still alive when the backward begins
    RECOMPUTED = "recomputed"  # made again in the backward
    TEMPORARY = "temporary"  # freed within its half: forward values, gradients of activations
    SCRATCH = "scratch"  # allocated and freed within one op
    GRADIENT = "gradient"  # of parameters


ACTIVATIONS = tuple(category for category in Category if category is not Category.GRADIENT)
"""The categories that add up to activation bytes; with gradients, to those of the step."""


def compose(graph: Graph, schedule: Schedule) -> Mapping[Category, tuple[int, ...]]:
    """Live bytes of each category at each run; linear in the number of runs.

    At each run `ACTIVATIONS` add up to `timeline.Step.live_bytes`, and `Category.GRADIENT` is its
    `gradient_bytes`.

    Args:
        graph: as for `timeline.simulate`.
        schedule: as for `timeline.simulate`.
    """
    runs = schedule.runs
    changes = {category: [0] * (len(runs) + 1) for category in Category}
    for life in lifetimes(graph, schedule):
        change = changes[_category(life, graph, runs, len(schedule.forward))]
        change[life.born] += life.value.nbytes
        if life.dies is not None:
            change[life.dies + 1] -= life.value.nbytes
    found = {category: tuple(accumulate(change[:-1])) for category, change in changes.items()}
    return {**found, Category.SCRATCH: tuple(graph.op(name).scratch_bytes for name in runs)}


def _category(life: Lifetime, graph: Graph, runs: Sequence[str], forward_runs: int) -> Category:
    if life.value.kind is Kind.GRADIENT:
        return Category.GRADIENT
    if life.born < forward_runs:
        stays = life.dies is None or life.dies >= forward_runs
        return Category.SAVED if stays else Category.TEMPORARY
    again = graph.op(runs[life.born]).phase is Phase.FORWARD
    return Category.RECOMPUTED if again else Category.TEMPORARY


def alive_at(graph: Graph, schedule: Schedule, run: int) -> tuple[tuple[Value, int, Category], ...]:
    """What is allocated while one run is going on, the largest first; scratch is apart.

    Args:
        graph: as for `timeline.simulate`.
        schedule: as for `timeline.simulate`.
        run: index of a run.

    Returns:
        For each storage the first value in it, the index of the run that made it, and its
        category.
    """
    runs = schedule.runs
    alive: Iterable[Lifetime] = (
        life
        for life in lifetimes(graph, schedule)
        if life.born <= run and (life.dies is None or life.dies >= run)
    )
    largest = sorted(alive, key=lambda life: -life.value.nbytes)
    return tuple(
        (life.value, life.born, _category(life, graph, runs, len(schedule.forward)))
        for life in largest
    )
