"""What the live bytes of a step are made of: kept, made again, temporary, scratch, gradients.

`timeline` says how many bytes are alive at each run; this sorts the same bytes by why they are.

    >>> from fxrecals.ir import Op, Phase
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

from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import accumulate

from fxrecals.ir import Graph, Kind, Value
from fxrecals.schedule import Schedule
from fxrecals.timeline import Lifetime, Timeline, lifetimes, simulate


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
    timeline = simulate(graph, schedule)
    changes = {category: [0] * (len(timeline.steps) + 1) for category in Category}
    for life in lifetimes(graph, schedule):
        change = changes[category_of(life, timeline)]
        change[life.born] += life.value.nbytes
        if life.dies is not None:
            change[life.dies + 1] -= life.value.nbytes
    found = {category: tuple(accumulate(change[:-1])) for category, change in changes.items()}
    scratch = tuple(graph.op(step.op).scratch_bytes for step in timeline.steps)
    return {**found, Category.SCRATCH: scratch}


def category_of(life: Lifetime, timeline: Timeline) -> Category:
    """Why one allocation of `timeline`'s schedule is alive."""
    if life.value.kind is Kind.GRADIENT:
        return Category.GRADIENT
    if timeline.steps[life.born].again:
        return Category.RECOMPUTED
    forward = timeline.forward_runs
    stays = life.dies is None or life.dies >= forward
    return Category.SAVED if life.born < forward and stays else Category.TEMPORARY


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
    timeline = simulate(graph, schedule)
    alive: Iterable[Lifetime] = (
        life
        for life in lifetimes(graph, schedule)
        if life.born <= run and (life.dies is None or life.dies >= run)
    )
    largest = sorted(alive, key=lambda life: -life.value.nbytes)
    return tuple((life.value, life.born, category_of(life, timeline)) for life in largest)
