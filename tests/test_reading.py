"""A joint graph, read as `ir`."""

import sys
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fxrecals import reading
from fxrecals.capture import capture, step
from fxrecals.cost import Call, Free, OpCost
from fxrecals.ir import Graph, Kind, Op, Phase, Trait
from fxrecals.reading import module_path, read, source_line
from tests.helpers import graph_of


def ops(graph: Graph, target: str) -> list[Op]:
    return [op for op in graph.ops if f".{target}." in f".{op.target}."]


def only(graph: Graph, target: str) -> Op:
    (op,) = ops(graph, target)
    return op


class Function(nn.Module):
    """A module with one 4x4 weight and a forward given as a function of (weight, *inputs)."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.function = function

    def forward(self, *inputs: Tensor) -> object:
        return self.function(self.weight, *inputs)  # type: ignore[operator]


X = torch.ones(4, 4)


# --- phases and order ---------------------------------------------------------------------------


def test_forward_comes_first_then_the_loss_then_the_backward() -> None:
    graph = graph_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), X)
    assert [op.name for op in graph.forward if not op.is_view] == ["addmm", "tanh"]
    loss = graph.backward[0]
    assert (loss.name, loss.traits) == ("loss", frozenset({Trait.CALLER}))
    assert loss.inputs == ("tanh",)
    assert [graph.values[name].kind for name in loss.outputs] == [Kind.TANGENT, Kind.TANGENT]
    assert loss.outputs[1] in graph.outputs  # the caller's loss, and the gradient that starts it


def test_what_only_the_backward_uses_belongs_to_it_and_waits_for_its_reader() -> None:
    graph = graph_of(Function(lambda w, x: (x @ w).sin()), X)
    cos = only(graph, "cos")
    assert cos.phase is Phase.BACKWARD
    following = graph.backward[graph.backward.index(cos) + 1]
    assert cos.outputs[0] in following.inputs


def test_random_draws_stay_in_the_forward_even_if_only_the_backward_reads_them() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            ctx.save_for_backward(torch.rand_like(x))  # type: ignore[attr-defined]
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            (noise,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return grad * noise

    graph = graph_of(Function(lambda w, x: Noisy.apply(x @ w)), X)
    assert only(graph, "rand_like").phase is Phase.FORWARD


def work_of_reading(depth: int) -> int:
    """Bytecode instructions that the reader runs for a chain of products."""

    def deep(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(depth):
            x = (x @ w).sin()
        return x

    (joint,) = capture(Function(deep), X).joints
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != reading.__file__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        read(joint.module, num_fwd_outputs=1, parameter_inputs=(0,), cost=Free())
    finally:
        sys.settrace(before)
    return count


def test_reading_is_linear_in_the_nodes() -> None:
    assert work_of_reading(80) < 2.2 * work_of_reading(40)


# --- values -------------------------------------------------------------------------------------


def test_a_view_shares_the_storage_of_what_it_views() -> None:
    graph = graph_of(Function(lambda w, x: (x @ w).t().sin()), X)
    view = next(op for op in graph.forward if op.is_view)
    assert graph.values[view.outputs[0]].storage == graph.values[view.inputs[0]].storage


def test_items_of_an_op_are_its_outputs_and_no_ops() -> None:
    graph = graph_of(Function(lambda w, x: F.layer_norm(x @ w, (4,))), X)
    norm = only(graph, "native_layer_norm")
    assert len(norm.outputs) == 3
    assert not ops(graph, "getitem")
    assert all(name.startswith("getitem") for name in norm.outputs)


def test_an_output_that_nobody_takes_still_has_a_value() -> None:
    graph = graph_of(Function(lambda w, x: torch.max(x @ w, 1, keepdim=True).values * w), X)
    split = graph_of(Function(lambda w, x: torch.split(x @ w, 2)[0].sin()), X)
    assert all(name in graph.values for op in graph.ops for name in op.outputs)
    assert only(split, "split").outputs[1] == "split:1"


def test_a_split_is_a_view_of_one_storage() -> None:
    def sums(w: Tensor, x: Tensor) -> Tensor:
        a, b = torch.split(x @ w, 2)
        return a.sin() * b

    graph = graph_of(Function(sums), X)
    split = only(graph, "split")
    assert split.is_view
    assert {graph.values[n].storage for n in split.outputs} == {"mm"}
    assert {graph.values[n].nbytes for n in split.outputs} == {64}


def test_gradients_of_parameters_are_not_charged_and_those_of_inputs_are() -> None:
    graph = graph_of(Function(lambda w, x: x @ w), torch.ones(4, 4, requires_grad=True))
    kinds = {v.kind for name in graph.outputs if (v := graph.values[name])}
    assert {Kind.GRADIENT, Kind.BACKWARD, Kind.TANGENT, Kind.ACTIVATION} == kinds


def test_a_view_of_a_gradient_is_a_gradient() -> None:
    graph = graph_of(nn.Linear(4, 4), X)
    weight = next(
        n
        for n in graph.outputs
        if graph.values[n].nbytes == 64 and n != "addmm" and graph.values[n].kind is Kind.GRADIENT
    )
    storage = graph.values[weight].storage
    in_it = [v for v in graph.values.values() if v.storage == storage]
    assert len(in_it) > 1
    assert {v.kind for v in in_it} == {Kind.GRADIENT}


def test_the_generator_state_of_a_random_op_is_a_value_of_its_own() -> None:
    graph = graph_of(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), X)
    drop = only(graph, "native_dropout")
    assert drop.is_random
    assert drop.outputs[-1] == "native_dropout:rng"
    assert graph.values["native_dropout:rng"].kind is Kind.RNG_STATE
    assert graph.values["native_dropout:rng"].nbytes == 5056


# --- traits -------------------------------------------------------------------------------------


def test_fused_attention_without_dropout_draws_nothing() -> None:
    def attend(p: float) -> Graph:
        def forward(w: Tensor, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q @ w, q, q, dropout_p=p)

        return graph_of(Function(forward), torch.ones(1, 1, 4, 4))

    assert not any(op.is_random for op in attend(0.0).ops)
    assert any(op.is_random for op in attend(0.5).ops)


def test_dropout_in_eval_mode_draws_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    assert not any(op.is_random for op in graph_of(model, X).ops)


def test_an_op_with_a_generator_of_its_own_may_not_run_again() -> None:
    joint = torch.fx.Graph()
    x = joint.placeholder("primals_1")
    drawn = joint.call_function(torch.ops.aten.bernoulli.default, (x,))
    x.meta["val"] = drawn.meta["val"] = X
    joint.output(([drawn],))
    module = torch.fx.GraphModule(torch.nn.Module(), joint)

    def bernoulli() -> Op:
        graph = read(module, num_fwd_outputs=1, parameter_inputs=(), cost=Free())
        return only(graph, "bernoulli")

    assert bernoulli().may_run_again
    drawn.kwargs = {"generator": torch.Generator()}  # type: ignore[assignment]
    assert not bernoulli().may_run_again


def test_a_batch_norm_may_run_again_and_updates_its_statistics_once() -> None:
    graph = graph_of(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()), X)
    assert only(graph, "_native_batch_norm_legit_functional").may_run_again
    copies = [op for op in graph.forward if Trait.MUTATES in op.traits]
    assert len(copies) == 3
    assert not any(op.may_run_again for op in copies)


def test_an_op_that_reads_an_updated_buffer_may_not_run_again() -> None:
    class Counting(nn.Module):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("steps", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            y = (self.linear(x) + self.steps).sin()
            self.steps.add_(1)
            return y

    graph = graph_of(Counting(), X)
    assert not ops(graph, "add")[0].may_run_again
    assert only(graph, "sin").may_run_again


def saves_products(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    wanted = op == torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


def test_what_the_user_wants_saved_may_not_run_again() -> None:
    contexts = partial(create_selective_checkpoint_contexts, saves_products)

    def forward(w: Tensor, x: Tensor) -> Tensor:
        body = lambda y: (y @ w).sin()  # noqa: E731
        return checkpoint(body, x, use_reentrant=False, context_fn=contexts)

    graph = graph_of(Function(forward), X)
    assert Trait.MUST_SAVE in ops(graph, "mm")[0].traits


def test_an_op_that_is_not_known_to_be_pure_may_not_run_again() -> None:
    @torch.library.custom_op("fxrecals_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: grad * 2)
    graph = graph_of(Function(lambda w, x: twice(x @ w)), X)
    assert Trait.OPAQUE in only(graph, "twice").traits


# --- where --------------------------------------------------------------------------------------


def test_ops_say_which_module_and_line_they_come_from_in_the_backward_too() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    graph = graph_of(Inner(), X)
    assert [op.where.module for op in ops(graph, "addmm")] == ["layers.0", "layers.1"]
    assert ops(graph, "mm")[0].where.module == "layers.1"
    assert all(op.where.source.startswith("test_reading.py:") for op in ops(graph, "tanh"))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self'].transformer.h[3].mlp", "transformer.h.3.mlp"),
        ("L['fn']._modules['a'].b", "a.b"),
        ("L['self']", ""),
    ],
)
def test_module_paths_read_as_the_user_would_write_them(path: str, expected: str) -> None:
    assert module_path(path) == expected


def test_frames_of_torch_are_not_the_users_line() -> None:
    inside = f'File "{torch.__file__}", line 7, in f\n'
    assert source_line('File "/a/net.py", line 3, in g\n' + inside) == "net.py:3"
    assert source_line(inside) == ""


# --- prices -------------------------------------------------------------------------------------


def test_prices_reach_the_ops_that_they_are_of() -> None:
    class ByName:
        def price(self, calls: list[Call]) -> tuple[OpCost, ...]:
            return tuple(OpCost(flops=len(str(call.target))) for call in calls)

    graph = step(capture(nn.Linear(4, 4), X), ByName())  # type: ignore[arg-type]
    assert only(graph, "addmm").flops == len("aten.addmm.default")
