"""The engine: keeps what is in memory under the limit, and brings back what was evicted.

Nothing here knows how ops and saved tensors come to it; `fxrecals.engine.runtime` does.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxrecals import _torch, rng
from fxrecals.engine.accounts import Accounts
from fxrecals.engine.memory import Memory
from fxrecals.engine.ops import Kind, Price, Prices, is_plain, kind_of, map_tensors, tensors_in
from fxrecals.engine.policies import Policy
from fxrecals.engine.tape import Call, Idle, Ref, Storage, Value


@dataclass(frozen=True)
class Stats:
    """What an engine did so far.

    Attributes:
        evictions: tensors that were dropped to make room.
        recomputes: ops that ran again.
        recomputed_seconds: the time that they took.
        peak: the most bytes that were in memory on one device at any moment, as far as the engine
            saw them: what ops under it allocated, their scratch included, gradients of parameters
            apart.
    """

    evictions: int = 0
    recomputes: int = 0
    recomputed_seconds: float = 0.0
    peak: int = 0


class Saved:
    """What autograd keeps in place of a saved tensor."""

    __slots__ = ("__weakref__", "memory", "order", "ref")

    def __init__(self, memory: Memory, ref: Ref, order: int) -> None:
        self.memory, self.ref, self.order = memory, ref, order

    def __del__(self) -> None:
        self.memory.let_go(self.ref.value, self.order)


class Engine:
    """Runs ops under a limit, keeps what they made them of, and brings back saved tensors.

    Attributes:
        prices: of the ops that it saw.
        givers: how many nodes give a gradient to a parameter, by its id.
    """

    def __init__(self, accounts: Accounts, policy: Policy, *, exceeds: bool = False) -> None:
        self.prices = Prices()
        self.givers: Counter[int] = Counter()
        self._memory = Memory(accounts, policy, exceeds=exceeds)
        self._recomputes = 0
        self._recomputed_seconds = 0.0
        self._thread = threading.local()

    @property
    def gradients_due(self) -> list[int]:
        """Bytes of parameters' gradients that the node of a backward will make that runs in this
        thread: they do not count."""
        return getattr(self._thread, "gradients_due", [])

    @gradients_due.setter
    def gradients_due(self, sizes: list[int]) -> None:
        self._thread.gradients_due = sizes

    @property
    def stats(self) -> Stats:
        """What it did so far."""
        memory = self._memory
        peak = max((account.peak for _, account in memory.accounts), default=0)
        return Stats(memory.evictions, self._recomputes, self._recomputed_seconds, peak)

    def begin(self) -> None:
        """A call begins: what could not be measured in the midst of a step is measured now."""
        self.prices.measure()
        if self._memory.is_empty:
            self.givers.clear()

    def leave(self) -> None:
        """The engine sees no ops from here on."""
        with self._memory.desk:
            self._memory.forget()

    # --- ops ----------------------------------------------------------------------------------

    @property
    def is_at_work(self) -> bool:
        """Whether the ops that this thread runs now are the engine's own."""
        return self._memory.desk.is_mine

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op of the forward: under the limit, and on the tape."""
        kind = kind_of(op)
        with self._memory.desk:
            self._memory.clock += 1
            self._memory.cursor = None
            price = self._price(op, args, kwargs)
            written = self._about_to_write(kind, args, kwargs)
            call = self._note(op, kind, args, kwargs, price, written)
            draws = call is not None and rng.draws(op, args, kwargs)
            self._memory.make_room(price, op, rng.CPU_STATE_BYTES if draws else 0)
        if call is None or not draws:
            result = op(*args, **kwargs)
        else:
            source = rng.source_of(op, args, kwargs)
            state, result = rng.draw_noted_in_turn(source, op, *args, **kwargs)
            call.drawn_from = source, state
        with self._memory.desk:
            if call is not None and call.drawn_from is not None:
                self._memory.meet(call.drawn_from[1], charged=True)
            made = self._record(call, result)
            self._overwrite(kind, call, written)
            self._check(price, made, op, args, kwargs)
        return result

    def pass_by(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op on tensors of other kinds: what it writes to is all that is seen of it."""
        kind = kind_of(op)
        if not kind.writes:
            return op(*args, **kwargs)
        with self._memory.desk:
            written = self._about_to_write(kind, args, kwargs)
        result = op(*args, **kwargs)
        with self._memory.desk:
            self._overwrite(kind, None, written)
        return result

    def run_unknown(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs what is no op but a program, such as `torch.cond`: what it returns stays."""
        result = op(*args, **kwargs)
        with self._memory.desk:
            for tensor in filter(is_plain, tensors_in(result)):
                self._memory.meet(tensor, charged=True)
                self._memory.make_room(Price((), 0, 0.0, True, tensor.device), op)
        return result

    def account_for(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op of the backward: under the limit."""
        kind = kind_of(op)
        with self._memory.desk:
            price = self._price(op, args, kwargs)
            written = self._about_to_write(kind, args, kwargs)
            due = self.gradients_due
            gradients = [size for size in price.sizes if size in due]
            self._memory.make_room(price, op, -sum(gradients))
        result = op(*args, **kwargs)
        with self._memory.desk:
            self._overwrite(kind, None, written)
            made: list[int] = []
            for tensor in filter(is_plain, tensors_in(result)):
                if self._memory.known(tensor) is None:
                    is_gradient = tensor.untyped_storage().nbytes() in gradients
                    storage = self._memory.meet(tensor, charged=not is_gradient)
                    made.append(storage.nbytes)
                    if is_gradient:
                        gradients.remove(storage.nbytes)
                        due.remove(storage.nbytes)
            self._check(price, made, op, args, kwargs)
        return result

    def _check(
        self, price: Price, made: list[int], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Sees to it that an op is under the limit of which the bytes were not known before, such
        as the workspace of an LSTM, and that they are known from now on."""
        if price.is_sure and sum(made) <= sum(price.sizes):
            return
        if price.is_sure:
            self.prices.correct(_call_key(op, args, kwargs), tuple(made))
        self._memory.make_room(Price((), 0, 0.0, True, price.device), op)

    def _price(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Price:
        return self.prices.of(_call_key(op, args, kwargs), op, args, kwargs)

    def _note(
        self,
        op: Any,
        kind: Kind,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        price: Price,
        written: list[Storage],
    ) -> Call | None:
        """What must be kept of a call to run it again, None if it cannot be.

        It cannot where it writes to what cannot be had again, such as an input.
        """
        if not kind.can_replay or any(storage.value is None for storage in written):
            return None
        if rng.draws(op, args, kwargs) and not rng.can_replay(rng.source_of(op, args, kwargs)):
            return None
        idle = kind.statistics if kind.trains(args) else ()
        kept = tuple(
            Idle(x) if i in idle and x is not None else map_tensors(self._ref, x)
            for i, x in enumerate(args)
        )
        call = Call(op, kept, {k: map_tensors(self._ref, x) for k, x in kwargs.items()}, price)
        for value in call.parents:
            value.last_used = self._memory.clock
        return call

    def _ref(self, tensor: Tensor) -> Ref:
        return Ref(self._value_of(tensor), tensor)

    def _about_to_write(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Storage]:
        """The storages that an op will write to; what cannot be had again of them is copied."""
        found: list[Storage] = []
        for place in kind.writes:
            given = args[place] if isinstance(place, int) and place < len(args) else None
            given = kwargs.get(place) if isinstance(place, str) else given
            if isinstance(given, (tuple, list)):
                _torch.count_writes(tensors_in(given))  # which autograd does not do
            for tensor in filter(is_plain, tensors_in(given)):
                storage = self._memory.meet(tensor, charged=False)
                self._copy_on_write(storage, tensor)
                found.append(storage)
        for place in kind.statistics if kind.trains(args) else ():
            for tensor in tensors_in(args[place]):
                self._copy_on_write(self._memory.meet(tensor, charged=False), tensor)
        return found

    def _copy_on_write(self, storage: Storage, tensor: Tensor) -> None:
        root = storage.root() if storage.root is not None else None
        storage.root = None
        if root is None or root.tensor is None:
            return
        copy = self._copy(tensor)
        home = self._memory.meet(copy, charged=True)
        home.root, root.home, root.tensor = weakref.ref(root), home, copy
        root.stamp = copy._version

    def _record(self, call: Call | None, result: Any) -> list[int]:
        """Notes what an op has made; its bytes."""
        made: list[int] = []
        for index, tensor in enumerate(tensors_in(result)):
            if not is_plain(tensor) or self._memory.known(tensor) is not None:
                continue  # a view, or what was written to
            storage = self._memory.meet(tensor, charged=True)
            made.append(storage.nbytes)
            if call is not None:
                call.made.append((index, weakref.ref(self._make(call, storage))))
        return made

    def _overwrite(self, kind: Kind, call: Call | None, written: list[Storage]) -> None:
        """Notes what an op has written: a call that can run again, or one that cannot."""
        for storage in written:
            old = storage.value
            if old is None:
                continue
            alias = old.tensor
            self._memory.lose(old)
            if call is not None:
                new = self._make(call, storage)
                call.wrote.append((old, weakref.ref(new)))
                if not kind.counts_writes and alias is not None:
                    self._hand_over(old, new, alias)

    def _hand_over(self, old: Value, new: Value, alias: Tensor) -> None:
        """What was saved of a value was meant to be what an op has made of it since.

        Autograd does not count the writes of ops that are no in-place ops, and saves the noise of
        `rrelu_with_noise` before it is drawn.
        """
        for order, ref in old.orders.items():
            saved = ref()
            if saved is not None:
                saved.ref.value = new
                new.orders[order] = ref
        old.orders.clear()
        self._memory.rethink(old)
        if new.orders:
            self._memory.hold(new, alias)

    def _make(self, call: Call, storage: Storage) -> Value:
        value = Value(call, storage.nbytes, self._memory.saved)
        value.home = storage
        value.last_used = self._memory.clock
        storage.value = value
        for parent in call.parents:
            if parent.recipe is not None:
                parent.uses.append(weakref.ref(call))
        return value

    # --- what comes from outside --------------------------------------------------------------

    def made(self, tensor: Tensor) -> Storage | None:
        """The storage of a tensor, if an op made it that the engine saw."""
        storage = self._memory.known(tensor)
        return storage if storage is not None and storage.charged else None

    def meet_gradients(self, tensors: Iterable[Tensor | None]) -> None:
        """Counts gradients that come into the backward."""
        with self._memory.desk:
            for tensor in tensors:
                if tensor is not None and _torch.has_storage(tensor):
                    self._memory.meet(tensor, charged=True)

    def discharge(self, gradient: Tensor, taken: Tensor) -> None:
        """A tensor was taken as a parameter's gradient: if it was not copied, it counts no more."""
        with self._memory.desk:
            storage = self._memory.known(gradient)
            if storage is not None and storage is self._memory.known(taken):
                self._memory.discharge(storage)

    # --- saved tensors ------------------------------------------------------------------------

    def save(self, tensor: Tensor) -> Any:
        """What autograd keeps for a tensor that the backward reads."""
        with self._memory.desk:
            storage = self._memory.known(tensor)
            value = storage.value if storage is not None else None
            if (
                value is None
                or value.recipe is None
                or not is_plain(tensor)
                or not self._memory.is_unwritten(value, tensor)
            ):
                return tensor, _torch.version(tensor)
            self._memory.saved += 1
            saved = Saved(self._memory, Ref(value, tensor), self._memory.saved)
            value.orders[self._memory.saved] = weakref.ref(saved)
            if value.tensor is None:
                self._memory.hold(value, tensor)
            return saved

    def load(self, kept: Any) -> Tensor:
        """The tensor that was saved, brought back if need be.

        Raises:
            RuntimeError: it was written to in place since.
        """
        if not isinstance(kept, Saved):
            tensor, version = kept
            if _torch.version(tensor) != version:
                raise RuntimeError(_WRITTEN.format(tuple(tensor.shape), version, tensor._version))
            return tensor
        with self._memory.desk:
            self._memory.cursor = kept.order
            value = kept.ref.value
            alias = self._bring(value)
            return kept.ref.within(alias)

    def _value_of(self, tensor: Tensor) -> Value:
        """What a tensor that an op reads holds."""
        storage = self._memory.known(tensor) or self._memory.meet(tensor, charged=False)
        value = storage.value
        if value is not None:
            if self._memory.is_unwritten(value, tensor):
                return value
            storage.value = None  # written to where the engine did not see it
            self._memory.lose(value)
        root = storage.root() if storage.root is not None else None
        if root is None or root.stamp != _torch.version(tensor):
            root = Value(None, storage.nbytes, self._memory.saved)
            root.home = storage
            root.tensor = _torch.alias(tensor)
            root.stamp = _torch.version(root.tensor)
            storage.root = weakref.ref(root)
        return root

    # --- computing again ----------------------------------------------------------------------

    def _bring(self, wanted: Value) -> Tensor:
        """A value's alias, after running again what is needed to have it; one op at a time."""
        alias = self._alias(wanted)
        if alias is not None:
            return alias
        pinned: list[tuple[Value, Tensor]] = []  # an alias, as others may let go of it meanwhile
        waiting: list[tuple[Call, int]] = [(wanted.made_by, 0)]
        try:
            while waiting:
                call, before = waiting[-1]
                missing = None
                for parent in call.parents:
                    alias = self._alias(parent)
                    if alias is None:
                        missing = parent
                        break
                    parent.pins += 1
                    pinned.append((parent, alias))
                if missing is not None:
                    waiting.append((missing.made_by, len(pinned)))
                    continue
                self._rerun(call)
                waiting.pop()
                self._unpin(pinned, before)
        finally:
            self._unpin(pinned, 0)
        alias = self._alias(wanted)
        assert alias is not None
        return alias

    def _unpin(self, pinned: list[tuple[Value, Tensor]], down_to: int) -> None:
        while len(pinned) > down_to:
            value, _ = pinned.pop()
            value.pins -= 1
            self._memory.rethink(value)

    def _alias(self, value: Value) -> Tensor | None:
        """A tensor in the storage that holds a value; None if it is not in memory.

        Raises:
            RuntimeError: a root was written to, where the engine did not see it.
        """
        if value.tensor is not None:
            if value.stamp == _torch.version(value.tensor):
                return value.tensor
            if value.recipe is None:
                raise RuntimeError(_GONE.format(tuple(value.tensor.shape)))
            self._memory.lose(value)
            self._memory.desk.settle()
        if value.home is None:
            return None
        storage = value.home.ref()
        return None if storage is None else _whole(storage)

    def _rerun(self, call: Call) -> None:
        """Runs a call again, and keeps what is wanted of what it makes."""
        self._memory.make_room(call.price, call.op, rng.CPU_STATE_BYTES if call.drawn_from else 0)
        started = time.perf_counter()
        own = {id(old): self._own(old) for old, _ in call.wrote}
        args, kwargs = self._given(call.args, own), self._given(call.kwargs, own)
        with _torch.below_autograd(), _torch.under_settings(call.settings):
            if call.drawn_from is None:
                result = call.op(*args, **kwargs)
            else:
                source, state = call.drawn_from
                result = rng.replay_in_turn(state, source, call.op, *args, **kwargs)
        made = tensors_in(result)
        found = [(ref(), made[index]) for index, ref in call.made]
        found += [(ref(), own[id(old)]) for old, ref in call.wrote]
        for value, alias in found:
            if value is not None and value.home is None and value.is_wanted:
                self._memory.find(value, alias)
        self._recomputes += 1
        self._recomputed_seconds += time.perf_counter() - started

    def _given(self, x: Any, own: dict[int, Tensor]) -> Any:
        """What a call keeps of its arguments, as it was given: values written to are in `own`.

        No closure, which would keep itself alive and `own` with it.
        """
        if isinstance(x, Ref):
            alias = own.get(id(x.value))
            alias = self._alias(x.value) if alias is None else alias
            assert alias is not None
            return x.within(alias)
        if isinstance(x, Idle):
            return torch.zeros(x.size, dtype=x.dtype, device=x.device)
        if isinstance(x, (tuple, list)):
            return type(x)(self._given(y, own) for y in x)
        if isinstance(x, dict):
            return {name: self._given(y, own) for name, y in x.items()}
        return x

    def _own(self, value: Value) -> Tensor:
        """A value in a storage that may be written to: its own, if nothing else needs that."""
        alias = self._alias(value)
        assert alias is not None
        is_ours = value.tensor is not None and self._memory.is_held_alone(value)
        if value.orders or value.needed > 1 or not is_ours:
            return self._copy(alias)
        self._memory.lose(value)
        return alias

    def _copy(self, tensor: Tensor) -> Tensor:
        nbytes = tensor.untyped_storage().nbytes()
        self._memory.make_room(
            Price((nbytes,), 0, 0.0, True, tensor.device), torch.ops.aten.clone.default
        )
        copy = _whole(tensor.untyped_storage(), tensor.dtype).clone()
        self._memory.meet(copy, charged=True)
        return copy


def _whole(storage: Any, dtype: torch.dtype = torch.uint8) -> Tensor:
    """All of a storage as one tensor."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def _call_key(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_sized_by_numbers = bool(args) and isinstance(args[0], (int, float))
    numbers = repr(args) if is_sized_by_numbers else None
    return (op, _key(args), _key(tuple(kwargs.items())), numbers)


def _key(x: Any) -> Any:
    """What tells arguments apart that cost differently: other factors are no other price."""
    if isinstance(x, Tensor):
        return (x.dtype, x.size(), x.stride(), x.device)
    if isinstance(x, (tuple, list)):
        return tuple(map(_key, x))
    if isinstance(x, (float, complex, torch.Generator)):
        return type(x)
    return (type(x), x) if isinstance(x, (int, bool)) else x


_GONE = (
    "an input of shape {} was written to in place after the forward, and is needed to compute a "
    "tensor again that was evicted: write to it after the backward, or to a clone"
)
_WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: a tensor of shape {}, saved at version {}, is at version {} now"
)
