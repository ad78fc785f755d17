"""Bytes at the door: what a user may write for `limit`, read without loss.

    >>> parse_limit("4GB").resolve(baseline_bytes=10**10)
    4000000000
    >>> parse_limit("35%").resolve(baseline_bytes=10**10)
    3500000000

How numbers leave, `format_bytes` and its like, is re-exported here from `fxrecals.formats`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import overload

from fxrecals.errors import LimitError
from fxrecals.formats import format_bytes, format_count, format_seconds

__all__ = [
    "DeviceLimits",
    "Limit",
    "format_bytes",
    "format_count",
    "format_seconds",
    "parse_limit",
]

_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
}
# Bounded, so that no text makes an integer that takes long to read.
_QUANTITY = re.compile(r"([0-9]{1,25}(?:\.[0-9]{0,25})?|\.[0-9]{1,25})\s*([a-z]*|%)", re.IGNORECASE)
_DEVICE = re.compile(r"[a-z][a-z_]*(:[0-9]+)?")

_WORKS = (
    'bytes as an int, "4GB" (a GB is 10^9 bytes), "4GiB" (a GiB is 2^30 bytes), '
    '"50%" (of the peak without recompute) or "auto" (free memory)'
)


@dataclass(frozen=True)
class Limit:
    """A limit as it was asked for; `resolve` gives its bytes.

    Attributes:
        text: what the user wrote.
        nbytes: the limit in bytes, if it was given so.
        share: the part of the peak without recompute, over 0 and at most 1, if it was given so.
            Where `nbytes` and `share` are both None, the limit is the free memory.
    """

    text: str
    nbytes: int | None = None
    share: Fraction | None = None

    def __str__(self) -> str:
        return self.text

    def resolve(self, baseline_bytes: int, available_bytes: Callable[[], int] | None = None) -> int:
        """The limit in bytes, rounded down, so that it never allows more than was asked for.

        Args:
            baseline_bytes: the peak without recompute, of what the limit bounds.
            available_bytes: tells how many bytes of the device that may take; called for "auto"
                only.

        Raises:
            LimitError: the limit is "auto" and nobody can tell the free memory.

        >>> parse_limit("auto").resolve(10**9, available_bytes=lambda: 7 * 10**8)
        700000000
        """
        if self.nbytes is not None:
            return self.nbytes
        if self.share is not None:
            return int(self.share * baseline_bytes)
        if available_bytes is None:
            raise LimitError(
                "limit", self.text, 'here the free memory is unknown: say "4GB" or "50%"'
            )
        return max(0, available_bytes())


@dataclass(frozen=True)
class DeviceLimits:
    """A limit for each of some devices; the others have none.

    Attributes:
        limits: pairs of a device, as `str(torch.device)` prints it, and its limit.
    """

    limits: tuple[tuple[str, Limit], ...]

    def __str__(self) -> str:
        return ", ".join(f"{device}: {limit}" for device, limit in self.limits)

    def resolve(
        self,
        baseline_bytes: Mapping[str, int],
        available_bytes: Callable[[str], int] | None = None,
    ) -> dict[str, int]:
        """The limits in bytes by device, as `Limit.resolve` gives them.

        Args:
            baseline_bytes: the peak on each device without recompute; 0 where missing.
            available_bytes: as for `Limit.resolve`, given the device.

        Raises:
            LimitError: a limit is "auto" and nobody can tell the free memory.

        >>> limits = parse_limit({"cuda:0": "4GB", "cuda:1": "50%"})
        >>> limits.resolve({"cuda:1": 10**9})
        {'cuda:0': 4000000000, 'cuda:1': 500000000}
        """

        def available_on(device: str) -> Callable[[], int] | None:
            return partial(available_bytes, device) if available_bytes else None

        return {
            device: limit.resolve(baseline_bytes.get(device, 0), available_on(device))
            for device, limit in self.limits
        }


@overload
def parse_limit(limit: int | str | Limit) -> Limit: ...
@overload
def parse_limit(limit: Mapping[str, int | str | Limit] | DeviceLimits) -> DeviceLimits: ...
def parse_limit(
    limit: int | str | Limit | Mapping[str, int | str | Limit] | DeviceLimits,
) -> Limit | DeviceLimits:
    """Reads a limit: bytes, bytes with a unit, a share of the baseline, "auto", or one by device.

    A limit that was read before is returned as it is. Units are read in either case; a fraction
    of a byte is dropped.

    Raises:
        LimitError: anything else, with what would have worked.

    >>> parse_limit("1.5 GiB").nbytes, parse_limit(512).nbytes, parse_limit("50%").share
    (1610612736, 512, Fraction(1, 2))
    >>> parse_limit("6")
    Traceback (most recent call last):
    fxrecals.errors.LimitError: limit='6' does not work; what works: a unit, as in "6GB" or "6%"
    """
    if isinstance(limit, (Limit, DeviceLimits)):
        return limit
    if isinstance(limit, Mapping):
        return _by_device(limit)
    return _one(limit, "limit")


def _by_device(limits: Mapping[str, int | str | Limit]) -> DeviceLimits:
    if not limits:
        raise LimitError("limit", {}, 'a dict with a device in it, as in {"cuda:0": "4GB"}')
    found: dict[str, Limit] = {}
    for key, limit in limits.items():
        device = str(key)  # a torch.device too
        if not _DEVICE.fullmatch(device) or device in found:
            raise LimitError(
                "limit", limits, 'devices as torch names them, each once, as in {"cuda:0": "4GB"}'
            )
        found[device] = limit if isinstance(limit, Limit) else _one(limit, f"limit[{device!r}]")
    return DeviceLimits(tuple(found.items()))


def _one(limit: object, argument: str) -> Limit:
    if isinstance(limit, str):
        return _from_text(limit, argument)
    if isinstance(limit, float) and 0 < limit <= 1:
        raise LimitError(argument, limit, f'a share of the peak is written "{100 * limit:g}%"')
    if isinstance(limit, float) and limit > 1 and limit.is_integer():
        raise LimitError(argument, limit, f"an int of bytes, as in {int(limit)}")
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise LimitError(argument, limit, _WORKS)
    if limit <= 0:
        raise LimitError(argument, limit, "at least one byte")
    return Limit(format_bytes(limit), nbytes=limit)


def _from_text(text: str, argument: str) -> Limit:
    words = text.strip()
    if words.lower() == "auto":
        return Limit("auto")
    match = _QUANTITY.fullmatch(words)
    if match is None:
        raise LimitError(argument, text, _WORKS)
    number, unit = match[1], match[2].lower()
    if not unit:
        raise LimitError(argument, text, _with_a_unit(number))
    if unit == "%":
        return _share(Fraction(number) / 100, text, argument)
    if unit not in _UNITS:
        raise LimitError(argument, text, "the units B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB")
    nbytes = int(Fraction(number) * _UNITS[unit])
    if nbytes == 0:
        raise LimitError(argument, text, "at least one byte")
    return Limit(words, nbytes=nbytes)


def _with_a_unit(number: str) -> str:
    if 0 < Fraction(number) <= 100:
        return f'a unit, as in "{number}GB" or "{number}%"'
    return 'a unit, as in "6GB" or "50%"'


def _share(share: Fraction, text: str, argument: str) -> Limit:
    if not 0 < share <= 1:
        raise LimitError(argument, text, "over 0% and at most 100% of the peak without recompute")
    return Limit(text.strip(), share=share)
