"""The engine driven call by call, against a dictionary of what was saved."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from fxrecals.engine.accounts import Accounts, counted, read_limit
from fxrecals.engine.core import Engine
from fxrecals.engine.policies import named
from fxrecals.errors import InfeasibleLimitError

aten = torch.ops.aten
N = 8
SIZE = 4 * N * N
CPU = torch.device("cpu")
FRESH = (aten.sin.default, aten.cos.default, aten.tanh.default, aten.neg.default)
OF_TWO = (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default)
IN_PLACE = (aten.sigmoid_.default, aten.neg_.default, aten.abs_.default)


class Machine(RuleBasedStateMachine):
    """Ops run, tensors are saved, dropped, written to and asked for, in any order.

    Tensors and what is kept of them go by numbers, so that nothing but this machine holds them.
    """

    tensors = Bundle("tensors")
    saved = Bundle("saved")
    evictions = 0

    @initialize(room=st.integers(3, 6), policy=st.sampled_from(["lru", "dtr"]))
    def begin(self, room: int, policy: str) -> None:
        torch.manual_seed(0)
        self.limit = room * SIZE
        self.accounts = Accounts(read_limit(self.limit), counted("all"))
        self.engine = Engine(self.accounts, named(policy))
        self.numbers = itertools.count()
        self.held: dict[int, Tensor] = {}
        self.memory: dict[int, int] = {}
        self.kept: dict[int, Any] = {}
        self.content: dict[int, Tensor] = {}
        self.is_written: set[int] = set()

    def run_op(self, op: Any, *args: Any) -> Tensor | None:
        """The result of an op; None where nothing is left to evict."""
        try:
            return self.engine.run(op, args, {})
        except InfeasibleLimitError as error:
            return self.check(error)

    def check(self, error: InfeasibleLimitError) -> None:
        assert error.floor_bytes > self.limit

    def note(self, made: Tensor | None, memory: int | None = None) -> Any:
        if made is None:
            return multiple()
        number = next(self.numbers)
        self.held[number] = made
        self.memory[number] = number if memory is None else memory
        return number

    @rule(target=tensors)
    def is_given(self) -> Any:
        return self.note(torch.randn(N, N))

    @rule(target=tensors, op=st.sampled_from(FRESH), a=tensors)
    def make(self, op: Any, a: int) -> Any:
        return self.note(self.run_op(op, self.held[a]))

    @rule(target=tensors, op=st.sampled_from(OF_TWO), a=tensors, b=tensors)
    def make_of_two(self, op: Any, a: int, b: int) -> Any:
        return self.note(self.run_op(op, self.held[a], self.held[b]))

    @rule(target=tensors, a=tensors)
    def draw(self, a: int) -> Any:
        return self.note(self.run_op(aten.rand_like.default, self.held[a]))

    @rule(target=tensors, a=tensors)
    def view(self, a: int) -> Any:
        return self.note(self.held[a].t(), self.memory[a])

    @rule(op=st.sampled_from(IN_PLACE), a=tensors)
    def write(self, op: Any, a: int) -> None:
        if self.run_op(op, self.held[a]) is not None:
            torch.autograd.graph.increment_version(self.held[a])  # as autograd does
            self.is_written.add(self.memory[a])

    @rule(target=saved, a=tensors)
    def save(self, a: int) -> Any:
        number = next(self.numbers)
        self.kept[number] = self.engine.save(self.held[a])
        self.content[number] = self.held[a].clone()
        return number

    @rule(a=consumes(tensors))
    def drop(self, a: int) -> None:
        del self.held[a]

    @rule(kept=consumes(saved))
    def let_go(self, kept: int) -> None:
        del self.kept[kept]

    @rule(kept=saved)
    def load(self, kept: int) -> None:
        try:
            found = self.engine.load(self.kept[kept])
        except InfeasibleLimitError as error:
            self.check(error)
        except RuntimeError:
            assert self.is_written, "it was not written to, nor what it was made from"
        else:
            assert torch.equal(found, self.content[kept])

    @invariant()
    def is_under_the_limit(self) -> None:
        account = self.accounts[CPU] if hasattr(self, "accounts") else None
        if account is not None and account.limit is not None:
            assert 0 <= account.live <= account.peak <= account.limit

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            Machine.evictions += self.engine.stats.evictions


def test_what_was_saved_comes_back_whatever_was_evicted() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=150, stateful_step_count=50, deadline=None)
    )
    assert Machine.evictions > 0
