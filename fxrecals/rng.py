"""Random numbers, drawn once: an op runs again from the generator state it ran from first.

The forward notes the state of the op's generator just before the op (`state`), the backward runs
the op from it (`replay`) and puts the generator back, so that the step leaves every generator as
a step without recompute does.

    >>> import torch
    >>> before = state("cpu")
    >>> first = torch.rand(3)
    >>> after = state("cpu")
    >>> torch.equal(replay(before, "cpu", torch.rand, 3), first)
    True
    >>> torch.equal(state("cpu"), after)
    True

A default generator belongs to all threads. While one replays, a draw of another would be one of
old numbers, and would spoil the replay. So what compiled halves draw is drawn in turn. Draws that
other code makes in another thread meanwhile cannot be kept out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CPU_STATE_BYTES = 5056
"""Bytes of the generator state on the CPU (a Mersenne Twister)."""


def can_replay(device: str) -> bool:
    """Whether the generator of `device` can be read and set; if not, its draws must be kept.

    >>> can_replay("cpu"), can_replay("meta")
    (True, False)
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return True
    module = getattr(torch, kind, None)
    return hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")


def state(device: str) -> Tensor:
    """The state of a device's default generator: a uint8 tensor on the CPU.

    Args:
        device: as `str(torch.device)` prints it, with the index where there is one.

    >>> state("cpu").nbytes == CPU_STATE_BYTES
    True
    """
    which = torch.device(device)
    if which.type == "cpu":
        return torch.get_rng_state()
    if which.type == "mps":  # one device, so its functions take none
        return torch.mps.get_rng_state()
    return _module(which).get_rng_state(which)


def set_state(device: str, new_state: Tensor) -> None:
    """Puts a device's default generator into a state that `state` returned.

    >>> set_state("cpu", state("cpu"))
    """
    which = torch.device(device)
    if which.type == "cpu":
        torch.set_rng_state(new_state)
    elif which.type == "mps":
        torch.mps.set_rng_state(new_state)
    else:
        _module(which).set_rng_state(new_state, which)


def replay(
    drawn_from: Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """What `op(*args, **kwargs)` returned when it ran from the state `drawn_from`.

    The generator is left as it was found, also when `op` raises.

    Args:
        drawn_from: a state of the generator of `device`, from `state`.
        device: as `str(torch.device)` prints it.

    >>> first = state("cpu")
    >>> bool((replay(first, "cpu", torch.rand, 2) == replay(first, "cpu", torch.rand, 2)).all())
    True
    """
    now = state(device)
    try:
        set_state(device, drawn_from)
        return op(*args, **kwargs)
    finally:
        set_state(device, now)


_turn = threading.RLock()
"""Held by who draws. Again by the same thread: an op may be a compiled step itself."""


def draw_in_turn(op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What `op(*args, **kwargs)` returns; no other thread draws in turn meanwhile.

    >>> draw_in_turn(torch.rand, 2).shape
    torch.Size([2])
    """
    with _turn:
        return op(*args, **kwargs)


def draw_noted_in_turn(
    device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """The state of the generator of `device`, and what `op(*args, **kwargs)` draws from it.

    >>> drawn_from, first = draw_noted_in_turn("cpu", torch.rand, 3)
    >>> torch.equal(replay(drawn_from, "cpu", torch.rand, 3), first)
    True
    """
    with _turn:
        return state(device), op(*args, **kwargs)


def replay_in_turn(
    drawn_from: Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """`replay`, while no other thread draws in turn.

    >>> first = state("cpu")
    >>> torch.equal(replay_in_turn(first, "cpu", torch.rand, 2), draw_in_turn(torch.rand, 2))
    True
    """
    with _turn:
        return replay(drawn_from, device, op, *args, **kwargs)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
