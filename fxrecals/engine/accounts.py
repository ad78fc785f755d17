"""Bytes in memory, by device, and how many there may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fxrecals.cost import free_bytes
from fxrecals.errors import LimitError, OptionError
from fxrecals.units import DeviceLimits, Limit, parse_limit


@dataclass
class Account:
    """The bytes of one device.

    Attributes:
        limit: how many may be in memory at any moment, None for no limit.
        others: tells how many of them others have.
        live: in memory now.
        peak: the most that were, scratch of the ops included.
        needed: the most that could not be done without.
    """

    limit: int | None
    others: Callable[[], int] = lambda: 0
    live: int = 0
    peak: int = 0
    needed: int = 0

    def over(self, more: int) -> int:
        """By how many bytes `more` would pass the limit; 0 or less if they fit."""
        return -1 if self.limit is None else self.live + more + self.others() - self.limit

    def note(self, more: int) -> None:
        """Notes a moment at which `more` bytes are in memory."""
        self.peak = max(self.peak, self.live + more)


class Accounts:
    """An account for each device, opened at its first bytes.

    Args:
        limit: as `parse_limit` reads it; a share of a peak is none here, as nothing is planned.
        has_limit: which devices have it, as `counted` gives it.
        others: as for `Account`, the same for all.

    >>> cpu = torch.device("cpu")
    >>> Accounts(parse_limit("4kB"), counted("all"))[cpu].limit
    4000
    >>> Accounts(parse_limit({"cuda:0": "4kB"}), counted("all"))[cpu].limit is None
    True
    """

    def __init__(
        self,
        limit: Limit | DeviceLimits,
        has_limit: Callable[[torch.device], bool],
        others: Callable[[], int] = lambda: 0,
    ) -> None:
        self._others = others
        self._limit = limit
        self._has_limit = has_limit
        self._open: dict[torch.device, Account] = {}

    def __getitem__(self, device: torch.device) -> Account:
        account = self._open.get(device)
        if account is None:
            account = self._open[device] = Account(self._limit_on(device), self._others)
        return account

    def __iter__(self):
        return iter(self._open.items())

    def _limit_on(self, device: torch.device) -> int | None:
        if isinstance(self._limit, DeviceLimits):
            limit = dict(self._limit.limits).get(str(device))
        else:
            limit = self._limit if self._has_limit(device) else None
        return None if limit is None else limit.resolve(0, lambda: free_bytes(str(device)))


def read_limit(limit: object) -> Limit | DeviceLimits:
    """A limit of the engine; None for none.

    Raises:
        LimitError: it cannot be read, or is a share of a peak, which nobody knows beforehand.

    >>> read_limit("50%")
    Traceback (most recent call last):
    fxrecals.errors.LimitError: limit='50%' does not work; what works: bytes, as in "4GB": what ...
    """
    if limit is None:
        return DeviceLimits(())
    parsed = parse_limit(limit)  # type: ignore[arg-type]
    limits = dict(parsed.limits).values() if isinstance(parsed, DeviceLimits) else (parsed,)
    if any(one.share is not None for one in limits):
        expected = 'bytes, as in "4GB": what a share is of is unknown here; analyze() tells it'
        raise LimitError("limit", limit, expected)
    return parsed


def counted(devices: object) -> Callable[[torch.device], bool]:
    """Which devices' bytes count.

    Args:
        devices: "all"; "none" for the CPU alone; the index of an accelerator, -1 for the CPU; a
            device, or its name; a tensor, for the device that it is on; or several of these.

    Raises:
        OptionError: anything else.

    >>> counted("none")(torch.device("cpu")), counted(0)(torch.device("cpu"))
    (True, False)
    """
    if isinstance(devices, str) and devices == "all":
        return lambda device: True
    several = devices if isinstance(devices, (list, tuple)) else [devices]
    chosen = [_one(device, devices) for device in several]
    return lambda device: any(_same(device, one) for one in chosen)


def _one(device: object, devices: object) -> torch.device:
    if isinstance(device, torch.Tensor):
        return device.device
    if isinstance(device, str) and device == "none":
        return torch.device("cpu")
    expected = '"all", "none", an index, a device, a tensor, or a list of these'
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise OptionError("devices", devices, expected)
    try:
        if device == -1:
            return torch.device("cpu")
        if isinstance(device, int):
            kind = torch.accelerator.current_accelerator()
            return torch.device(kind.type if kind is not None else "cuda", device)
        return torch.device(device)
    except RuntimeError:
        raise OptionError("devices", devices, expected) from None


def _same(device: torch.device, chosen: torch.device) -> bool:
    return device.type == chosen.type and chosen.index in (None, device.index)
