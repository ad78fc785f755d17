"""What an aten op does to memory, as far as replaying it needs to know.

>>> import torch
>>> kind_of(torch.ops.aten.t.default).only_views
True
>>> kind_of(torch.ops.aten.relu_.default).writes
(0,)
>>> kind_of(torch.ops.aten.mm.default).can_replay
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fxrecals import _torch
from fxrecals.cost import Call as PricedCall
from fxrecals.cost import Roofline

Place = int | str
"""Of an argument: its index, or its name where it is given by name only."""


@dataclass(frozen=True)
class Kind:
    """What an op does, whatever it is given.

    Attributes:
        only_views: it returns views of its arguments, and writes nothing.
        writes: places of the arguments that it writes to.
        statistics: places of batch norm's running statistics, which it writes to while training,
            and does not read then.
        training: place of the argument that says whether it trains, None where it has no
            statistics.
        counts_writes: autograd counts its writes: it works in place, or has outputs given.
        can_replay: it gives the same again from the same arguments and generator state.
        is_sized_by_data: the size of what it returns depends on values.
    """

    only_views: bool
    writes: tuple[Place, ...]
    statistics: tuple[int, ...]
    training: int | None
    counts_writes: bool
    can_replay: bool
    is_sized_by_data: bool

    def trains(self, args: tuple[Any, ...]) -> bool:
        """Whether it updates running statistics when it is given these."""
        return self.training is not None and bool(args[self.training])


_STATISTICS = {
    # Read in torch 2.13, native_functions.yaml; most of their schemas hide the writes.
    "native_batch_norm": ((3, 4), 5),
    "_native_batch_norm_legit": ((3, 4), 5),
    "cudnn_batch_norm": ((3, 4), 5),
    "miopen_batch_norm": ((3, 4), 5),
}

_HOLD_STATE = ("_cudnn_rnn", "miopen_rnn", "batch_norm_update_stats", "_cudnn_init_dropout_state")
"""Ops that keep state in a way that their schemas do not tell."""

_MOVE_STORAGES = ("set_", "resize_", "resize_as_", "_resize_output_", "swap_", "set_data")


@cache
def kind_of(op: Any) -> Kind:
    """What is known of an op; an op that is not torch's own is never replayed."""
    schema = op._schema
    name = schema.name.rpartition(":")[2]
    writes: list[Place] = [
        argument.name if argument.kwarg_only else index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    statistics, training = _STATISTICS.get(name, ((), None))
    if op._overloadname not in ("", "default"):
        statistics, training = (), None
    returns = [r.alias_info for r in schema.returns]
    return Kind(
        only_views=bool(returns) and not writes and all(alias is not None for alias in returns),
        writes=tuple(place for place in writes if place not in statistics),
        statistics=statistics,
        training=training,
        counts_writes=name.endswith("_") or torch.Tag.out in op.tags,
        can_replay=(
            op.namespace in ("aten", "prims")
            and bool(schema.returns)
            and any("Tensor" in str(r.type) for r in schema.returns)
            and torch.Tag.nondeterministic_bitwise not in op.tags
            and name not in _HOLD_STATE
            and name not in _MOVE_STORAGES
        ),
        is_sized_by_data=torch.Tag.dynamic_output_shape in op.tags,
    )


@dataclass(frozen=True)
class Price:
    """What one run of an op takes.

    Attributes:
        sizes: bytes of each storage that it returns and did not get.
        scratch: bytes that it takes and frees within the run.
        seconds: an estimate.
        is_sure: whether the bytes are known, or the most that they can be; else they are a guess.
        device: where the bytes are.
    """

    sizes: tuple[int, ...]
    scratch: int
    seconds: float
    is_sure: bool
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes in all, while it runs."""
        return sum(self.sizes) + self.scratch


@dataclass
class Prices:
    """Prices by what tells calls apart, found at the first of a kind and remembered.

    Scratch is measured for many calls at once, when there is room: until then it is a guess.
    """

    cost: Roofline = field(default_factory=Roofline)
    _known: dict[Any, Price] = field(default_factory=dict)
    _unmeasured: dict[Any, PricedCall] = field(default_factory=dict)
    _mode: Any = field(default_factory=_torch.fake_mode)

    def of(self, key: Any, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Price:
        """The price of a call that is about to run."""
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_PRICES:
                self._known.clear()
                self._unmeasured.clear()
            with _torch.outside_tracing():  # whoever else watches this thread is not meant
                found = self._known[key] = self._estimate(key, op, args, kwargs)
        return found

    def correct(self, key: Any, sizes: tuple[int, ...]) -> None:
        """A call has made storages of other sizes than its price has."""
        found = self._known.get(key)
        if found is not None:
            self._known[key] = replace(found, sizes=sizes)

    def measure(self) -> None:
        """Measures what is only guessed so far. Allocates as much as the largest of the calls."""
        waiting, self._unmeasured = self._unmeasured, {}
        if not waiting or _torch.is_profiling():
            self._unmeasured = waiting
            return
        with _torch.outside_tracing():
            costs = self.cost.price(list(waiting.values()))
        for (key, _), cost in zip(waiting.items(), costs, strict=True):
            old = self._known[key]
            self._known[key] = replace(old, scratch=cost.scratch_bytes, seconds=cost.seconds)

    def _estimate(
        self, key: Any, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Price:
        kind = kind_of(op)
        has_generator = any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values()))
        given, named = map_tensors(self._fake, args), map_tensors(self._fake, dict(kwargs))
        named = {name: x for name, x in named.items() if not isinstance(x, torch.Generator)}
        try:
            with self._mode, _torch.quiet():
                out = op(*given, **named)
        except Exception:  # no rule of shapes for this op: whatever it raises is no fault of it
            sizes = tuple(t.nbytes for t in tensors_in((args, kwargs)))
            device = next((t.device for t in tensors_in((args, kwargs))), torch.device("cpu"))
            return Price(sizes, 0, 0.0, False, device)
        old = {_torch.storage_key(t) for t in tensors_in((given, named))}
        made = {_torch.storage_key(t): t for t in tensors_in(out)}
        sizes = tuple(_torch.storage_bytes(t) for k, t in made.items() if k not in old)
        may_run = kind.can_replay and not kind.writes and not has_generator
        may_run = may_run and all(map(is_plain, tensors_in(out)))
        call = PricedCall(op, given, named, out, is_known=may_run)
        (cost,) = replace(self.cost, scratch=False).price([call])
        if call.is_known:
            self._unmeasured[key] = call
        if kind.is_sized_by_data:
            most = sum(8 * max(1, t.dim()) * t.numel() for t in tensors_in((args, kwargs)))
            sizes = tuple(min(size, most) for size in sizes)
        return Price(sizes, _guess(call), cost.seconds, True, call.device)

    def _fake(self, t: Tensor) -> Tensor:
        with self._mode:
            return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)


_MOST_PRICES = 10_000

_TAKE_SCRATCH = ("convolution", "attention", "norm_backward", "sort", "cumsum")


def _guess(call: PricedCall) -> int:
    """Scratch of an op that was not measured yet."""
    if not call.is_known or not any(word in str(call.target) for word in _TAKE_SCRATCH):
        return 0
    return max(_torch.storage_bytes(t) for t in (*call.inputs, *call.made))


def map_tensors(change: Callable[[Tensor], Any], x: Any) -> Any:
    """The same with other tensors: tuples, lists and dicts as ops take and return them."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, (tuple, list)):
        return type(x)(map_tensors(change, y) for y in x)
    if isinstance(x, dict):
        return {key: map_tensors(change, y) for key, y in x.items()}
    return x


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory, and nothing else."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors in what an op takes or returns, in order."""
    if isinstance(x, Tensor):
        return [x]
    found: list[Tensor] = []
    _gather(x, found)
    return found


def _gather(x: Any, found: list[Tensor]) -> None:
    if not isinstance(x, (tuple, list)):
        x = x.values() if isinstance(x, dict) else ()
    for y in x:
        if isinstance(y, Tensor):
            found.append(y)
        elif isinstance(y, (tuple, list, dict)):
            _gather(y, found)
