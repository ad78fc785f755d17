"""What is in memory, what is wanted, and what goes when room is needed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fxrecals import _torch
from fxrecals.engine.accounts import Accounts
from fxrecals.engine.ops import Price
from fxrecals.engine.policies import Evictable, Policy
from fxrecals.engine.tape import Call, Desk, Group, Storage, Value
from fxrecals.errors import InfeasibleLimitError


class Memory:
    """The storages that were seen, the values that are in them, and the accounts of their bytes.

    Who calls it is at the desk.

    Attributes:
        desk: who works on the tape.
        accounts: bytes by device.
        clock: ops of the forward so far.
        saved: tensors that were saved so far.
        cursor: in a backward, the saved tensor that was read last, by the order of saving.
        evictions: values that were dropped to make room.
    """

    def __init__(self, accounts: Accounts, policy: Policy, *, exceeds: bool) -> None:
        self.desk = Desk(self._handle)
        self.accounts = accounts
        self.clock = 0
        self.saved = 0
        self.cursor: int | None = None
        self.evictions = 0
        self._policy = policy
        self._exceeds = exceeds
        self._has_warned = False
        self._storages: dict[int, Storage] = {}
        self._pool: dict[Value, None] = {}
        self._sole = _torch.users_of_a_storage_alone()

    # --- storages -----------------------------------------------------------------------------

    def known(self, tensor: Tensor) -> Storage | None:
        """The storage of a tensor, if it was seen before."""
        if not _torch.has_storage(tensor):
            return None
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        return storage if storage is not None and storage.ref() is not None else None

    def meet(self, tensor: Tensor, charged: bool) -> Storage:
        """The storage of a tensor, noted if it is new: `charged` if it counts."""
        storage = self.known(tensor)
        if storage is None:
            storage = Storage(tensor.untyped_storage(), self._died, charged)
            self._storages[storage.key] = storage
            if charged:
                self.accounts[storage.device].live += storage.nbytes
        return storage

    def _died(self, storage: Storage) -> None:
        self.desk.post("died", storage)

    def let_go(self, value: Value, order: int) -> None:
        """A saved tensor is needed no more."""
        self.desk.post("let go", (value, order))

    def _handle(self, event: str, detail: Any) -> None:
        if event == "let go":
            value, order = detail
            value.orders.pop(order, None)
            self.rethink(value)
            return
        storage: Storage = detail
        if self._storages.get(storage.key) is storage:
            del self._storages[storage.key]
        if storage.charged:
            self.accounts[storage.device].live -= storage.nbytes
        if storage.value is not None:
            self.lose(storage.value)

    def discharge(self, storage: Storage) -> None:
        """The bytes of a storage count no more."""
        if storage.charged:
            storage.charged = False
            self.accounts[storage.device].live -= storage.nbytes

    def forget(self) -> None:
        """Ops are not seen from here on.

        What a storage holds that is not kept by an alias may be written to unseen. So it is as
        lost: where it is needed, it is computed again.
        """
        for storage in list(self._storages.values()):
            value = storage.value
            if value is not None and value.tensor is None:
                storage.value = None
                self.lose(value)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept for a backward."""
        return not self._pool

    # --- values -------------------------------------------------------------------------------

    def hold(self, value: Value, tensor: Tensor) -> None:
        """Keeps a value in memory by an alias, until it is evicted or needed no more."""
        value.tensor = _torch.alias(tensor)
        value.stamp = _torch.version(value.tensor)
        self._pool[value] = None

    def is_unwritten(self, value: Value, tensor: Tensor) -> bool:
        """Whether a tensor still has the value that is kept of it."""
        return value.tensor is None or value.stamp == _torch.version(tensor)

    def lose(self, value: Value) -> None:
        """A value is not in memory any more."""
        if value.home is None:
            return
        if value.home.value is value:
            value.home.value = None
        value.home = value.tensor = None
        self._pool.pop(value, None)
        call = value.recipe
        if call is None:
            return
        call.lost += 1
        if call.lost == 1:
            call.group = Group(call.price.seconds)
            for group in self._groups_around(call):
                call.group.join(group)
        self.rethink(value)

    def find(self, value: Value, tensor: Tensor) -> None:
        """A value is in memory again."""
        storage = self.meet(tensor, charged=True)
        storage.value, value.home = value, storage
        value.last_used = self.clock
        self.hold(value, tensor)
        call = value.made_by
        call.lost -= 1
        if call.lost == 0 and call.group is not None:
            call.group.top().seconds -= call.price.seconds
            call.group = None
        self.rethink(value)

    def _groups_around(self, call: Call) -> list[Group]:
        """The groups of lost calls that this one reads from, or that read from it."""
        found: dict[int, Group] = {}
        makers = (parent.recipe for parent in call.parents)
        readers = (ref() for value in call.results() for ref in value.uses)
        for other in (*makers, *readers):
            if other is not None and other.group is not None:
                group = other.group.top()
                found[id(group)] = group
        return list(found.values())

    def rethink(self, value: Value) -> None:
        """Passes on that a value is wanted or not, up to what it is made from."""
        waiting = [value]
        while waiting:
            value = waiting.pop()
            call = value.recipe
            if call is None:
                continue
            if value.home is not None and not value.is_wanted and not value.pins:
                value.tensor = None
                self._pool.pop(value, None)
            claims = value.home is None and value.is_wanted
            if claims == value.is_claiming:
                continue
            value.is_claiming = claims
            call.claims += 1 if claims else -1
            if (claims and call.claims > 1) or (not claims and call.claims):
                continue
            for parent in call.parents:
                parent.needed += 1 if claims else -1
                waiting.append(parent)

    # --- room ---------------------------------------------------------------------------------

    def make_room(self, price: Price, op: Any, more: int = 0) -> None:
        """Evicts until an op can run under the limit, and `more` bytes beside it."""
        account, nbytes = self.accounts[price.device], price.nbytes + more
        if account.over(nbytes) > 0:
            self._evict(price.device, nbytes)
            if account.over(nbytes) > 0 and price.is_sure:
                account.needed = max(account.needed, account.live + nbytes)
                self._overflow(account.limit or 0, account.needed, op)
        account.note(nbytes)

    def _evict(self, device: torch.device, nbytes: int) -> None:
        account = self.accounts[device]
        there = (v for v in self._pool if v.home is not None and v.home.device == device)
        scores = sorted(((self._score(v), i, v) for i, v in enumerate(there)), reverse=True)
        while scores and account.over(nbytes) > 0:
            _, place, value = scores.pop()
            if value.tensor is None or value.pins or not self.is_held_alone(value):
                continue
            again = self._score(value)
            if scores and again > scores[-1][0]:  # what was evicted meanwhile made it dearer
                scores.append((again, place, value))
                scores.sort(reverse=True)
                continue
            self._pool.pop(value)
            value.tensor = None  # its storage dies, which the desk is told of
            self.desk.settle()
            self.evictions += 1

    def is_held_alone(self, value: Value) -> bool:
        """Whether nobody else has the memory of a value: else, evicting it would free nothing."""
        return value.home is not None and _torch.users_of(value.home.key) <= self._sole

    def _score(self, value: Value) -> float:
        call = value.made_by
        groups = self._groups_around(call)
        if call.group is not None and call.group.top() not in groups:
            groups.append(call.group.top())
        lost = sum(group.seconds for group in groups)
        own = call.price.seconds if call.group is None else 0.0
        return self._policy(Evictable(value.nbytes, own, lost, self._age(value)))

    def _age(self, value: Value) -> int:
        if self.cursor is None:
            return self.clock - value.last_used
        ahead = self.cursor - max(value.orders, default=value.born)
        return ahead if ahead >= 0 else self.saved

    def _overflow(self, limit: int, needed: int, op: Any) -> None:
        if not self._exceeds:
            raise InfeasibleLimitError(limit, needed, op=str(op), so_far=True)
        if not self._has_warned:
            self._has_warned = True
            error = InfeasibleLimitError(limit, needed, op=str(op), so_far=True)
            warnings.warn(str(error), stacklevel=2)
