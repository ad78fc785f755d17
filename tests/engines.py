"""Models and helpers that the tests of the engine share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import compare, record, step_memory, total
from fxrecals.engine import Recals, recals
from tests.test_engine_cases import feasible, step_of


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.dropout(torch.tanh(norm(layer(x))), 0.3, self.training)
        return x


def made(seed: int = 2) -> tuple[Net, Tensor]:
    torch.manual_seed(seed)
    return Net(), torch.randn(64, 32)


TIGHT = 125_000
"""Bytes with which a step of `Net` works, and for which it evicts."""


def held(engine: Recals) -> tuple[int, int, int]:
    """Live bytes, and how many storages and values an engine knows of."""
    memory = engine._engine._memory
    live = sum(account.live for _, account in memory.accounts)
    return live, len(memory._storages), len(memory._pool)


def is_clean(engine: Recals) -> bool:
    """Whether an engine holds nothing; parameters and buffers it may know of."""
    live, _, pool = held(engine)
    return live == pool == 0


def under(engine: Recals, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: engine(call, *args, **kwargs)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return a is b or a == b


def check(make: Callable[[], tuple[nn.Module, Any]], *shares: int, floor: bool = False) -> None:
    """Two steps are eager's within limits in percent of eager's peak, or at the floor."""
    model, inputs = make()
    wanted = record(model, model, inputs)
    model, inputs = make()
    whole = step_memory(step_of(lambda *a, **k: total(model(*a, **k)), model, inputs), model)
    for share in (*shares, *([1] if floor else [])):

        def run(limit: int) -> None:
            model, inputs = make()
            assert compare(wanted, record(under(recals(limit), model), model, inputs)) == []

        feasible(whole.activations * share // 100, run)
