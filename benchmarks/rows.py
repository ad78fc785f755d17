"""Rows of a comparison, as JSON lines, and who is ahead of whom.

>>> ours = Row("gpt", "fxrecals", "50 %", peak=100, times=(1.10, 1.12, 1.15))
>>> peer = Row("gpt", "checkpoint", "each block", peak=90, times=(1.02, 1.05, 1.11))
>>> ahead(peer, ours)  # smaller, but not faster beyond the spread
False
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Row:
    """What was measured of one model trained in one way.

    Attributes:
        model: its name.
        system: what trained it.
        setting: how that was told to save memory: a limit, a budget, or which blocks.
        limit: bytes that the system was given, where it takes bytes.
        peak: measured peak of activations, in bytes.
        times: lower quartile, median and upper quartile of step times over plain eager's.
        seconds: median time of a step.
        gradients, dropout, buffers: a word each for what two steps left, as `pareto` explains.
        note: why there is no figure.
        curve: limit in bytes, planned time and proved bound, both over a step that keeps all.
        machine: where, when, and by which command.
    """

    model: str
    system: str
    setting: str = ""
    limit: int | None = None
    peak: int | None = None
    times: tuple[float, float, float] | None = None
    seconds: float | None = None
    gradients: str = ""
    dropout: str = ""
    buffers: str = ""
    note: str = ""
    curve: tuple[tuple[int, float, float], ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """What tells it from other rows."""
        return self.model, self.system, self.setting

    @property
    def name(self) -> str:
        """System and setting, as people say it."""
        return f"{self.system} {self.setting}".strip()

    @property
    def ours(self) -> bool:
        """Whether this library trained the model."""
        return self.system.startswith("fxrecals")


def ahead(one: Row, other: Row) -> bool:
    """Whether a row has a smaller peak than another, and a smaller time beyond both quartiles."""
    if one.peak is None or other.peak is None or one.times is None or other.times is None:
        return False
    return one.peak < other.peak and one.times[2] < other.times[0]


def answers(one: Row, other: Row) -> bool:
    """Whether a row has no larger peak than another, and no larger time beyond both quartiles."""
    if one.peak is None or other.peak is None or one.times is None or other.times is None:
        return False
    return one.peak <= other.peak and one.times[0] <= other.times[2]


def beaten(rows: Iterable[Row]) -> list[tuple[Row, Row, Row | None]]:
    """Each of our rows with a peer's that is ahead of it, and our fastest answer to that."""
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row.model, []).append(row)
    found: list[tuple[Row, Row, Row | None]] = []
    for of_model in models.values():
        ours = [row for row in of_model if row.ours]
        for peer in (row for row in of_model if not row.ours):
            answer = min(
                (row for row in ours if answers(row, peer)),
                key=_median,
                default=None,
            )
            found += [(row, peer, answer) for row in ours if ahead(peer, row)]
    return found


def _median(row: Row) -> float:
    return row.times[1] if row.times else float("inf")


def frontier(rows: Iterable[Row]) -> list[Row]:
    """The rows that no other is ahead of, by peak.

    >>> rows = [Row("", str(p), peak=p, times=(t, t, t)) for p, t in ((9, 1.0), (5, 1.2), (7, 1.3))]
    >>> [row.peak for row in frontier(rows)]
    [5, 9]
    """
    whole = [row for row in rows if row.peak is not None and row.times is not None]
    best = [row for row in whole if not any(ahead(other, row) for other in whole)]
    return sorted(best, key=lambda row: (row.peak or 0, row.times))


def read(path: Path) -> dict[Key, Row]:
    """The rows of a file, the last of each key; a last line that was cut off is taken out of it.

    Raises:
        ValueError: another line is no row.
    """
    if not path.exists():
        return {}
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    rows: dict[Key, Row] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = _row(json.loads(line))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number} is no row of `benchmarks.pareto`") from error
        rows[row.key] = row
    return rows


def append(path: Path, rows: Iterable[Row]) -> None:
    """Adds rows to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def _row(fields: dict[str, object]) -> Row:
    """As `append` wrote it: JSON has no tuples."""
    times, curve = fields.pop("times"), fields.pop("curve")
    assert isinstance(curve, list)
    return Row(
        **fields,  # pyright: ignore[reportArgumentType]
        times=tuple(times) if isinstance(times, list) else None,  # pyright: ignore[reportArgumentType]
        curve=tuple(map(tuple, curve)),  # pyright: ignore[reportArgumentType]
    )
