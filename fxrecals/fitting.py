"""The largest size that trains under a limit, found by planning alone.

A size is whatever a factory takes as a keyword: a batch, a sequence length, an image's side. For
each size tried, the model is made without memory, traced, and planned; nothing is trained. A few
sizes are enough: from two on, it is known how the bytes of each value grow, and so the floor.

    >>> from torch import nn
    >>> def make(batch=8):
    ...     return nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.randn(batch, 64)
    >>> found = fit(make, "1MB")
    >>> found.plan.peak_bytes <= 1_000_000 < found.next_floor_bytes
    True

It is taken for granted that a larger size has no lower floor.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxrecals import cost as costing
from fxrecals.api import IN_EVAL
from fxrecals.capture import capture
from fxrecals.capture import step as whole_step
from fxrecals.compiling import input_shapes
from fxrecals.errors import InfeasibleLimitError, LimitError, OptionError
from fxrecals.factories import Factory, call_without_memory
from fxrecals.formats import format_bytes
from fxrecals.ir import Graph
from fxrecals.planning import (
    Progress,
    explore,
    limit_bytes,
    named_cost,
    named_peak,
    plan_graph,
)
from fxrecals.plans import Plan
from fxrecals.report import table
from fxrecals.schedule import Schedule
from fxrecals.solve.auto import Frontier
from fxrecals.solve.problem import make_problem
from fxrecals.timeline import simulate
from fxrecals.units import Limit, parse_limit

MOST_TRIES = 32
"""Sizes that are planned for at most."""

MOST_EXPLORED = 3
"""Sizes that are explored without a trace, before one is traced."""

CLOSE = 1.01
"""How far the guessed floor of the next size is above the limit at least, if it is not tried."""


@dataclass(frozen=True)
class Try:
    """One size that was planned for.

    Attributes:
        size: the size.
        floor_bytes: the smallest limit for it.
        baseline_bytes: its peak without recompute.
        fits: whether the floor is within the limit.
    """

    size: int
    floor_bytes: int
    baseline_bytes: int
    fits: bool


@dataclass(frozen=True)
class Fit:
    """What `fit` found; it prints itself.

    Attributes:
        vary: the keyword that was varied.
        size: the largest that trains under the limit.
        plan: for that size.
        tried: all that was planned, by size.
        next_size: the next larger size.
        next_floor_bytes: its floor, above the limit.
        is_next_tried: whether that was planned for; else it is guessed from those that were.
    """

    vary: str
    size: int
    plan: Plan
    tried: tuple[Try, ...]
    next_size: int
    next_floor_bytes: int
    is_next_tried: bool

    def __repr__(self) -> str:
        limit = format_bytes(self.plan.limit_bytes or 0)
        about = "needs" if self.is_next_tried else "would need about"
        lines = [
            f"{self.vary}={self.size} is the largest that trains under {limit}; "
            f"{self.vary}={self.next_size} {about} {format_bytes(self.next_floor_bytes)}",
            repr(self.plan).partition("\n")[0],
        ]
        rows = [_row(each) for each in self.tried]
        headers = (self.vary, "floor", "no recompute", "")
        return "\n".join([*lines, "", table(headers, rows, "rrrl")])


def fit(
    factory: Factory,
    limit: int | str | Limit,
    *,
    vary: str = "batch",
    start: int | None = None,
    step: int = 1,
    peak: str = "activations",
    cost: str | costing.Cost = "roofline",
    device: str | torch.device | None = None,
    on_try: Callable[[int], None] | None = None,
    on_progress: Progress | None = None,
) -> Fit:
    """The largest size that trains under a limit, with its plan; nothing is trained to find it.

    Args:
        factory: called with the size as a keyword; returns a model and what it is called with,
            as `fxrecals.factories.call` reads it.
        limit: in bytes: an int, ``"4GB"``, ``"4GiB"``, or ``"auto"``.
        vary: the keyword.
        start: the size to try first; by default the keyword's own, or two steps.
        step: sizes are multiples of it, say 64 for a sequence or 32 for an image.
        peak: as for `plan`.
        cost: as for `plan`.
        device: as for `plan`.
        on_try: called with each size before it is planned for.
        on_progress: as for `plan`.

    Raises:
        OptionError: an argument that does not work; `LimitError` if it is the limit.
        InfeasibleLimitError: not even the smallest size trains under the limit.
        CaptureError: as for `plan`.
    """
    read = _checked(limit, start, step)
    which = named_peak(peak)
    priced = named_cost(cost, which)

    def traced(size: int) -> _Traced:
        if on_try is not None:
            on_try(size)
        made = call_without_memory(factory, **{vary: size})
        captured = capture(made.model, made.example, device=device)
        graph = whole_step(captured, priced)
        notes = (*captured.breaks, *([] if made.model.training else [IN_EVAL]))
        shapes = input_shapes(captured.joints[0])
        frontier, within = explore(graph, which), limit_bytes(graph, read, which)
        return _Traced(size, graph, frontier, within, notes, shapes)

    search = _Search(traced, _growth_of_examples(factory, vary), step)
    size: int | None = _rounded(start or _default(factory, vary) or 2 * step, step)
    while size is not None and len(search.tried) < MOST_TRIES:
        search.attempt(size)
        size = search.next()
    best = search.best_traced
    try:
        found = plan_graph(
            best.graph,
            read,
            peak=which,
            notes=best.notes,
            on_progress=on_progress,
            explored=best.frontier,
            name=f"{vary}={best.size}",
        )
    except InfeasibleLimitError as error:
        raise error.of_inputs(best.shapes) from None
    return search.result(vary, found)


def _checked(limit: Any, start: int | None, step: int) -> Limit:
    read = parse_limit(limit)
    if not isinstance(read, Limit) or read.share is not None:
        raise LimitError("limit", limit, 'bytes, as in "4GB": a share grows with the size')
    for name, value in (("start", start), ("step", step)):
        if value is not None and (type(value) is not int or value < 1):
            raise OptionError(name, value, "a whole number from 1 on")
    return read


def _default(factory: Factory, vary: str) -> int | None:
    found = inspect.signature(factory).parameters.get(vary)
    return found.default if found is not None and type(found.default) is int else None


def _rounded(size: float, step: int) -> int:
    return max(step, int(size) // step * step)


@dataclass(frozen=True)
class _Traced:
    """A size that was traced and explored: its graph, and what its floor and its limit are."""

    size: int
    graph: Graph
    frontier: Frontier
    limit_bytes: int
    notes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def floor_bytes(self) -> int:
        return self.frontier.floor.peak_bytes

    @property
    def fits(self) -> bool:
        return self.floor_bytes <= self.limit_bytes


@dataclass(frozen=True)
class _Law:
    """How the floor goes on from two sizes whose steps have the same ops.

    Bytes of a value are constant, or grow as some power of the size; both are seen from two sizes.
    Schedules that lead to a floor are then judged at any other size.
    """

    one: _Traced
    other: _Traced
    schedules: tuple[Schedule, ...]

    @staticmethod
    def of(one: _Traced, other: _Traced) -> _Law:
        """The law that two sizes show."""
        return _Law(one, other, tuple(_lowest(each.frontier) for each in (one, other)))

    def explored(self, size: int) -> _Law:
        """The law with the schedule of the floor at one more size."""
        found = Frontier(make_problem(self._graph(size)))
        return replace(self, schedules=(*self.schedules, _lowest(found)))

    def floor(self, size: int) -> int:
        """The lowest of the peaks of the schedules at a size."""
        graph = self._graph(size)
        return min(simulate(graph, schedule).peak_bytes for schedule in self.schedules)

    def _graph(self, size: int) -> Graph:
        one, other = (each.frontier.problem.graph for each in (self.one, self.other))

        def at_size(a: int, b: int) -> int:
            return self._grown(a, b, size)

        ops = (
            replace(op, scratch_bytes=at_size(op.scratch_bytes, twin.scratch_bytes))
            for op, twin in zip(one.ops, other.ops, strict=True)
        )
        values = {
            name: replace(value, nbytes=at_size(value.nbytes, twin.nbytes))
            for (name, value), twin in zip(one.values.items(), other.values.values(), strict=True)
        }
        return Graph(tuple(ops), values, one.outputs)

    def _grown(self, a: int, b: int, size: int) -> int:
        if a == b or not a or not b:
            return max(a, b)
        power = math.log(a / b) / math.log(self.one.size / self.other.size)
        return round(a * (size / self.one.size) ** power)


def _lowest(frontier: Frontier) -> Schedule:
    return frontier.problem.schedule(frontier.floor.runs)


class _Search:
    """Sizes tried, and which to try next."""

    def __init__(
        self, traced: Callable[[int], _Traced], growth: Callable[[int], float], step: int
    ) -> None:
        self.traced = traced
        self.growth = growth
        self.step = step
        self.tried: dict[int, _Traced] = {}
        self.limit_bytes = 0

    def attempt(self, size: int) -> None:
        """Traces and explores a size."""
        self.tried[size] = self.traced(size)
        self.limit_bytes = self.tried[size].limit_bytes

    @property
    def best(self) -> int:
        """The largest size that fits; 0 where none does."""
        return max((size for size, each in self.tried.items() if each.fits), default=0)

    @property
    def over(self) -> float:
        """The smallest size that does not fit, as far as that is known."""
        return min((size for size, each in self.tried.items() if not each.fits), default=math.inf)

    def next(self) -> int | None:
        """The size to try next, or None if the largest is known."""
        after = self.best + self.step
        if after >= self.over:
            return None
        law = self._law()
        if law is None:
            return self._without_law(after)
        guess = self._largest(law)
        for _ in range(MOST_EXPLORED):
            # At a size that seems too large, other schedules may lead lower.
            law = law.explored(guess + self.step)
            guess, before = self._largest(law), guess
            if guess == before:
                break
        if guess <= self.best:
            is_close = not self.best or law.floor(after) <= CLOSE * self.limit_bytes
            return after if is_close else None
        return min(guess, int(self.over) - self.step) if self.over < math.inf else guess

    def floor(self, size: int) -> int:
        """The floor of a size: as explored, or else as it follows from those that were."""
        if size in self.tried:
            return self.tried[size].floor_bytes
        law = self._law()
        assert law is not None, "without a law, the next size was tried"
        return law.floor(size)

    def _law(self) -> _Law | None:
        """How the bytes of the two sizes nearest to the limit go on, if their ops are the same."""

        def distance(each: _Traced) -> float:
            return abs(math.log(max(each.floor_bytes, 1) / max(self.limit_bytes, 1)))

        near = sorted(self.tried.values(), key=distance)
        if len(near) < 2 or near[0].graph.by_name.keys() != near[1].graph.by_name.keys():
            return None
        return _Law.of(near[0], near[1])

    def _largest(self, law: _Law) -> int:
        """The largest size whose floor is within the limit by a law, 0 if none is."""
        low, high = 0, self.step
        while high < self.over and law.floor(high) <= self.limit_bytes:
            low, high = high, 2 * high
        while high - low > self.step:
            middle = _rounded((low + high) // 2, self.step)
            low, high = (middle, high) if law.floor(middle) <= self.limit_bytes else (low, middle)
        return low

    def _without_law(self, after: int) -> int:
        """Grows as the example does, then twofold; halves what is left once that is too much."""
        if len(self.tried) < 2:
            (only,) = self.tried.values()
            room = self.limit_bytes / max(only.floor_bytes, 1)
            guess = only.size * room ** (1 / self.growth(only.size))
        elif self.over < math.inf:
            guess = (self.best + self.over) / 2
        else:
            guess = 2 * self.best
        return int(min(max(after, _rounded(guess, self.step)), self.over - self.step))

    @property
    def best_traced(self) -> _Traced:
        """The largest that fits, or the smallest tried."""
        return self.tried[self.best or min(self.tried)]

    def result(self, vary: str, found: Plan) -> Fit:
        after = self.best + self.step
        tried = tuple(
            Try(size, each.floor_bytes, each.frontier.baseline_bytes, each.fits)
            for size, each in sorted(self.tried.items())
        )
        floor = self.floor(after)
        return Fit(vary, self.best, found, tried, after, floor, after in self.tried)


def _growth_of_examples(factory: Factory, vary: str) -> Callable[[int], float]:
    """Tells the power with which the example grows around a size: 2 for the side of an image."""

    def growth(size: int) -> float:
        examples = (call_without_memory(factory, **{vary: n}).example for n in (size, 2 * size))
        before, after = map(_elements, examples)
        return max(1.0, math.log2(after / before)) if before and after else 1.0

    return growth


def _elements(example: Any) -> int:
    return sum(x.numel() for x in pytree.tree_leaves(example) if isinstance(x, Tensor))


def _row(each: Try) -> tuple[str, ...]:
    fits = "fits" if each.fits else "does not fit"
    return (str(each.size), format_bytes(each.floor_bytes), format_bytes(each.baseline_bytes), fits)
