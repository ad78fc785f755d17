"""`compile`: planned graphs where tracing works, the engine where it does not.

The first call decides. If Dynamo traces all of it, into graphs with no op of weight between them,
graphs it is: planned as a whole, and as fast as the inner compiler makes them. Otherwise the engine
takes the whole call, from then on, so that one ledger knows all bytes. A call that tracing fails in
has left nothing behind: generators and buffers are put back, and the engine runs it.
"""

from __future__ import annotations

import copy
import random
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxrecals import _torch, rng
from fxrecals.dynamo import Backend, backend
from fxrecals.engine import Recals, Stats, recals
from fxrecals.errors import FxrecalsError, OptionError
from fxrecals.formats import format_bytes
from fxrecals.planning import LimitLike
from fxrecals.units import parse_limit

BESIDE = 0.01
"""Part of the limit that ops outside the graphs may allocate before the engine takes the call."""

MOST_GRAPHS = 64
"""Input sizes and modes of which a compiled model may have graphs; then the engine takes over."""


@dataclass(frozen=True)
class Ran:
    """What ran a model, and why.

    Attributes:
        way: ``"graphs"``, ``"engine"``, or ``"nothing"`` before the first call.
        reason: why it is the engine, with the place where tracing ended; "" for graphs.
        plans: of the graphs, as `Backend.plans` keeps them.
        stats: what the engine did.
    """

    way: Literal["nothing", "graphs", "engine"]
    reason: str
    plans: tuple[Any, ...]
    stats: Stats

    def __str__(self) -> str:
        if self.way == "nothing":
            return "nothing has run yet"
        if self.way == "graphs":
            return "\n".join(["planned graphs", *map(str, self.plans)])
        stats = self.stats
        return (
            f"the engine, because {self.reason}\n"
            f"peak {format_bytes(stats.peak)}, {stats.evictions} evictions, {stats.recomputes} ops "
            f"run again in {stats.recomputed_seconds:.3g} s"
        )


def compile(
    model: nn.Module,
    limit: LimitLike,
    *,
    inner: Literal["inductor", "eager"] = "inductor",
    policy: Any = "dtr",
    on_overflow: Literal["raise", "exceed"] = "raise",
    **options: Any,
) -> nn.Module:
    """A module with the same parameters that trains under `limit`, whatever its Python does.

    Where Dynamo traces the model, it is compiled with `backend`; where it does not, `recals` runs
    it as it is. `ran` tells which it was. Like a rewritten module, it shares all with `model`.

    Args:
        model: in training mode as it will be trained.
        limit: as for `backend`; a share such as ``"50%"`` works for graphs only.
        inner: what runs the graphs, as for `backend`.
        policy: of the engine, as for `recals`.
        on_overflow: of the engine, as for `recals`.
        options: further arguments of `backend`.

    Raises:
        OptionError: an argument that does not work.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    >>> small = compile(model, "1MB", inner="eager")
    >>> small(torch.randn(4, 8)).sum().backward()
    >>> ran(small).way
    'graphs'
    """
    if not isinstance(model, nn.Module):
        raise OptionError("model", model, "a torch.nn.Module")
    graphs = backend(limit, inner=inner, **options)
    twin = copy.copy(model)
    twin.__dict__ = dict(model.__dict__)
    engine = _engine(limit, policy, on_overflow)
    twin._compiled_call_impl = _Door(twin, graphs, engine)
    return twin


def ran(model: nn.Module) -> Ran:
    """What has run a model that `compile` gave.

    Raises:
        OptionError: it is another model.
    """
    door = getattr(model, "_compiled_call_impl", None)
    if not isinstance(door, _Door):
        raise OptionError("model", type(model).__name__, "what fxrecals.compile returned")
    return door.ran


def _engine(limit: LimitLike, policy: Any, on_overflow: Any) -> Recals | None:
    """The engine for a limit; None where the limit is a share, which only a plan can resolve."""
    shares = [getattr(one, "share", None) for one in _limits(parse_limit(limit))]
    if any(share is not None for share in shares):
        recals(None, policy=policy, on_overflow=on_overflow)  # still says what does not work
        return None
    return recals(limit, policy=policy, on_overflow=on_overflow)


def _limits(limit: Any) -> Sequence[Any]:
    return [one for _, one in limit.limits] if hasattr(limit, "limits") else [limit]


class _Door:
    """What is called in place of a model's forward."""

    def __init__(self, model: nn.Module, graphs: Backend, engine: Recals | None) -> None:
        self._model = weakref.ref(model)  # without a cycle, so that it dies with its last reference
        self._graphs = graphs
        self._engine = engine
        self._outside = _Outside()
        self._compiled = _torch.compile_alone(_call, self._compile_graph, MOST_GRAPHS)
        self._count = 0
        self._way: Literal["nothing", "graphs", "engine"] = "nothing"
        self._reason = ""

    @property
    def ran(self) -> Ran:
        """What has run so far."""
        stats = self._engine.stats if self._engine is not None else Stats()
        return Ran(self._way, self._reason, self._graphs.plans, stats)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None, "it is called by the model"
        if self._way == "engine" and self._engine is not None:
            return self._engine(_call, model, *args, **kwargs)
        if self._way == "graphs":
            return self._compiled(model, *args, **kwargs)
        return self._first(model, args, kwargs)

    def _first(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = _State(model)
        try:
            with self._outside:
                out = self._compiled(model, *args, **kwargs)
        except FxrecalsError:
            raise
        except Exception as error:  # of tracing, or of the model itself: the engine will tell
            before.put_back()
            self._turn_to_engine(f"tracing failed: {_torch.root_reason(error)}")
            return self(*args, **kwargs)
        self._decide()
        return out

    def _compile_graph(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **given: Any
    ) -> Callable[..., Any]:
        self._count += 1
        reason = _torch.break_reason(gm)
        if reason and not self._reason:
            self._reason = reason
        run = self._graphs(gm, example_inputs, **given)
        return lambda *arguments: self._outside.not_these(run, *arguments)

    def _decide(self) -> None:
        """After a first call: whether the graphs were all of it."""
        most = max((one.nbytes or 0 for one in _limits(self._graphs.settings.limit)), default=0)
        if not self._count:
            self._turn_to_engine("Dynamo compiled nothing of it")
        elif self._outside.nbytes > BESIDE * most and most:
            beside = format_bytes(self._outside.nbytes)
            self._turn_to_engine(f"ops outside the graphs made {beside}: {self._reason}")
        else:
            self._way, self._reason = "graphs", ""

    def _turn_to_engine(self, reason: str) -> None:
        if self._engine is None:
            raise OptionError("limit", str(self._graphs.settings.limit), f"bytes, because {reason}")
        self._way, self._reason = "engine", reason
        warnings.warn(f"the engine runs the model from now on: {reason}", stacklevel=2)


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


class _Outside(TorchDispatchMode):
    """Adds up what ops allocate that run outside the graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._within = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo compiles under modes that say so (torch 2.13)."""
        return True

    def not_these(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a graph, whose ops do not count."""
        self._within += 1
        try:
            return run(*arguments)
        finally:
            self._within -= 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._within:
            old = {_torch.storage_key(t) for t in tree_leaves((args, kwargs)) if _is_real(t)}
            made = {_torch.storage_key(t): t for t in tree_leaves(result) if _is_real(t)}
            self.nbytes += sum(t.nbytes for key, t in made.items() if key not in old)
        return result


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and not _torch.is_fake(x) and _torch.has_storage(x)


class _State:
    """What a call may change before it fails: generators and buffers."""

    def __init__(self, model: nn.Module) -> None:
        tensors = (*model.parameters(), *model.buffers())
        devices = dict.fromkeys(["cpu", *(str(t.device) for t in tensors)])
        self._generators = {d: rng.state(d) for d in devices if rng.can_replay(d)}
        self._python = random.getstate(), np.random.get_state()
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def put_back(self) -> None:
        """Makes it all as it was."""
        random.setstate(self._python[0])
        np.random.set_state(self._python[1])
        for device, state in self._generators.items():
            rng.set_state(device, state)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
