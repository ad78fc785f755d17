"""An allocator's events, in order: which blocks they make, and what is alive at the peak.

What was there before the first event is not known, so frees of it are left out.

    >>> events = [Event(1, 8), Event(2, 16), Event(1, -8), Event(9, -4), Event(1, 4)]
    >>> [(block.nbytes, block.born, block.dies) for block in blocks(events)]
    [(8, 0, 2), (16, 1, None), (4, 4, None)]
    >>> peak(events)
    Instant(index=1, nbytes=24)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Moved(Protocol):
    """What an event must have: bytes at an address, negative for a free."""

    @property
    def address(self) -> int:
        """Where the block begins; it may be used again after a free."""
        ...

    @property
    def nbytes(self) -> int:
        """Of the block."""
        ...


class Event(NamedTuple):
    """The least that an event can be."""

    address: int
    nbytes: int


class Block(NamedTuple):
    """One allocation.

    Attributes:
        address: where it is.
        nbytes: of it.
        born: index of the event that allocated it.
        dies: index of the event that freed it; None if it outlives them all.
    """

    address: int
    nbytes: int
    born: int
    dies: int | None = None

    def is_alive_at(self, index: int) -> bool:
        """Whether it is there after the event with that index."""
        return self.born <= index and (self.dies is None or self.dies > index)


class Instant(NamedTuple):
    """When the most was alive: after the event with an index, or index -1 if never anything."""

    index: int
    nbytes: int


def blocks(events: Sequence[Moved]) -> list[Block]:
    """The blocks that events allocate, by birth."""
    found: dict[int, Block] = {}
    alive: dict[int, int] = {}
    for index, event in enumerate(events):
        if event.nbytes > 0:
            alive[event.address] = index
            found[index] = Block(event.address, event.nbytes, index)
        else:
            born = alive.pop(event.address, None)
            if born is not None:
                found[born] = found[born]._replace(dies=index)
    return list(found.values())


def peak(events: Sequence[Moved]) -> Instant:
    """The first instant at which the most bytes that `events` allocate are alive."""
    live = 0
    found = Instant(-1, 0)
    alive: dict[int, int] = {}
    for index, event in enumerate(events):
        if event.nbytes > 0:
            alive[event.address] = event.nbytes
            live += event.nbytes
        else:
            live -= alive.pop(event.address, 0)
        if live > found.nbytes:
            found = Instant(index, live)
    return found
