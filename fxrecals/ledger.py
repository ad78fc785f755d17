"""What the graphs of one step hold of its limit, while the step runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxrecals.units import Limit


@dataclass(frozen=True)
class Held:
    """What one graph holds in a step.

    Attributes:
        saved_bytes: from its forward to its backward.
        gradient_bytes: from its backward on: its gradients, where the limit counts them.
        room_bytes: how much later graphs, whose backwards run first, may leave to its backward.
    """

    saved_bytes: int
    gradient_bytes: int = 0
    room_bytes: float = float("inf")


class Ledger:
    """What the graphs of one step hold of its limit.

    While a later graph is compiled, earlier ones have run their forward and not their backward:
    what they keep is not there for the later one. Nor are gradients, where the limit counts them,
    of graphs whose backward has run, until none is left that waits for its own.

    >>> from fxrecals.units import parse_limit
    >>> ledger = Ledger()
    >>> ledger.allowance(parse_limit("50%"), baseline_bytes=1000) is None
    True
    >>> ticket = ledger.enter([Held(300)])
    >>> ledger.allowance(parse_limit("50%"), baseline_bytes=4000)
    200
    >>> ledger.leave(ticket)
    >>> ledger.alive_bytes
    0
    """

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Held, ...]] = {}
        self._gradient_bytes = 0
        self._entered = 0
        self._limit_bytes: int | None = None

    @property
    def _held(self) -> list[Held]:
        return [held for graphs in self._waiting.values() for held in graphs]

    @property
    def alive_bytes(self) -> int:
        """Bytes that graphs hold for a backward yet to come, and gradients that count."""
        return sum(held.saved_bytes for held in self._held) + self._gradient_bytes

    @property
    def is_empty(self) -> bool:
        """Whether no graph waits for its backward: a step begins."""
        return not self._waiting

    def allowance(self, limit: Limit, baseline_bytes: int) -> int | None:
        """Bytes left for a graph, or None where all of the limit is its own.

        A share is one of the first graph's peak, and stays that for the rest of the step.
        Free memory ("auto") is already less what others hold.

        Args:
            limit: the limit of the step.
            baseline_bytes: peak of the graph without recompute.
        """
        if limit.nbytes is None and limit.share is None:
            return None
        if self.is_empty or self._limit_bytes is None:
            self._limit_bytes = limit.resolve(baseline_bytes)
        return None if self.is_empty else max(0, self._limit_bytes - self.alive_bytes)

    def over_bytes(self, gradient_bytes: int) -> float:
        """By how much backwards that wait miss the limit, at most, once a graph has joined them
        that leaves so many bytes of gradients; 0 if none does.

        >>> ledger = Ledger()
        >>> for held in (Held(300, gradient_bytes=90, room_bytes=50), Held(200, 40, 20)):
        ...     _ = ledger.enter([held])
        >>> [ledger.over_bytes(nbytes) for nbytes in (5, 15, 30)]
        [0, 5, 20]
        """
        found: float = 0
        for held in reversed(self._held):
            found = max(found, gradient_bytes - held.room_bytes)
            gradient_bytes += held.gradient_bytes
        return found

    def enter(self, held: Sequence[Held]) -> int:
        """Notes that a forward has run of graphs that hold so much; returns a ticket to leave."""
        self._entered += 1
        self._waiting[self._entered] = tuple(held)
        return self._entered

    def leave(self, ticket: int, *, has_run: bool = False) -> None:
        """Notes that a backward has run or never will. Leaving twice is leaving once."""
        left = self._waiting.pop(ticket, ())
        if has_run:
            self._gradient_bytes += sum(held.gradient_bytes for held in left)
        if self.is_empty:
            self._gradient_bytes = 0
