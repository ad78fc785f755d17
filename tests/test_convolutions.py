"""Backwards of convolutions are split: the same bits from less memory."""

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxrecals
from benchmarks.measure import compare, record
from fxrecals import convolutions
from fxrecals.capture import capture, step
from fxrecals.convolutions import split
from fxrecals.cost import GPUS, Roofline
from fxrecals.ir import Graph, Op
from fxrecals.timeline import simulate
from tests.helpers import graph_of, peak_bytes
from tests.test_export import eager, exported, function, inputs_of

BACKWARD = torch.ops.aten.convolution_backward.default
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
TYPES = (torch.float32, torch.float64, torch.bfloat16)


# --- one convolution by itself ------------------------------------------------------------------


@st.composite
def calls(draw: DrawFn) -> tuple[Any, ...]:
    """Arguments of `aten.convolution_backward` for a convolution of any kind."""

    def each(*values: int) -> list[int]:
        return draw(st.lists(st.sampled_from(values), min_size=dims, max_size=dims))

    dims = draw(st.integers(1, 3))
    groups = draw(st.sampled_from((1, 1, 2, 8)))
    inner, outer = groups * draw(st.integers(1, 9)), groups * draw(st.integers(1, 9))
    kernel, stride, dilation = each(1, 2, 3), each(1, 2, 3), each(1, 1, 2)
    padding, sizes = each(0, 1), each(5, 6, 9)
    transposed = draw(st.booleans())
    left = [draw(st.integers(0, s - 1)) if transposed else 0 for s in stride]
    window = (stride, padding, dilation, transposed, left, groups)
    dtype = draw(st.sampled_from(TYPES))

    def tensor(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
        last = dims > 1 and draw(st.booleans())
        return made.to(memory_format=FORMATS[dims + 2]) if last else made

    x = tensor(draw(st.sampled_from((1, 2, 16))), inner, *sizes)
    ends = (inner, outer // groups) if transposed else (outer, inner // groups)
    weight = tensor(*ends, *kernel)
    y = torch.ops.aten.convolution.default(x, weight, None, *window)
    grad = draw(st.sampled_from((torch.randn_like(y), y.new_full((), 2.0).expand(y.shape))))
    bias_sizes = draw(st.sampled_from((None, [outer])))
    return grad, x, weight, bias_sizes, *window, [True, True, bias_sizes is not None]


def joint_of(*args: Any) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """A graph of one `aten.convolution_backward`, and what it takes."""

    def backward(grad: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        return [t for t in BACKWARD(grad, x, weight, *args[3:]) if t is not None]

    return make_fx(backward)(*args[:3]), args[:3]


def is_split(joint: fx.GraphModule) -> bool:
    return any(node.name.endswith("_input") for node in joint.graph.nodes)


def plain(*spatial: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """A convolution of 3 by 3 from four channels to six."""
    ones = [1] * len(spatial)
    x = torch.randn(batch, 4, *spatial).to(dtype)
    weight = torch.randn(6, 4, *[3 for _ in spatial]).to(dtype)
    grad = torch.randn(batch, 6, *spatial).to(dtype)
    return grad, x, weight, [6], ones, ones, ones, False, [0 for _ in spatial], 1, [True] * 3


@given(calls())
@settings(max_examples=100)
def test_no_bit_and_no_layout_changes(args: tuple[Any, ...]) -> None:
    joint, inputs = joint_of(*args)
    before = joint(*inputs)
    split(joint)
    joint.graph.lint()
    for a, b in zip(before, joint(*inputs), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert torch.equal(a, b)
        assert torch.equal(a.signbit(), b.signbit())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [(16,), (16, 16), (8, 8, 8)])
def test_a_plain_convolution_is_split(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    joint, _ = joint_of(*plain(*sizes, dtype=dtype))
    split(joint)
    assert is_split(joint)


def test_the_two_are_neighbours_and_the_saved_input_goes_to_the_first_only() -> None:
    joint, _ = joint_of(*plain(8, 8))
    split(joint)
    first = next(node for node in joint.graph.nodes if node.target is BACKWARD)
    assert first.name == "convolution_backward"
    assert first.args[-1] == (False, True, True)
    assert first.next.name == "convolution_backward_input"
    grad, x, weight = (node for node in joint.graph.nodes if node.op == "placeholder")
    assert first.all_input_nodes == [grad, x, weight]
    assert first.next.all_input_nodes == [grad, weight]


def test_what_is_split_stays_as_it_is() -> None:
    joint, _ = joint_of(*plain(8, 8))
    split(joint)
    once = str(joint.graph)
    split(joint)
    assert str(joint.graph) == once


@pytest.mark.parametrize("mask", [(False, True, True), (True, False, False)])
def test_one_kernel_is_one_op_already(mask: tuple[bool, ...]) -> None:
    joint, _ = joint_of(*plain(8, 8)[:-1], list(mask))
    before = str(joint.graph)
    split(joint)
    assert str(joint.graph) == before


def test_a_gradient_that_nobody_takes_is_not_split_off() -> None:
    joint, _ = joint_of(*plain(8, 8))
    (item,) = (n for n in joint.graph.nodes if n.target is operator.getitem and n.args[1] == 0)
    item.replace_all_uses_with(None)  # type: ignore[arg-type]
    joint.graph.erase_node(item)
    split(joint)
    assert not is_split(joint)


def test_where_the_bits_would_change_the_op_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = convolutions.FORWARD

    def other_kernel(*args: Any) -> Tensor:
        return forward(*args).mul(1 + 1e-6)

    monkeypatch.setattr(convolutions, "FORWARD", other_kernel)
    joint, _ = joint_of(*plain(7, 7))  # a size that no other test has tried
    split(joint)
    assert not is_split(joint)


def test_where_the_layout_would_change_the_op_stays_whole() -> None:
    grad, x, *rest = plain(6, 6)
    joint, _ = joint_of(grad, x.to(memory_format=torch.channels_last), *rest)
    split(joint)
    assert not is_split(joint)


def test_what_is_too_large_to_be_tried_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    args = plain(11, 11)
    monkeypatch.setattr(convolutions, "LARGEST_BYTES", sum(t.nbytes for t in args[:3]) - 1)
    joint, _ = joint_of(*args)
    split(joint)
    assert not is_split(joint)


def test_a_size_that_may_change_leaves_the_op_whole() -> None:
    grad, x, weight, *rest = plain(8, 8)

    def backward(grad: Tensor, x: Tensor, weight: Tensor) -> Any:
        return BACKWARD(grad, x, weight, *rest)

    joint = make_fx(backward, tracing_mode="symbolic")(grad, x, weight)
    split(joint)
    assert not is_split(joint)


def test_trying_leaves_the_generator_and_minds_no_autocast() -> None:
    joint, _ = joint_of(*plain(13, 13))
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        split(joint)
    assert is_split(joint)
    assert torch.equal(torch.get_rng_state(), before)


# --- in a step ----------------------------------------------------------------------------------


def convs(blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(blocks)],
        nn.ConvTranspose2d(8, 4, 2, 2),
    )


X = torch.randn(4, 8, 32, 32, generator=torch.Generator().manual_seed(1))


def whole(make: Callable[[], Any]) -> Any:
    """What `make` gives where no op is split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolutions, "split", lambda joint: None)
        return make()


def backwards(graph: Graph) -> list[Op]:
    return [op for op in graph.backward if "convolution" in op.target]


def test_both_ops_say_where_they_come_from() -> None:
    found = [(op.name, op.where.module) for op in backwards(graph_of(convs(2), X))]
    assert found == [
        ("convolution_backward", "2"),
        ("convolution_backward_input", "2"),
        ("convolution_backward_1", "1.0"),
        ("convolution_backward_1_input", "1.0"),
        ("convolution_backward_2", "0.0"),
    ]


def test_the_saved_input_is_free_before_the_gradient_of_the_input_is_made() -> None:
    graph = graph_of(convs(2), X)
    first, second, *_ = backwards(graph)
    assert set(first.inputs) - set(second.inputs) == {"tanh_1"}
    assert graph.ops.index(second) == graph.ops.index(first) + 1


def test_operations_are_the_same_in_sum() -> None:
    def flops() -> int:
        cost = Roofline(GPUS["A100"], scratch=False)
        return sum(op.flops for op in step(capture(convs(), X), cost).ops)

    assert 0 < flops() == whole(flops)


def test_a_device_that_is_not_there_has_its_own_kernels() -> None:
    assert not any(op.name.endswith("_input") for op in graph_of(convs(2), X, device="cuda").ops)


def step_of(module: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        module(x).square().mean().backward()

    return run


def test_the_floor_is_lower_and_what_is_measured_is_what_is_planned() -> None:
    x = X.repeat(4, 1, 1, 1)

    def planned(model: nn.Module) -> fxrecals.Plan:
        floor = fxrecals.plan(model, x, "100%").floor_bytes
        return fxrecals.plan(model, x, floor)

    model = convs()
    plan = planned(model)
    assert plan.peak_bytes < whole(lambda: planned(model)).peak_bytes
    run = step_of(fxrecals.rewrite(model, x, plan), x)
    run()
    measured = peak_bytes(run, model)
    assert measured <= plan.peak_bytes
    assert plan.peak_bytes == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("channels_last", [False, True])
def test_all_ways_to_train_give_plain_eagers_bits(channels_last: bool) -> None:
    torch._dynamo.reset()  # or strides that differ from those of another test become symbols
    model, x = convs(), X.clone().requires_grad_()
    if channels_last:
        x = X.to(memory_format=torch.channels_last).requires_grad_()
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected = record(model, model, (x,))
    backend = fxrecals.backend("75%", inner="eager")
    ways = {
        "rewrite": fxrecals.rewrite(model, x, "75%"),
        "backend": torch.compile(model, backend=backend),
    }
    for name, call in ways.items():
        assert compare(expected, record(call, model, (x,))) == [], name
    (plan,) = backend.plans
    assert sum(op.name.endswith("_input") for op in plan.graph.ops) == 5
    assert plan.graph == fxrecals.plan(model, x, "75%").graph


def test_the_exported_backward_is_split_and_gives_eagers_bits(tmp_path: Path) -> None:
    model, tangent = convs(), torch.randn(4, 4, 64, 64)
    captured = exported(model, X, tmp_path)
    made = function(tmp_path / "forward.py")(*inputs_of(captured, model, X))
    gradients = function(tmp_path / "backward.py")(*made[1:], tangent)
    _, expected = eager(model, X, tangent)
    numbers = captured.runs[0].parameters
    assert all(torch.equal(gradients[i], expected[number]) for i, number in numbers.items())
    assert "convolution_backward_1_input = " in (tmp_path / "backward.py").read_text()


def test_a_plan_without_recompute_frees_what_it_no_longer_needs() -> None:
    def peak() -> int:
        plan = fxrecals.plan(convs(), X, "100%")
        return simulate(plan.graph, plan.schedule).peak_bytes

    assert peak() < whole(peak)
