"""What Inductor makes of a plan: layouts, fusion and order of kernels keep the limit."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxrecals
from benchmarks.measure import clear, step_memory
from fxrecals import _torch
from fxrecals.compiling import Compilation


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def convolutional() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    blocks = [Residual(64) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), *blocks), torch.randn(2, 3, 24, 24)


def test_a_convolutional_net_under_inductor_is_within_the_limit() -> None:
    model, x = convolutional()

    def step_under(limit: str | None) -> int:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=fxrecals.backend(limit))

        def step() -> None:
            clear(model)
            compiled(x).square().mean().backward()

        step()
        return step_memory(step, model).activations

    plan = fxrecals.plan(model, x, limit="60%")
    assert plan.limit_bytes is not None
    assert step_under(None) > plan.limit_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step_under("60%") <= plan.limit_bytes


def test_copies_in_other_layouts_are_counted_once_an_input() -> None:
    weight = torch.randn(8, 3, 3, 3)

    def twice(x: Tensor, w: Tensor) -> Tensor:
        return torch.conv2d(x, w).sum() + torch.conv2d(x, w, padding=1).sum()

    def traced(x: Tensor, w: Tensor) -> torch.fx.GraphModule:
        return make_fx(twice, tracing_mode="fake")(x, w)

    x = torch.randn(2, 3, 9, 9)
    nbytes = _torch.storage_bytes
    assert _torch.channels_last_bytes(traced(x, weight)) == nbytes(x) + nbytes(weight)
    there = x.to(memory_format=torch.channels_last)
    assert _torch.channels_last_bytes(traced(there, weight)) == nbytes(weight)


@pytest.mark.parametrize(("over", "warned"), [([7, 0], False), ([7, 3], True), ([7, 9], True)])
def test_halves_that_pass_the_limit_are_planned_once_more(
    over: list[int], warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, less = list(over), []

    def over_bytes(compilation: Compilation) -> int:
        less.append(compilation.less_bytes)
        return left.pop(0)

    monkeypatch.setattr(Compilation, "over_bytes", over_bytes)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    backend = fxrecals.backend("80%", inner="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(model, backend=backend)(torch.randn(256, 64)).sum().backward()
    assert less == [0, 7]
    assert any(f"{min(over)} B more than limit=80%" in str(w.message) for w in caught) == warned
    (plan,) = backend.plans
    assert any("7 B less" in note for note in plan.notes)
