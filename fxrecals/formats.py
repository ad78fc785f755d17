"""Numbers as people read them: three digits that count, and a unit.

>>> format_bytes(1_234_567_890), format_seconds(0.00123), format_count(7_200_000)
('1.23 GB', '1.23 ms', '7.20 M')
"""

from __future__ import annotations

import math
from decimal import Context, Decimal

_THREE_DIGITS = Context(prec=3)
_BYTES = (("PB", 10**15), ("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))
_COUNTS = (("E", 10**18), ("P", 10**15), ("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3))
_SECONDS = (
    ("h", Decimal(3600)),
    ("min", Decimal(60)),
    ("s", Decimal(1)),
    ("ms", Decimal("1e-3")),
    ("us", Decimal("1e-6")),
    ("ns", Decimal("1e-9")),
)


def format_bytes(nbytes: int) -> str:
    """Bytes in decimal units (1 GB is 10^9 bytes); exact below 1000 bytes.

    >>> format_bytes(0), format_bytes(999), format_bytes(1000), format_bytes(999_999)
    ('0 B', '999 B', '1.00 kB', '1.00 MB')
    >>> format_bytes(-5_200_000_001)
    '-5.20 GB'
    """
    if abs(nbytes) < 1000:
        return f"{nbytes} B"
    return _scaled(Decimal(nbytes), tuple((unit, Decimal(size)) for unit, size in _BYTES))


def format_seconds(seconds: float) -> str:
    """A time span, from nanoseconds to hours.

    >>> format_seconds(0), format_seconds(2.5e-7), format_seconds(0.9999), format_seconds(90)
    ('0 s', '250 ns', '1.00 s', '1.50 min')
    """
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    return _scaled(Decimal(seconds), _SECONDS)


def format_count(count: int) -> str:
    """A count, say of floating point operations, with the letter of its power of a thousand.

    >>> format_count(999), format_count(1500), format_count(3 * 10**12) + "FLOP"
    ('999', '1.50 k', '3.00 TFLOP')
    """
    if abs(count) < 1000:
        return f"{count}"
    return _scaled(Decimal(count), tuple((unit, Decimal(size)) for unit, size in _COUNTS))


def _scaled(amount: Decimal, units: tuple[tuple[str, Decimal], ...]) -> str:
    # Rounded before the unit is chosen, so that 999,999 bytes are 1.00 MB and not 1000 kB.
    rounded = _THREE_DIGITS.plus(amount)
    unit, size = next((pair for pair in units if abs(rounded) >= pair[1]), units[-1])
    number = _THREE_DIGITS.divide(rounded, size)
    return f"{number:.{max(0, 2 - number.adjusted())}f} {unit}"
