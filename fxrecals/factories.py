"""A model and what it is called with, from a function of the user's that makes both.

>>> def make(batch=8):
...     return nn.Linear(4, 4), torch.randn(batch, 4)
>>> call(make, batch=2).example.shape
torch.Size([2, 4])
>>> call_without_memory(make).example.device
device(type='meta')
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxrecals.errors import OptionError

RETURNS = "a model and its example: (model, args), (model, args, kwargs) or (model, kwargs)"

Factory = Callable[..., Any]


@dataclass(frozen=True)
class Made:
    """What a factory returned.

    Attributes:
        model: the model.
        example: what it is called with, as `fxrecals.plan` takes it.
    """

    model: nn.Module
    example: Any


def call(factory: Factory, **options: Any) -> Made:
    """What a factory makes.

    Args:
        factory: returns ``(model, args)``, with a tensor or a tuple for args, or
            ``(model, args, kwargs)``, or ``(model, kwargs)`` with a dict.
        options: what to call it with.

    Raises:
        OptionError: it cannot be called so, or returns something else.
    """
    if isinstance(factory, nn.Module):
        raise OptionError("factory", type(factory).__name__, f"a function that returns {RETURNS}")
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        expected = f"a function that can be called as {_name(factory)}({given}): {error}"
        raise OptionError("factory", _name(factory), expected) from None
    return _read(factory, factory(**options))


def call_without_memory(factory: Factory, **options: Any) -> Made:
    """What a factory makes on ``meta``, where tensors have no memory.

    A factory that cannot do without values, or puts tensors elsewhere by itself, is called as it
    is.

    Raises:
        OptionError: as `call`.
    """
    try:
        with torch.device("meta"):
            return call(factory, **options)
    except OptionError:
        raise
    except Exception:  # whatever a model does with values; if it is wrong, it is so again
        return call(factory, **options)


def _read(factory: Factory, made: Any) -> Made:
    if not isinstance(made, (tuple, list)) or not made or not isinstance(made[0], nn.Module):
        raise _wrong(factory, made)
    model, *rest = made
    if len(rest) == 1 and isinstance(rest[0], (Tensor, tuple, list, Mapping)):
        return Made(model, rest[0])
    if len(rest) == 2 and isinstance(rest[0], (tuple, list)) and isinstance(rest[1], Mapping):
        return Made(model, by_name(model, tuple(rest[0]), rest[1]))
    raise _wrong(factory, made)


def by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Arguments as a dict, where there are some of both kinds."""
    if not kwargs or not args:
        return dict(kwargs) if kwargs else args
    names = list(inspect.signature(model.forward).parameters.values())[: len(args)]
    if any(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in names):
        expected = "arguments all by position or all by name, for a forward that takes *args"
        raise OptionError("factory", type(model).__name__, expected)
    return {**dict(zip((p.name for p in names), args, strict=False)), **kwargs}


def _wrong(factory: Factory, made: Any) -> OptionError:
    kinds = ", ".join(type(x).__name__ for x in made) if isinstance(made, (tuple, list)) else ""
    found = f"({kinds})" if kinds else type(made).__name__
    return OptionError("factory", _name(factory), f"{RETURNS}; it returned {found}")


def _name(factory: Factory) -> str:
    return getattr(factory, "__qualname__", type(factory).__name__)
