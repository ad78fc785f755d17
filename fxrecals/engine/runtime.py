"""`recals`: any Python under a byte limit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fxrecals import _torch
from fxrecals.engine import policies
from fxrecals.engine.accounts import Accounts, counted, read_limit
from fxrecals.engine.core import Engine, Stats
from fxrecals.engine.ops import is_plain, kind_of, tensors_in
from fxrecals.errors import OptionError
from fxrecals.units import DeviceLimits, Limit

Limits = int | str | Mapping[str, int | str] | Limit | DeviceLimits | None
P = ParamSpec("P")
T = TypeVar("T")


class SavedBytes(NamedTuple):
    """What a forward saves for its backward, in bytes: all of it, and the largest tensor."""

    total: int
    largest: int


class Recals:
    """What `recals` returns: an engine that can be called, and entered.

    `others` tells how many bytes of the limit others have, such as graphs of the same step.
    """

    def __init__(
        self,
        limit: Limits,
        devices: Any = "all",
        policy: str | policies.Policy = "dtr",
        *,
        on_overflow: Literal["raise", "exceed"] = "raise",
        others: Callable[[], int] = lambda: 0,
    ) -> None:
        if on_overflow not in ("raise", "exceed"):
            raise OptionError("on_overflow", on_overflow, "'raise' or 'exceed'")
        accounts = Accounts(read_limit(limit), counted(devices), others)
        self._engine = Engine(accounts, policies.named(policy), exceeds=on_overflow == "exceed")
        self._inside = threading.local()

    @property
    def stats(self) -> Stats:
        """What the engine did so far."""
        return self._engine.stats

    def __call__(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """What `fn(*args, **kwargs)` returns, under the limit; its backward will be, too."""
        with self:
            return fn(*args, **kwargs)

    def __enter__(self) -> Recals:
        depth = getattr(self._inside, "depth", 0)
        if depth == 0:
            self._engine.begin()
            watch = _Watch(self._engine)
            hooks = torch.autograd.graph.saved_tensors_hooks(self._engine.save, self._engine.load)
            hooks.__enter__()
            watch.__enter__()
            self._inside.entered = watch, hooks
        self._inside.depth = depth + 1
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.depth -= 1
        if self._inside.depth:
            return
        watch, hooks = self._inside.entered
        del self._inside.entered
        watch.__exit__(*error)
        hooks.__exit__(*error)
        self._engine.leave()
        _follow(watch.alive(), self._engine)

    def analyze(self, fn: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> SavedBytes:
        """Bytes that a forward saves for its backward, without keeping any of them.

        The function runs once for that: random numbers are drawn and statistics counted.
        """
        engine = Engine(Accounts(DeviceLimits(()), counted("all")), policies.lru)
        sizes: dict[Any, int] = {}

        def pack(tensor: Tensor) -> None:
            storage = engine.made(tensor)
            if storage is not None:
                sizes[storage] = storage.nbytes

        with _Watch(engine), torch.autograd.graph.saved_tensors_hooks(pack, _refuse):
            fn(*args, **kwargs)
        return SavedBytes(sum(sizes.values()), max(sizes.values(), default=0))


def _refuse(_: Any) -> Tensor:
    raise RuntimeError("analyze() keeps nothing: there is no backward through what it ran")


_FEW = 256


class _Watch(TorchDispatchMode):
    """Shows an engine the ops that run."""

    supports_higher_order_operators = True

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._made: list[weakref.ref[Tensor]] = []
        self._most = _FEW

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        engine, kwargs = self._engine, kwargs or {}
        if not isinstance(func, OpOverload):
            result = engine.run_unknown(func, args, kwargs)
        elif kind_of(func).only_views or engine.is_at_work:
            result = func(*args, **kwargs)
        elif types or not all(map(is_plain, tensors_in((args, kwargs)))):
            return engine.pass_by(func, args, kwargs)
        elif _torch.is_in_backward():
            return engine.account_for(func, args, kwargs)
        else:
            result = engine.run(func, args, kwargs)
        self._note(result)
        return result

    def _note(self, result: Any) -> None:
        if _torch.is_in_backward():
            return
        self._made += map(weakref.ref, tensors_in(result))
        if len(self._made) > self._most:
            self._made = [ref for ref in self._made if ref() is not None]
            self._most = 2 * len(self._made) + _FEW

    def alive(self) -> list[Tensor]:
        """The tensors that ops made and that are still there."""
        return [tensor for ref in self._made if (tensor := ref()) is not None]


def _follow(tensors: list[Tensor], engine: Engine) -> None:
    """Lets an engine watch the backward of tensors: each node enters a watch before it runs.

    What a node puts on the stack of modes, autograd takes off after it.
    """
    watch = _Watch(engine)
    enter = _enter(engine, watch, [])
    waiting = [t.grad_fn for t in tensors if t.grad_fn is not None]
    mark = f"fxrecals {id(engine)}"
    while waiting:
        node: Any = waiting.pop()
        if mark in node.metadata:
            continue
        node.metadata[mark] = engine
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, nn.Parameter):
            node.register_hook(_discharge(engine, parameter))
        elif parameter is None and _torch.may_be_watched(node):
            made = _torch.gradients_made_by(node)
            node.register_prehook(_enter(engine, watch, made) if made else enter)
        for below, _ in node.next_functions:
            if below is not None:
                taken = getattr(below, "variable", None)
                if taken is not None:
                    engine.givers[id(taken)] += 1
                waiting.append(below)


def _enter(engine: Engine, watch: _Watch, made: list[tuple[int, Tensor]]) -> Callable[..., None]:
    """A hook for before a node runs, that makes gradients of parameters: their bytes, and whose.

    One that is added to another is no gradient yet, and counts.
    """

    def before(gradients: tuple[Tensor | None, ...]) -> None:
        engine.meet_gradients(gradients)
        engine.gradients_due = [
            nbytes
            for nbytes, parameter in made
            if parameter.grad is None and engine.givers[id(parameter)] == 1
        ]
        _torch.push_mode(watch)

    return before


def _discharge(engine: Engine, parameter: nn.Parameter) -> Callable[..., None]:
    """A hook for after a parameter's gradient was taken, as it is or as a copy."""
    weak, key = weakref.ref(parameter), id(parameter)

    def after(_: Any, gradients: tuple[Tensor | None, ...]) -> None:
        taken = weak()
        engine.givers.pop(key, None)
        for gradient in gradients:
            if gradient is not None and taken is not None and taken.grad is not None:
                engine.discharge(gradient, taken.grad)

    return after


def recals(
    limit: Limits,
    devices: Any = "all",
    policy: str | policies.Policy = "dtr",
    *,
    on_overflow: Literal["raise", "exceed"] = "raise",
) -> Recals:
    """The runtime engine: keeps whatever eager code allocates in a step under a byte limit.

    It watches the aten ops of a forward, and owns the tensors that autograd saves. Before an op
    would pass the limit, it evicts saved tensors; when the backward asks for one, it computes that
    again from what it was made of, an op at a time, with the random numbers of the first time. The
    user's Python runs once::

        recals = fxrecals.recals("4GB")
        for batch in loader:
            loss = recals(step, model, batch)   # forward and loss
            loss.backward()
            optimizer.step()

    Put the loss into the call, as what is computed outside is not seen. One object may be called
    several times in a step, and for several models: the limit is one on their sum. It works as a
    context manager as well, around any code.

    Args:
        limit: the most bytes that may be in memory at any moment: an int, ``"4GB"``, ``"auto"``, or
            a dict by device; None for no limit. Each device has it for itself. Counted is what ops
            allocate while the engine sees them, in the backward too, gradients of parameters apart.
        devices: which devices have the limit: ``"all"``; ``"none"`` for the CPU alone; the index of
            an accelerator; a device or its name; a tensor, for the device that it is on; or several
            of these. Generators of all devices are replayed, whichever it is.
        policy: which saved tensor goes first: ``"dtr"``, the cheapest to bring back for the bytes
            and the time that it frees; ``"lru"``, the one not used for longest; or a function of
            an `Evictable`, of which the lowest goes first.
        on_overflow: what happens where nothing is left to evict: ``"raise"`` an
            `InfeasibleLimitError`, or ``"exceed"`` the limit, with one warning.

    Raises:
        OptionError: an argument that does not work.

    Nothing is evicted in vain: inputs, parameters, what the user still holds, and what only an op
    of unknown effects can make again, stay.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    >>> x = torch.randn(512, 64)
    >>> small = recals("500kB")
    >>> small(lambda: model(x).sum()).backward()
    >>> small.stats.evictions > 0, small.stats.peak <= 500_000
    (True, True)
    """
    return Recals(limit, devices, policy, on_overflow=on_overflow)
