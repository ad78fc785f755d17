"""`fxrecals.plan` and `fxrecals.rewrite`: the promises, measured, on small models of each kind."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxrecals
from benchmarks import models, promises, yardsticks
from benchmarks.measure import compare, record, step_memory
from fxrecals.plans import Plan
from tests.helpers import peak_bytes

LIMITS = ("100%", "75%", "50%", "35%")

Made = tuple[nn.Module, tuple[Tensor, ...]]


def gpt() -> Made:
    return yardsticks.gpt(blocks=4, width=32, heads=4, vocab=64, tokens=32, batch=4, dropout=0.1)


def resnet() -> Made:
    return yardsticks.resnet(batch=4, side=32, width=8)


def unet() -> Made:
    return yardsticks.unet(batch=2, side=32, width=8)


class Broken(nn.Module):
    """Two halves with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)])
        self.second = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def broken() -> Made:
    torch.manual_seed(0)
    return Broken(), (torch.randn(128, 64),)


KINDS: tuple[Callable[[], Made], ...] = (gpt, resnet, unet, broken)


def step_of(module: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    def step() -> Tensor:
        out = module(*inputs)
        out.square().mean().backward()
        return out

    return step


@pytest.mark.parametrize("make", KINDS)
def test_every_limit_above_the_floor_is_kept_with_the_same_bits(make: Callable[[], Made]) -> None:
    model, inputs = make()
    plain, state = make()[0], {k: v.clone() for k, v in model.state_dict().items()}
    expected = record(plain, plain, inputs)
    peaks: list[int] = []
    for limit in LIMITS:
        try:
            plan = fxrecals.plan(model, inputs, limit)
        except fxrecals.InfeasibleLimitError as error:
            plan = fxrecals.plan(model, inputs, error.floor_bytes)
            assert plan.peak_bytes == plan.floor_bytes
        small = fxrecals.rewrite(model, inputs, plan)
        model.load_state_dict(state)
        assert compare(expected, record(small, model, inputs)) == []
        step = step_of(small, inputs)
        step()
        measured = peak_bytes(step, model)
        assert plan.limit_bytes is not None
        assert measured <= plan.limit_bytes
        assert plan.peak_bytes == pytest.approx(measured, rel=0.03)
        peaks.append(measured)
    assert peaks == sorted(peaks, reverse=True)


def weighty() -> Made:
    """More bytes of parameters than of activations, and scratch that makes room for gradients."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks), (torch.randn(4, 64, 8, 8),)


def small_gpt() -> Made:
    return yardsticks.gpt(blocks=2, width=32, heads=4, vocab=32, tokens=16, batch=4, dropout=0.1)


@pytest.mark.parametrize("make", [small_gpt, broken, weighty])
def test_a_limit_on_the_step_is_kept_with_the_same_bits(make: Callable[[], Made]) -> None:
    model, inputs = make()
    plain, state = make()[0], {k: v.clone() for k, v in model.state_dict().items()}
    expected = record(plain, plain, inputs)
    whole = fxrecals.plan(model, inputs, "100%", peak="step")
    for limit in (
        "100%",
        (whole.baseline_step_peak_bytes + whole.floor_bytes) // 2,
        whole.floor_bytes,
    ):
        plan = fxrecals.plan(model, inputs, limit, peak="step")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "the graph (at|after)")
            small = fxrecals.rewrite(model, inputs, plan)
            model.load_state_dict(state)
            assert compare(expected, record(small, model, inputs)) == []
        measured = step_memory(step_of(small, inputs), model)
        assert plan.limit_bytes is not None
        assert measured.peak <= plan.limit_bytes
        assert plan.step_peak_bytes == pytest.approx(measured.peak, rel=0.03)


def test_a_limit_on_the_step_goes_where_none_on_activations_does() -> None:
    model, inputs = unet()
    floor = fxrecals.plan(model, inputs, "100%", peak="step").floor_bytes
    for limit in (fxrecals.plan(model, inputs, "100%").floor_bytes, "50%"):
        assert fxrecals.plan(model, inputs, limit).step_peak_bytes > floor
    small = fxrecals.rewrite(model, inputs, floor, peak="step")
    assert step_memory(step_of(small, inputs), model).peak <= floor


def test_another_batch_size_keeps_a_limit_on_the_step() -> None:
    """With a limit on activations alone, gradients would not fit on top of the larger batch."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])
    x = torch.randn(36, 64)
    plan = fxrecals.plan(model, x[:32], "100%", peak="step")
    assert plan.limit_bytes is not None
    assert fxrecals.plan(model, x, plan.limit_bytes).step_peak_bytes > plan.limit_bytes
    small = fxrecals.rewrite(model, x[:32], plan)
    assert step_memory(step_of(small, (x,)), model).peak <= plan.limit_bytes


def test_a_larger_batch_is_not_run_by_the_plan_of_a_smaller_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])
    x = torch.randn(256, 64)
    plan = fxrecals.plan(model, x[:160], "100%")
    assert plan.limit_bytes is not None
    small = fxrecals.rewrite(model, x[:160], plan)
    assert peak_bytes(step_of(small, (x[:160],)), model) <= plan.limit_bytes
    assert peak_bytes(step_of(small, (x,)), model) <= plan.limit_bytes


def test_a_plan_brings_its_peak_to_the_rewrite_and_no_other_is_taken() -> None:
    model, inputs = broken()
    with pytest.raises(fxrecals.OptionError, match='a plan that was made with peak="step"'):
        fxrecals.rewrite(model, inputs, fxrecals.plan(model, inputs, "100%"), peak="step")


@pytest.mark.slow
@pytest.mark.parametrize("name", models.MODELS)
def test_the_whole_promise_on_a_real_model(name: str) -> None:
    if name not in ("gpt", "resnet", "unet"):
        pytest.importorskip("transformers")
    for row in promises.limits(promises.Subject(name, *models.build(name))):
        assert row[3] == "under the floor" or row[6:8] == ["yes", "the same"], row


def test_a_plan_says_what_scripts_rely_on() -> None:
    model, inputs = gpt()
    plan = fxrecals.plan(model, inputs, "50%")
    assert plan.limit_bytes is not None
    assert plan.limit_bytes == plan.baseline_peak_bytes // 2
    assert 0 < plan.lowest_bytes <= plan.floor_bytes
    assert plan.floor_bytes <= plan.peak_bytes <= plan.limit_bytes < plan.step_peak_bytes
    assert 0 < plan.saved_bytes <= plan.peak_bytes
    assert plan.extra_seconds > 0
    assert plan.regions
    assert plan.saved
    assert Plan.from_json(plan.to_json()) == plan


def test_two_plans_are_the_same_byte_for_byte() -> None:
    model, inputs = gpt()
    plans = [fxrecals.plan(model, inputs, "50%").to_json() for _ in range(2)]
    assert plans[0] == plans[1]


def test_without_a_limit_a_larger_limit_never_costs_more() -> None:
    model, inputs = gpt()
    plan = fxrecals.plan(model, inputs)
    assert plan.limit_bytes is None
    extra = [choice.extra_seconds for choice in plan.choices]
    assert extra == sorted(extra)
    assert extra[0] == 0
    assert all(choice.peak_bytes <= choice.limit_bytes for choice in plan.choices)


def test_planning_needs_no_weights() -> None:
    real, inputs = gpt()
    with torch.device("meta"):
        meta, _ = gpt()
    assert (
        fxrecals.plan(meta, inputs, "50%").peak_bytes
        == fxrecals.plan(real, inputs, "50%").peak_bytes
    )


def test_a_rewrite_shares_everything_and_leaves_the_model_alone() -> None:
    model, inputs = gpt()
    before = dict(model.__dict__)
    small = fxrecals.rewrite(model, inputs, "50%")
    assert model.__dict__ == before
    assert type(small) is type(model)
    assert list(small.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(small.parameters(), model.parameters(), strict=True))
    small.eval()
    with torch.no_grad():
        assert torch.equal(small(*inputs), model(*inputs))


def test_another_batch_size_is_planned_by_itself_within_the_limit() -> None:
    model, (ids,) = gpt()
    small = fxrecals.rewrite(model, (ids,), "50%")
    limit = fxrecals.plan(model, (ids,), "50%").limit_bytes
    step = step_of(small, (ids[:3],))
    step()
    assert limit is not None
    assert peak_bytes(step, model) <= limit


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"limit": "5 parsecs"}, "limit='5 parsecs'"),
        ({"limit": -1}, "limit=-1"),
        ({"limit": 0.5}, "limit=0.5"),
        ({"limit": "50%", "solver": "magic"}, "solver='magic'"),
        ({"limit": "50%", "cost": "free"}, "cost='free'"),
        ({"limit": "50%", "peak": "gradients"}, "peak='gradients'"),
        ({"limit": {"cuda:0": "1GB"}}, '{"cpu": "4GB"}'),
        ({"device": "bogus"}, "device='bogus'"),
        ({"deadline": float("inf")}, "deadline=inf"),
        ({"on_progress": 3}, "on_progress=3"),
    ],
)
def test_bad_options_name_the_argument_and_what_came(change: dict[str, Any], words: str) -> None:
    model, inputs = gpt()
    with pytest.raises(fxrecals.OptionError) as caught:
        fxrecals.plan(model, inputs, **change)
    assert words in str(caught.value)
    assert "what works" in str(caught.value)


def test_a_rewrite_needs_a_limit() -> None:
    model, inputs = gpt()
    limit: Any = None
    with pytest.raises(fxrecals.OptionError, match="limit=None"):
        fxrecals.rewrite(model, inputs, limit)


def test_a_limit_under_the_floor_names_a_limit_that_works() -> None:
    model, inputs = gpt()
    with pytest.raises(fxrecals.InfeasibleLimitError) as caught:
        fxrecals.rewrite(model, inputs, 1000)
    floor = caught.value.floor_bytes
    assert str(floor) in str(caught.value)
    assert fxrecals.plan(model, inputs, floor).peak_bytes <= floor


def test_an_example_that_does_not_fit_leaves_the_model_trainable() -> None:
    model, inputs = gpt()
    with pytest.raises(fxrecals.CaptureError):
        fxrecals.plan(model, torch.randn(3, 3, 3), "50%")
    step_of(model, inputs)()
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_without_gradients_is_refused() -> None:
    model, inputs = gpt()
    with pytest.raises(fxrecals.CaptureError, match="require"):
        fxrecals.plan(model.requires_grad_(False), inputs, "50%")


def test_many_rewrites_of_one_class_in_a_row_keep_their_limits() -> None:
    """Dynamo stops compiling code after eight graphs, and all rewrites share one function."""
    model, inputs = nn.Sequential(*[nn.Linear(16, 16), nn.Tanh()] * 4), (torch.randn(64, 16),)
    plan = fxrecals.plan(model, inputs, "85%")
    for _ in range(10):
        step = step_of(fxrecals.rewrite(model, inputs, plan), inputs)
        step()
        assert plan.limit_bytes is not None
        assert peak_bytes(step, model) <= plan.limit_bytes


class Masked(nn.Module):
    """Products of mixed types, which the CPU casts into copies, and dropout's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.first(x)))
        return self.second(hidden * (hidden > 0)).tanh()


def test_copies_within_an_op_count() -> None:
    torch.manual_seed(0)
    model, inputs = Masked(), (torch.randn(512, 64),)
    floor = fxrecals.plan(model, inputs, "100%").floor_bytes
    for limit in (floor, "100%"):
        plan = fxrecals.plan(model, inputs, limit)
        step = step_of(fxrecals.rewrite(model, inputs, plan), inputs)
        step()
        assert plan.limit_bytes is not None
        assert peak_bytes(step, model) <= plan.limit_bytes


def test_two_forwards_before_one_backward_through_batch_norm_at_the_floor() -> None:
    """The second forward updates the statistics that the first one's recompute is given."""

    def made() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in "abc"]
        return nn.Sequential(*blocks, nn.Linear(32, 32)), torch.randn(64, 32)

    (plain, x), (model, _) = made(), made()
    floor = fxrecals.plan(model, x, "100%").floor_bytes
    small = fxrecals.rewrite(model, x, floor)
    for module in (plain, small):
        (module(x).square().mean() + module(x + 1).square().mean()).backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None
    )
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), model.buffers(), strict=True))
