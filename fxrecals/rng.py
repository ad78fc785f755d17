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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Source = str | torch.Generator
"""What is drawn from: a generator, or a device, as `str(torch.device)` prints it, for its default
generator."""

CPU_STATE_BYTES = 5056
"""Bytes of the generator state on the CPU (a Mersenne Twister)."""


def can_replay(source: Source) -> bool:
    """Whether a generator can be read and set; if not, its draws must be kept.

    >>> can_replay("cpu"), can_replay("meta")
    (True, False)
    """
    if isinstance(source, torch.Generator):
        return True
    kind = torch.device(source).type
    if kind == "cpu":
        return True
    module = getattr(torch, kind, None)
    return hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an op draws random numbers, by its tags and its arguments: fused attention
    and dropout that drop nothing are tagged too, and draw nothing.

    >>> ones, aten = torch.ones(2), torch.ops.aten
    >>> draws(aten.bernoulli.p, (ones, 0.5), {})
    True
    >>> draws(aten.native_dropout.default, (ones, 0.5, False), {})
    False
    """
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    if argument(op, args, kwargs, "dropout_p") == 0.0:
        return False
    if any(argument(op, args, kwargs, name) is False for name in ("train", "training")):
        return False
    return not ("dropout" in str(op) and argument(op, args, kwargs, "p") == 0.0)


def source_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Source:
    """What a call that draws draws from.

    >>> source_of(torch.ops.aten.bernoulli.p, (torch.ones(2), 0.5), {})
    'cpu'
    """
    generator = argument(op, args, kwargs, "generator")
    if generator is not None:
        return generator
    device = next((x.device for x in args if isinstance(x, Tensor)), kwargs.get("device"))
    return str(torch.get_default_device() if device is None else device)


def argument(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """An argument of a call of an aten op by its schema name, the default where it is not given.

    >>> argument(torch.ops.aten.add.Tensor, (torch.ones(2), torch.ones(2)), {}, "alpha")
    1
    """
    if name in kwargs:
        return kwargs[name]
    schema = getattr(op, "_schema", None)
    for index, one in enumerate(schema.arguments if schema is not None else ()):
        if one.name == name:
            return args[index] if index < len(args) else one.default_value
    return None


def state(source: Source) -> Tensor:
    """The state of a generator, or of a device's default one: a uint8 tensor on the CPU.

    >>> state("cpu").nbytes == CPU_STATE_BYTES
    True
    """
    if isinstance(source, torch.Generator):
        return source.get_state()
    which = torch.device(source)
    if which.type == "cpu":
        return torch.get_rng_state()
    if which.type == "mps":  # one device, so its functions take none
        return torch.mps.get_rng_state()
    return _module(which).get_rng_state(which)


def set_state(source: Source, new_state: Tensor) -> None:
    """Puts a generator into a state that `state` returned.

    >>> set_state("cpu", state("cpu"))
    """
    if isinstance(source, torch.Generator):
        source.set_state(new_state)
        return
    which = torch.device(source)
    if which.type == "cpu":
        torch.set_rng_state(new_state)
    elif which.type == "mps":
        torch.mps.set_rng_state(new_state)
    else:
        _module(which).set_rng_state(new_state, which)


def replay(
    drawn_from: Tensor, source: Source, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """What `op(*args, **kwargs)` returned when it ran from the state `drawn_from`.

    The generator is left as it was found, also when `op` raises.

    Args:
        drawn_from: a state of the generator `source`, from `state`.

    >>> first = state("cpu")
    >>> bool((replay(first, "cpu", torch.rand, 2) == replay(first, "cpu", torch.rand, 2)).all())
    True
    """
    now = state(source)
    try:
        set_state(source, drawn_from)
        return op(*args, **kwargs)
    finally:
        set_state(source, now)


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
    source: Source, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """The state of a generator, and what `op(*args, **kwargs)` draws from it.

    >>> drawn_from, first = draw_noted_in_turn("cpu", torch.rand, 3)
    >>> torch.equal(replay(drawn_from, "cpu", torch.rand, 3), first)
    True
    """
    with _turn:
        return state(source), op(*args, **kwargs)


def replay_in_turn(
    drawn_from: Tensor, source: Source, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """`replay`, while no other thread draws in turn.

    >>> first = state("cpu")
    >>> torch.equal(replay_in_turn(first, "cpu", torch.rand, 2), draw_in_turn(torch.rand, 2))
    True
    """
    with _turn:
        return replay(drawn_from, source, op, *args, **kwargs)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
