"""Tracing a model without running it, and joining its graphs into one step."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fxrecals import ir
from fxrecals.capture import Captured, capture, step
from fxrecals.cost import Free
from fxrecals.errors import CaptureError
from fxrecals.ir import Graph, Kind, Trait
from fxrecals.schedule import Schedule
from fxrecals.timeline import simulate
from tests.helpers import graph_of

X = torch.ones(4, 4)


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


def test_a_graph_without_seconds_is_the_same_graph() -> None:
    captured = capture(nn.Linear(4, 4), X)
    first, second = step(captured, Free()), step(captured, Free())
    assert first == second


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
    class Detached(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).detach()

    with pytest.raises(CaptureError, match="no traced graph needs a gradient"):
        capture(Detached(4, 4), X)


def test_a_function_is_no_module() -> None:
    with pytest.raises(CaptureError, match="model is a function"):
        capture(lambda x: x, X)  # type: ignore[arg-type]


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("no copies")


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"no copies; what works: a model that copy\.deepcopy"):
        capture(Uncopied(2, 2), torch.randn(1, 2))


def test_a_sharded_model_is_refused_and_told_to_come_before_it_is() -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(CaptureError, match=r"fxrecals\.rewrite before fully_shard"):
            capture(model, torch.randn(1, 2))
    finally:
        dist.destroy_process_group()


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


def test_at_the_loss_a_joined_step_holds_what_both_graphs_keep_once() -> None:
    _, graph = broken()
    timeline = simulate(graph, Schedule.keeping_everything(graph))
    kept, tangent, within_the_loss, scalars = 2 * 64, 64, 3 * 64, 16
    assert timeline.peak_at == "loss"
    assert timeline.peak_bytes == kept + tangent + within_the_loss + scalars
