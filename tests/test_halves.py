import copy
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from benchmarks.measure import compare, record
from fxrecals import schedule
from fxrecals.halves import split as split_joint
from fxrecals.ir import Phase
from fxrecals.schedule import Schedule
from fxrecals.timeline import simulate
from tests import helpers
from tests.cases import Dropped, InPlace
from tests.helpers import ByHand, Scheduler, Split

SCHEDULES: dict[str, Scheduler] = {
    "keeping everything": Schedule.keeping_everything,
    "keeping nothing": helpers.just_in_time,
    "at random": helpers.at_random(0),
    "at random otherwise": helpers.at_random(1),
}


class EveryDraw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 16 * 8).view(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x * self.w)
        h = h * torch.bernoulli(torch.full_like(h, 0.5))
        h = h + 0.1 * torch.randn(h.shape)
        i = torch.multinomial(torch.ones(h.shape[0], 8), h.shape[1], replacement=True)
        h = h * (1 + i.to(h.dtype)) * torch.rand_like(h) * torch.rand(h.shape)
        return F.rrelu(h * h.sin(), training=True)[torch.randperm(h.shape[0])]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 6, 2, 12).transpose(1, 2).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q.exp(), k, v.sin(), dropout_p=0.3)


def normed() -> nn.Module:
    blocks = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    return nn.Sequential(*blocks, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).sin())


class Splitting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.l(x).sin().split([2, 4, 6], dim=1)
        low, high = b.exp().unbind(0)[:2]
        return a.sum() * c.cos() + torch.cat([low, high])[:6] + b.topk(2, dim=1).values.sum()


class ReadThenUpdated(nn.Module):
    """Reads a buffer, directly and through a view, that it then updates."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.1, 1, 4))
        self.register_buffer("seen", torch.linspace(1, 2, 16).view(4, 4))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out = torch.sin(x * self.w + self.seen) * torch.exp(x + self.seen.t().clone().t())
        self.seen.add_(1)
        return out


class UpdatesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.1, 1, 4))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        out = torch.sin(x * self.w + counts)
        counts.mul_(2)
        return out.exp()


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.l(x).sin()
        parts = {"view": h.view(-1)[2:], "half": h[:, :3], "h": h}
        return {"none": None, "three": 3, "top": h.argmax(dim=1), "in": x, **parts}


def over(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator).requires_grad_()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "dropout": (Dropped, lambda: (over(16, 32),)),
    "every draw": (EveryDraw, lambda: (over(16, 8),)),
    "attention": (Attention, lambda: (over(2, 6, 8),)),
    "in-place activations": (InPlace, lambda: (over(3, 2, 4),)),
    "batch norm": (normed, lambda: (over(4, 3, 12, 12),)),
    "tied weights": (Tied, lambda: (torch.arange(8).view(2, 4),)),
    "splits": (Splitting, lambda: (over(2, 8),)),
    "a buffer read, then updated": (ReadThenUpdated, lambda: (over(4, 4),)),
    "an input read, then updated": (UpdatesItsInput, lambda: (over(4, 4), torch.ones(4, 4))),
    "views, None, numbers, integers": (ManyOutputs, lambda: (over(3, 4),)),
}


def made(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(5)
    build, inputs = MODELS[name]
    return build(), inputs()


def compiled(name: str, scheduler: Scheduler) -> Split:
    model, inputs = made(name)
    backend = ByHand(scheduler)
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return backend.splits[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_leaves_what_plain_eager_leaves(name: str) -> None:
    model, inputs = made(name)
    plain = copy.deepcopy(model)
    reference = record(plain, plain, copy.deepcopy(inputs))
    for what, scheduler in SCHEDULES.items():
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        call = torch.compile(own, backend=ByHand(scheduler), fullgraph=True)
        found = compare(reference, record(call, own, copy.deepcopy(inputs)))
        assert not found, f"{what}: {found}"


def test_batches_are_counted_once() -> None:
    model, inputs = made("batch norm")
    torch._dynamo.reset()
    backend = ByHand(helpers.just_in_time)
    torch.compile(model, backend=backend)(*inputs).sum().backward()
    assert dict(model.named_buffers())["1.num_batches_tracked"] == 1
    assert schedule.recomputed(backend.splits[0].graph, backend.splits[0].schedule)


@pytest.mark.parametrize("name", MODELS)
def test_the_programs_run_the_schedule_op_for_op(name: str) -> None:
    split = compiled(name, helpers.at_random(2))
    assert _ops(split, split.forward) == list(split.schedule.forward)
    assert _ops(split, split.backward) == list(split.schedule.backward)


def _ops(split: Split, half: fx.GraphModule) -> list[str]:
    calls = (n for n in half.graph.nodes if n.op == "call_function")
    names = (n.name.partition("_recompute")[0] for n in calls)
    return [name for name in names if name in split.graph.by_name]


@pytest.mark.parametrize("name", ["dropout", "batch norm", "splits", "tied weights"])
@pytest.mark.parametrize("how", ["keeping everything", "keeping nothing", "at random"])
def test_what_is_saved_is_what_the_schedule_says(name: str, how: str) -> None:
    split = compiled(name, SCHEDULES[how])
    output = next(n for n in split.forward.graph.nodes if n.op == "output")
    inputs = {n.name for n in split.forward.graph.nodes if n.op == "placeholder"}
    got = {n.name.replace("_rng", ":rng") for n in output.args[0][split.num_fwd_outputs :]}
    kept = {x for x in got - inputs if not x.endswith("_before")}
    assert kept == set(schedule.saved(split.graph, split.schedule))


@pytest.mark.parametrize("name", ["dropout", "every draw", "in-place activations", "splits"])
def test_keeping_everything_changes_nothing_but_the_order(name: str) -> None:
    split = compiled(name, Schedule.keeping_everything)
    before = Counter(_targets(split.joint))
    assert Counter([*_targets(split.forward), *_targets(split.backward)]) == before


def _targets(gm: fx.GraphModule) -> list[str]:
    nodes = (n for n in gm.graph.nodes if n.op == "call_function")
    return [str(n.target) for n in nodes if n.target is not operator.getitem or n.users]


@pytest.mark.parametrize("name", MODELS)
def test_the_results_of_an_op_are_taken_apart_at_once(name: str) -> None:
    split = compiled(name, helpers.just_in_time)
    for half in (split.forward, split.backward):
        nodes = list(half.graph.nodes)
        for node in (n for n in nodes if n.target is operator.getitem):
            source = nodes.index(node.args[0])
            between = nodes[source + 1 : nodes.index(node)]
            assert all(n.target is operator.getitem for n in between)


def test_the_runs_of_an_op_are_numbered() -> None:
    split = compiled("dropout", helpers.just_in_time)
    names = [n.name for n in split.backward.graph.nodes]
    assert {"gelu_recompute", "gelu_recompute_1"} <= set(names)


def test_a_run_again_keeps_what_is_known_of_the_op() -> None:
    split = compiled("dropout", helpers.just_in_time)
    (first,) = (n for n in split.joint.graph.nodes if n.name == "gelu")
    (again,) = (n for n in split.backward.graph.nodes if n.name == "gelu_recompute")
    assert {"val", "stack_trace", "seq_nr"} <= set(first.meta)
    assert all(again.meta[key] is known for key, known in first.meta.items())


def test_an_op_that_draws_runs_again_from_one_saved_state() -> None:
    split = compiled("dropout", helpers.just_in_time)
    inputs = [n.name for n in split.backward.graph.nodes if n.op == "placeholder"]
    assert [x for x in inputs if x.endswith("_rng")] == [
        "native_dropout_rng",
        "native_dropout_1_rng",
    ]


def test_no_state_is_saved_where_no_draw_runs_again() -> None:
    split = compiled("dropout", Schedule.keeping_everything)
    assert not [n for n in split.forward.graph.nodes if n.name.endswith("_rng")]


def test_a_copy_is_kept_of_what_the_forward_updates() -> None:
    split = compiled("a buffer read, then updated", helpers.just_in_time)
    inputs = [n.name for n in split.backward.graph.nodes if n.op == "placeholder"]
    (copied,) = (x for x in inputs if x.endswith("_before"))
    assert copied in [n.name for n in split.forward.graph.nodes]


@pytest.mark.parametrize("scheduler", [Schedule.keeping_everything, helpers.just_in_time])
def test_no_copy_is_kept_of_statistics_that_are_only_updated(scheduler: Scheduler) -> None:
    split = compiled("batch norm", scheduler)
    assert not [n for n in split.forward.graph.nodes if n.name.endswith("_before")]


def test_no_copy_is_kept_where_the_backward_reads_nothing_that_changes() -> None:
    split = compiled("a buffer read, then updated", Schedule.keeping_everything)
    assert not [n for n in split.forward.graph.nodes if n.name.endswith("_before")]


def test_what_is_alive_when_the_programs_run_is_what_the_timeline_says() -> None:
    chain = Chain(6)
    for scheduler in (Schedule.keeping_everything, helpers.just_in_time, helpers.at_random(3)):
        backend = ByHand(scheduler)
        torch._dynamo.reset()
        call = torch.compile(chain, backend=backend, fullgraph=True)
        x = torch.randn(1 << 18)
        call(x).backward()
        split = backend.splits[0]
        planned = simulate(split.graph, split.schedule).peak_bytes
        measured = helpers.peak_bytes(lambda: call(x).backward(), chain)  # noqa: B023
        assert measured == pytest.approx(planned, rel=0.01)


class Chain(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.w = nn.ParameterList([torch.ones(1) for _ in range(length)])

    def forward(self, x: Tensor) -> Tensor:
        for w in self.w:
            x = (x * w).sin().exp().cos()
        return x.sum()


@pytest.mark.parametrize("scheduler", [Schedule.keeping_everything, helpers.just_in_time])
def test_sizes_known_at_run_time_reach_the_backward(scheduler: Scheduler) -> None:
    model, _ = made("dropout")
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    call = torch.compile(own, backend=ByHand(scheduler), fullgraph=True, dynamic=True)
    for batch in (16, 5):
        inputs = (over(batch, 32),)
        reference = record(model, model, copy.deepcopy(inputs))
        assert not compare(reference, record(call, own, inputs))


def test_a_schedule_of_another_graph_is_refused() -> None:
    split = compiled("tied weights", Schedule.keeping_everything)
    stray = split.graph.forward[0]
    graph = type(split.graph)(
        tuple(op for op in split.graph.ops if op is not stray), split.graph.values, ()
    )
    with pytest.raises(ValueError, match="before it is made"):
        split_joint(
            split.joint,
            graph,
            Schedule.keeping_everything(graph),
            num_fwd_outputs=split.num_fwd_outputs,
        )


def test_the_phases_of_the_reader_here_are_the_forward_and_the_rest() -> None:
    split = compiled("dropout", Schedule.keeping_everything)
    phases = {op.name: op.phase for op in split.graph.ops}
    assert phases["gelu"] is Phase.FORWARD
    assert phases["gelu_backward"] is Phase.BACKWARD
