"""A graph of Dynamo's, and what was compiled of it: a version for each schedule that it runs.

Dynamo calls a backend once for a graph, and then the compiled function at each step. The limit
is one of bytes, so another input size may ask for another schedule, and so may the other graphs
of the step. AOTAutograd makes a new pair of halves of the same graph then, and the caller, who
holds the function that was returned first, does not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

from torch import fx

from fxrecals import _torch
from fxrecals.capture import Joint
from fxrecals.errors import InfeasibleLimitError
from fxrecals.ir import Graph
from fxrecals.ledger import Held
from fxrecals.schedule import Schedule

Sizes = tuple[int, ...]
"""What the symbols in the sizes of a graph's inputs are in one call."""

MOST_SIZES = 4096
"""Sizes for which a site remembers which version to run."""

_numbers = count()


@dataclass(frozen=True, eq=False)
class Part:
    """A joint graph that was planned.

    Attributes:
        joint: what AOTAutograd traced.
        graph: how it was read, at the sizes that it was planned for.
        planned: what the planner returned.
        held: what it holds in a step.
    """

    joint: Joint
    graph: Graph
    planned: Any
    held: Held

    @property
    def schedule(self) -> Schedule:
        """The schedule that runs."""
        return getattr(self.planned, "schedule", self.planned)


@dataclass(frozen=True, eq=False)
class Version:
    """What was compiled of a graph: a function, and its part, None where nothing is planned."""

    call: Callable[..., Any]
    part: Part | None


@dataclass(eq=False)
class Site:
    """A graph of Dynamo's.

    Attributes:
        gm: the graph.
        inputs: its inputs, as they were traced.
        mode: `torch.compile`'s.
        reason: the break that ends it, "" where none does.
        is_followed: whether another graph is likely to run before its backward.
        versions: what was compiled of it, in order.
        by_sizes: which of them runs at which sizes, or why none does.
        by_place: which of them runs at which place of which step that was planned as a whole;
            None where none of them is part of that plan.
        number: tells sites apart, also when they are gone.
    """

    gm: fx.GraphModule
    inputs: Sequence[Any]
    mode: str | None
    reason: str
    is_followed: bool
    versions: list[Version] = field(default_factory=list)
    by_sizes: dict[Sizes, Version | InfeasibleLimitError] = field(default_factory=dict)
    by_place: dict[tuple[int, int], Version | None] = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_numbers))

    @staticmethod
    def of(gm: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None) -> Site:
        """The site of a backend's call."""
        inputs = _torch.traced_inputs(gm, example_inputs)
        return Site(gm, inputs, mode, _torch.break_reason(gm), _torch.is_followed(gm))

    @cached_property
    def _symbols(self) -> Mapping[Any, tuple[int, int | None]]:
        return _torch.size_symbols(self.inputs)

    def sizes(self, arguments: Sequence[Any]) -> Sizes:
        """The values of the symbols in a call. At tracing, the inputs tell those first seen."""
        return tuple(
            _torch.hint(arguments[index] if dim is None else arguments[index].shape[dim])
            for index, dim in self._symbols.values()
        )

    def known(self, sizes: Sizes) -> dict[Any, int]:
        """The symbols with their values, as `_torch.sizes_known` takes them."""
        return dict(zip(self._symbols, sizes, strict=True))

    def with_schedule(self, schedule: Schedule) -> Version | None:
        """The version that runs a schedule, if there is one."""
        return next((v for v in self.versions if v.part and v.part.schedule == schedule), None)

    def remember(self, sizes: Sizes, found: Version | InfeasibleLimitError) -> None:
        """Notes which version runs at some sizes."""
        if len(self.by_sizes) >= MOST_SIZES:
            self.by_sizes.clear()
        self.by_sizes[sizes] = found
