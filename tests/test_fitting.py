"""The largest size that is found is the largest, and trains under the limit."""

from typing import Any

import pytest
import torch
from torch import nn

import fxrecals
from fxrecals import InfeasibleLimitError, LimitError, OptionError
from fxrecals.factories import Factory, call, call_without_memory
from fxrecals.fitting import Fit, fit
from tests.cli_models import blocks, by_position_and_name, convolutions
from tests.helpers import peak_bytes


def attention(tokens=32):
    """Needs memory with the square of its size, as the probabilities are written down."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return self.out(torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v)

    return Attention(), torch.randn(2, tokens, 16)


CASES = [
    (blocks, "3MB", {}),
    pytest.param(blocks, "3MB", {"start": 1}, marks=pytest.mark.slow),
    pytest.param(blocks, "3MB", {"start": 4096}, marks=pytest.mark.slow),
    (blocks, "1MB", {"step": 16, "peak": "step"}),
    (convolutions, "400kB", {"vary": "side", "step": 4}),
    (attention, "2MB", {"vary": "tokens"}),
]


@pytest.mark.parametrize(("make", "limit", "options"), CASES)
def test_the_size_fits_and_the_next_does_not(make: Factory, limit: str, options: dict) -> None:
    found = fit(make, limit, **options)
    assert found.size % options.get("step", 1) == 0
    assert len(found.tried) <= 8
    peak, vary = options.get("peak", "activations"), found.vary
    made = call(make, **{vary: found.size})
    planned = fxrecals.plan(made.model, made.example, limit, peak=peak)
    assert planned.to_json() == found.plan.to_json()
    larger = call(make, **{vary: found.next_size})
    with pytest.raises(InfeasibleLimitError):
        fxrecals.plan(larger.model, larger.example, limit, peak=peak)


def test_the_size_trains_under_the_limit() -> None:
    found = fit(blocks, "3MB")
    model, x = blocks(batch=found.size)
    small = fxrecals.rewrite(model, x, "3MB")
    small(x).square().mean().backward()
    assert peak_bytes(lambda: small(x).square().mean().backward(), model) <= 3_000_000


def test_a_limit_for_not_even_the_smallest_is_refused_with_its_floor() -> None:
    with pytest.raises(InfeasibleLimitError) as caught:
        fit(blocks, "1kB")
    model, x = blocks(batch=1)
    assert fxrecals.plan(model, x, caught.value.floor_bytes).floor_bytes == caught.value.floor_bytes


def test_no_memory_is_taken_for_the_model() -> None:
    devices: list[str] = []

    def make(batch=8):
        model, x = blocks(batch)
        devices.append(x.device.type)
        return model, x

    assert isinstance(fit(make, "1MB"), Fit)
    assert set(devices) == {"meta"}


def test_it_prints_what_it_found_and_why_not_more() -> None:
    found = repr(fit(blocks, "3MB", step=8)).splitlines()
    assert "is the largest that trains under 3.00 MB" in found[0]
    assert found[1].startswith("fits 3.00 MB")


@pytest.mark.parametrize("limit", ["50%", {"cpu": "1GB"}])
def test_a_limit_must_be_bytes(limit: object) -> None:
    with pytest.raises(LimitError, match="a share grows"):
        fit(blocks, limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["start", "step"])
def test_sizes_must_be_whole_and_positive(option: str) -> None:
    options: Any = {option: 0}
    with pytest.raises(OptionError, match=option):
        fit(blocks, "1MB", **options)


def test_arguments_of_both_kinds_become_names() -> None:
    made = call(by_position_and_name)
    assert list(made.example) == ["x", "scale"]


def test_arguments_of_both_kinds_need_names() -> None:
    class AnyArguments(nn.Linear):
        def forward(self, *args, **kwargs):
            return super().forward(args[0])

    with pytest.raises(OptionError, match="all by position or all by name"):
        call(lambda: (AnyArguments(2, 2), (torch.ones(1, 2),), {"scale": 1}))


def test_a_factory_that_fails_on_meta_for_its_own_reason_says_so() -> None:
    def make():
        raise RuntimeError("no data here")

    with pytest.raises(RuntimeError, match="no data here"):
        call_without_memory(make)
