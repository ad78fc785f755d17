"""What was computed from what, so that a value that is not in memory can be computed again.

A `Value` is the content of a storage between two writes; an op that writes in place ends one and
begins the next. A `Call` is one run of an op. A value keeps the call that made it, and a call the
values that it read: whatever no saved tensor can need any more dies by reference counting alone.

Views are not on the tape: a call reads its arguments as a storage and a geometry in it (`Ref`).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxrecals import _torch
from fxrecals.engine.ops import Price


class Storage:
    """A storage that was seen, while it is in memory.

    Attributes:
        ref: weak reference to it.
        nbytes: its bytes.
        device: where it is.
        charged: whether its bytes count: those of parameters and their gradients do not.
        value: what it holds, where that can be computed again.
        root: weak reference to what it holds, where that cannot.
    """

    __slots__ = ("__weakref__", "charged", "device", "key", "nbytes", "ref", "root", "value")

    def __init__(self, storage: Any, died: Callable[[Storage], None], charged: bool) -> None:
        self.key: int = storage._cdata
        self.nbytes: int = storage.nbytes()
        self.device: torch.device = storage.device
        self.charged = charged
        self.value: Value | None = None
        self.root: weakref.ref[Value] | None = None
        mine = weakref.ref(self)

        def callback(_: Any) -> None:
            storage = mine()
            if storage is not None:
                died(storage)

        self.ref = weakref.ref(storage, callback)


class Value:
    """The content of a storage between two writes.

    Attributes:
        recipe: the call that made it; None where it is given or cannot be computed again (a root).
        nbytes: of its storage.
        home: the storage that holds it, None while it is lost.
        tensor: an alias by which the engine keeps it in memory, if it does.
        stamp: version of that alias; another one later tells of a write that nobody saw.
        orders: what autograd keeps of it, by the order of saving.
        needed: calls that need it to bring back something wanted.
        is_claiming: whether it is lost and wanted, and so needs the values it was made from.
        last_used: the op count at its last use.
        born: how many tensors had been saved when it was made.
        pins: above 0 it must stay.
        uses: calls that read it.
    """

    __slots__ = (
        "__weakref__",
        "born",
        "home",
        "is_claiming",
        "last_used",
        "nbytes",
        "needed",
        "orders",
        "pins",
        "recipe",
        "stamp",
        "tensor",
        "uses",
    )

    def __init__(self, recipe: Call | None, nbytes: int, born: int) -> None:
        self.recipe = recipe
        self.nbytes = nbytes
        self.home: Storage | None = None
        self.tensor: Tensor | None = None
        self.stamp: int | None = None
        self.orders: dict[int, weakref.ref[Any]] = {}
        self.needed = 0
        self.is_claiming = False
        self.last_used = 0
        self.born = born
        self.pins = 0
        self.uses: list[weakref.ref[Call]] = []

    @property
    def made_by(self) -> Call:
        """The call that made it; a root has none."""
        assert self.recipe is not None, "a root is never lost, and never evicted"
        return self.recipe

    @property
    def is_wanted(self) -> bool:
        """Whether a saved tensor, or something that one is made from, is this value."""
        return bool(self.orders) or self.needed > 0


class Ref:
    """A tensor that an op read: a value, and where in its storage."""

    __slots__ = ("bits", "dtype", "offset", "size", "stride", "value")

    def __init__(self, value: Value, tensor: Tensor) -> None:
        self.value = value
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype
        self.bits = tensor.is_conj(), tensor.is_neg()

    def within(self, alias: Tensor) -> Tensor:
        """This tensor, in the storage of `alias`."""
        with _torch.unseen():
            if alias.dtype is self.dtype and self.bits == (alias.is_conj(), alias.is_neg()):
                return alias.as_strided(self.size, self.stride, self.offset)
            made = torch.empty(0, dtype=self.dtype, device=alias.device)
            made.set_(alias.untyped_storage(), self.offset, self.size, self.stride)
            conjugated, negated = self.bits
            made = torch.conj(made) if conjugated else made
            return _torch.negated(made) if negated else made


class Idle:
    """A tensor that an op writes to and does not read: batch norm's statistics while training."""

    __slots__ = ("device", "dtype", "size")

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.dtype, self.device = tensor.size(), tensor.dtype, tensor.device


class Call:
    """One run of an op: what it read, and what it made.

    Attributes:
        op, args, kwargs: with `Ref` and `Idle` for tensors.
        parents: the values that it read.
        made: what it returned in new storages, as pairs of a place in the flat result and a weak
            reference.
        wrote: what it wrote in place, as pairs of the value before and a weak reference.
        price: bytes and seconds of one run.
        drawn_from: generator (or device of a default generator) and its state, if it draws.
        settings: of the process, that ops look at.
        lost: how many of the values that it made are not in memory.
        claims: how many of them are wanted.
        group: the group of lost calls around it, while anything of it is lost.
    """

    __slots__ = (
        "__weakref__",
        "args",
        "claims",
        "drawn_from",
        "group",
        "kwargs",
        "lost",
        "made",
        "op",
        "parents",
        "price",
        "settings",
        "wrote",
    )

    def __init__(
        self,
        op: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        price: Price,
    ) -> None:
        self.op, self.args, self.kwargs, self.price = op, args, kwargs, price
        self.drawn_from: tuple[Any, Tensor] | None = None
        self.settings = _torch.settings()
        self.parents = tuple({id(r.value): r.value for r in refs_in((args, kwargs))}.values())
        self.made: list[tuple[int, weakref.ref[Value]]] = []
        self.wrote: list[tuple[Value, weakref.ref[Value]]] = []
        self.lost = 0
        self.claims = 0
        self.group: Group | None = None

    def results(self) -> Iterator[Value]:
        """The values that it made and that somebody still knows."""
        for _, ref in (*self.made, *self.wrote):
            value = ref()
            if value is not None:
                yield value


class Group:
    """Calls whose results are lost and that need one another, with their seconds: a union-find.

    Of a group that fell apart, as one of its calls ran again, the seconds are right and the extent
    is not, as in the paper on DTR: splitting would cost more than it tells.
    """

    __slots__ = ("above", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.above: Group | None = None

    def top(self) -> Group:
        """The group that it is part of by now."""
        group = self
        while group.above is not None:
            if group.above.above is not None:
                group.above = group.above.above
            group = group.above
        return group

    def join(self, other: Group) -> None:
        """Makes one group of two."""
        mine, theirs = self.top(), other.top()
        if mine is not theirs:
            theirs.above = mine
            mine.seconds += theirs.seconds


def refs_in(x: Any) -> Iterator[Ref]:
    """The references in what a call keeps of its arguments."""
    if isinstance(x, Ref):
        yield x
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from refs_in(y)
    elif isinstance(x, dict):
        yield from refs_in(tuple(x.values()))


class Desk:
    """One thread works on the tape at a time; what happens meanwhile waits, and is not lost.

    Storages die, and saved tensors are let go, at any moment: in the middle of the tape's own
    work, in the collector, in another thread. Such an event is handled at once where the tape is
    idle, and else by whoever is at work on it.
    """

    def __init__(self, handle: Callable[[Any, Any], None]) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._owner: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this thread is at work on the tape."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        try:
            self.settle()
        finally:
            self._owner = None
            self._lock.release()
        if self._waiting:
            self._if_idle()

    def post(self, event: Any, detail: Any) -> None:
        """Something happened."""
        self._waiting.append((event, detail))
        self._if_idle()

    def settle(self) -> None:
        """Handles what has happened so far, by the thread that is at work."""
        while self._waiting:
            self._handle(*self._waiting.popleft())

    def _if_idle(self) -> None:
        while self._waiting and self._lock.acquire(blocking=False):
            self._owner = threading.get_ident()
            try:
                self.settle()
            finally:
                self._owner = None
                self._lock.release()
