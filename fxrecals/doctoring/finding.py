"""One thing that is wrong, with what it costs and what cures it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What is wrong, and the change that cures it.

    Attributes:
        kind: the fault, in two or three words.
        what: what was seen.
        nbytes: what it costs; 0 where it costs time, or where bytes are not known.
        when: how often, or how long, it costs that.
        where: the line, as ``train.py:12``; "" where it was not found.
        evidence: the figures behind it.
        cure: what to change.
    """

    kind: str
    what: str
    nbytes: int
    when: str
    where: str
    evidence: tuple[str, ...]
    cure: str
