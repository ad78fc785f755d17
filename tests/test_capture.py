import random
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fxrecals import _torch, ir
from fxrecals.capture import Captured, capture, module_path, read, source_line, step
from fxrecals.cost import Call, Free, OpCost
from fxrecals.errors import CaptureError
from fxrecals.ir import Graph, Kind, Op, Phase, Trait
from fxrecals.schedule import Schedule
from fxrecals.timeline import simulate


def graph_of(model: nn.Module, example: object, device: str | None = None) -> Graph:
    graph = step(capture(model, example, device=device), Free())
    ir.verify(graph)
    return graph


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


def test_reading_is_linear_in_the_nodes() -> None:
    def deep(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(100):
            x = (x @ w).sin()
        return x

    captured = capture(Function(deep), X)
    assert len(step(captured, Free()).ops) > 700


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
    assert all(op.where.source.startswith("test_capture.py:") for op in ops(graph, "tanh"))


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


# --- models and examples ------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.linear(a) * b


@pytest.mark.parametrize("example", [(X, X), [X, X], {"a": X, "b": X}])
def test_examples_are_positional_or_by_name(example: object) -> None:
    assert len(capture(Pair(), example).joints) == 1


def test_meta_models_are_planned_on_the_examples_device() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    graph = graph_of(model, X)
    assert {v.device for v in graph.values.values()} == {"cpu"}
    assert model.weight.is_meta


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_a_gpu_that_is_not_there_can_be_planned_for() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    graph = graph_of(model, X, device="cuda")
    devices = {v.device for v in graph.values.values() if v.kind is not Kind.RNG_STATE}
    assert devices == {"cuda"}
    assert graph.values["native_dropout:rng"].nbytes == 16


def test_tied_and_frozen_parameters_are_read_once_and_not_trained() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.b(self.a(x).sin()))

    graph = graph_of(Tied(), X)
    gradients = [n for n in graph.outputs if graph.values[n].kind is Kind.GRADIENT]
    assert len(gradients) == 3


def test_the_model_the_example_and_the_generators_are_left_as_they_were() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0
            self.plain = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            torch._dynamo.graph_break()
            return self.norm(self.linear(x) * self.plain) * random.random()

    model, example = Stateful(), torch.randn(4, 4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state, generator, attributes = random.getstate(), torch.get_rng_state(), dict(vars(model))
    capture(model, example)
    assert (random.getstate(), vars(model)) == (state, attributes)
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.calls == 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    model(example).sum().backward()
    assert model.linear.weight.grad is not None


def test_twenty_captures_do_not_disturb_the_users_own_compilation() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu()

    for _ in range(20):
        capture(Small(), torch.ones(8, 4))
    sizes: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        sizes.append(sum(n.op == "call_function" for n in gm.graph.nodes))
        return gm.forward

    model = Small()
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        compiled(torch.ones(5, 4)).sum().backward()
    assert len(sizes) == 1
    assert model.linear.weight.grad is not None


def test_a_compiled_model_is_captured_as_its_original() -> None:
    compiled = torch.compile(nn.Linear(4, 4))
    assert len(capture(compiled, X).joints) == 1  # type: ignore[arg-type]


def test_no_grad_around_the_call_does_not_matter() -> None:
    with torch.no_grad():
        assert len(capture(nn.Linear(4, 4), X).joints) == 1


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [torch.ones(3, 5), {"nonsense": X}, (X, X, X)])
def test_an_example_that_does_not_fit_is_named(example: object) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=r"Linear cannot be traced with example=.*what works"):
        capture(model, example)
    model(X).sum().backward()


def test_a_model_without_gradients_is_refused() -> None:
    with pytest.raises(CaptureError, match="none of the 2 parameters"):
        capture(nn.Linear(4, 4).requires_grad_(False), X)
    assert capture(nn.Linear(4, 4).requires_grad_(False), X.clone().requires_grad_()).joints


def test_a_model_that_nothing_can_be_traced_of_is_refused() -> None:
    with pytest.raises(CaptureError, match="nothing could be traced"):
        capture(nn.LSTM(4, 4), torch.ones(2, 1, 4))


def test_a_model_whose_output_is_detached_is_refused() -> None:
    with pytest.raises(CaptureError, match="no traced graph needs a gradient"):
        capture(Function(lambda w, x: (x @ w).detach()), X)


def test_a_function_is_no_module() -> None:
    with pytest.raises(CaptureError, match="model is a function"):
        capture(lambda x: x, X)  # type: ignore[arg-type]


def test_python_that_branches_on_values_is_named_as_the_cause() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(CaptureError, match="does not branch on values"):
        capture(Branching(), X)


# --- several graphs -----------------------------------------------------------------------------


class Broken(nn.Module):
    """Two graphs; the value between them is read by both backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).tanh()
        torch._dynamo.graph_break()
        return self.b(y).exp()


def broken() -> tuple[Captured, Graph]:
    captured = capture(Broken(), X)
    graph = step(captured, Free())
    ir.verify(graph)
    return captured, graph


def test_graphs_of_a_broken_model_are_joined_into_one_step() -> None:
    captured, graph = broken()
    assert [run.prefix for run in captured.runs] == ["g0.", "g1."]
    assert "graph_break" in captured.breaks[0]
    halves = [op.name.partition(".")[0] for op in graph.ops if Trait.CALLER not in op.traits]
    assert list(dict.fromkeys(halves)) == ["g0", "g1"]
    assert halves.index("g1") < len(halves) - halves[::-1].index("g0")
    callers = [op.name for op in graph.ops if Trait.CALLER in op.traits]
    assert callers == ["g1.inputs", "loss", "g0.tangents"]


def test_an_input_from_an_earlier_graph_shares_its_storage() -> None:
    _, graph = broken()
    handed = graph.op("g1.inputs")
    (source,), (made,) = handed.inputs, handed.outputs
    assert source == "g0.tanh"
    assert graph.values[source].storage == graph.values[made].storage
    assert graph.values[made].kind is Kind.ACTIVATION


def test_a_gradient_handed_to_an_earlier_graph_is_its_tangent() -> None:
    _, graph = broken()
    (tangent,) = graph.op("g0.tangents").outputs
    maker = next(op for op in graph.ops if graph.values[tangent].storage in op.outputs)
    assert maker.name.startswith("g1.mm")
    assert "g1.tangents_1" not in graph.outputs
    assert tangent in graph.outputs


def test_one_graph_that_runs_twice_is_two_runs_of_one_joint() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return self.linear(x).tanh()

    captured = capture(nn.Sequential(block := Block(), block), X)
    graph = step(captured, Free())
    ir.verify(graph)
    assert len(captured.runs) == 2
    gradients = [n for n in graph.outputs if graph.values[n].kind is Kind.GRADIENT]
    assert len(gradients) == 2


# --- against the allocator ----------------------------------------------------------------------


def test_a_joined_step_peaks_where_its_parts_do() -> None:
    _, graph = broken()
    timeline = simulate(graph, Schedule.keeping_everything(graph))
    assert timeline.peak_bytes >= 4 * 64


def test_prices_reach_the_ops_that_they_are_of() -> None:
    class ByName:
        def price(self, calls: list[Call]) -> tuple[OpCost, ...]:
            return tuple(OpCost(flops=len(str(call.target))) for call in calls)

    graph = step(capture(nn.Linear(4, 4), X), ByName())  # type: ignore[arg-type]
    assert only(graph, "addmm").flops == len("aten.addmm.default")


def test_a_graph_without_seconds_is_the_same_graph() -> None:
    captured = capture(nn.Linear(4, 4), X)
    first, second = step(captured, Free()), step(captured, Free())
    assert first == second


# --- private names ------------------------------------------------------------------------------


def test_sizes_are_ints_when_they_are_known() -> None:
    assert _torch.hint(3) == 3


def test_tensors_share_a_storage_key_exactly_if_they_share_a_storage() -> None:
    assert _torch.storage_key(X) == _torch.storage_key(X.t())
    assert _torch.storage_key(X) != _torch.storage_key(X.clone())
    assert _torch.storage_bytes(X[:1]) == 64


def test_descriptions_tell_gradients_tangents_and_updates_apart() -> None:
    joint = capture(nn.BatchNorm1d(4), X).joints[0].module
    descs = _torch.output_descs(joint)
    assert any(_torch.gradient_of(d) is not None for d in descs)
    tangents = [n for n in joint.graph.nodes if _torch.is_tangent(n)]
    assert all(_torch.tangent_of(n) in descs for n in tangents)
    placeholders = [n for n in joint.graph.nodes if n.op == "placeholder"]
    assert {_torch.gradient_of(d) for d in descs} & {_torch.input_desc(n) for n in placeholders}
    assert any(_torch.is_tagged_backward(n) for n in joint.graph.nodes)
    assert _torch.mutated_by(object()) is None


def test_collectives_are_known_by_their_namespace() -> None:
    target = torch.ops._c10d_functional.all_reduce.default
    assert _torch.is_collective(target)
    assert not _torch.is_collective(torch.ops.aten.mm.default)


def test_ops_without_results_and_asserts_have_effects() -> None:
    graph = torch.fx.Graph()
    assert _torch.is_effectful(graph.call_function(torch.ops.aten._assert_async.default, ()))
    assert not _torch.is_effectful(graph.call_function(torch.ops.aten.mm.default, ()))


def test_a_copied_graph_has_its_own_nodes_and_the_same_values() -> None:
    joint = capture(nn.Linear(4, 4), X).joints[0].module
    twin = _torch.copy_graph(joint)
    pairs = list(zip(joint.graph.nodes, twin.graph.nodes, strict=True))
    assert all(a is not b and a.name == b.name for a, b in pairs)
    assert all(a.meta.get("val") is b.meta.get("val") for a, b in pairs)
