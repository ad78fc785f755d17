import copy
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxrecals
from benchmarks.measure import clear, compare, record, step_memory
from fxrecals import _torch, dynamo, schedule
from fxrecals.dynamo import backend, named_backend
from fxrecals.errors import InfeasibleLimitError, LimitError, OptionError
from fxrecals.ir import Graph, Peak, bounded_graph
from fxrecals.ledger import Held, Ledger
from fxrecals.plans import Plan
from fxrecals.schedule import Schedule
from fxrecals.timeline import simulate
from fxrecals.units import parse_limit
from tests import helpers

# Dynamo looks at the gradient of what crosses a graph break, and warns itself of it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Asked:
    """A planner that recomputes all it can, refuses what is under its floor, and takes notes."""

    def __init__(self, floor_bytes: int = 0) -> None:
        self.allowances: list[int | None] = []
        self.graphs: list[Graph] = []
        self.floor_bytes = floor_bytes

    def __call__(
        self, graph: Graph, limit: Any, *, solver: str, peak: Peak, allowance_bytes: int | None
    ) -> Schedule:
        self.allowances.append(allowance_bytes)
        self.graphs.append(graph)
        limit_bytes = limit.resolve(10**9) if allowance_bytes is None else allowance_bytes
        if limit_bytes < self.floor_bytes:
            raise InfeasibleLimitError(limit_bytes, self.floor_bytes, op="mm")
        return helpers.just_in_time(graph)


def reader(joint: fx.GraphModule, *, num_fwd_outputs: int, **_: Any) -> Graph:
    return helpers.read(joint, num_fwd_outputs)


class Net(nn.Module):
    def __init__(self, breaks: int = 0) -> None:
        super().__init__()
        self.breaks = breaks
        self.a, self.n, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.n(self.a(x))), 0.5, self.training)
        if self.breaks > 0:
            torch._dynamo.graph_break()
        h = torch.tanh(self.b(h))
        if self.breaks > 1:
            torch._dynamo.graph_break()
        return F.dropout(h.exp(), 0.3, self.training)


def net(breaks: int = 0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(2)
    return Net(breaks), torch.randn(256, 8, requires_grad=True)


def limited(limit: Any = "50%", planner: Any = None, **options: Any) -> dynamo.Backend:
    options = {"inner": "eager", "reader": reader, **options}
    return backend(limit, planner=planner or Asked(), **options)


@pytest.mark.parametrize("breaks", [0, 1, 2])
def test_a_compiled_step_leaves_what_plain_eager_leaves(breaks: int) -> None:
    model, x = net(breaks)
    own = copy.deepcopy(model)
    reference = record(model, model, (x,))
    chosen = limited()
    assert not compare(reference, record(torch.compile(own, backend=chosen), own, (x,)))
    assert len(chosen.plans) == breaks + 1
    assert all(isinstance(planned, Schedule) for planned in chosen.plans)


def test_without_a_limit_nothing_runs_twice() -> None:
    model, x = net()
    chosen = limited(None)
    torch.compile(model, backend=chosen)(x).sum().backward()
    (planned,) = chosen.plans
    graph = reader_graph(model, x)
    assert not schedule.recomputed(graph, planned)


def reader_graph(model: nn.Module, x: Tensor) -> Graph:
    torch._dynamo.reset()
    planner = Asked()
    torch.compile(model, backend=limited(planner=planner))(x)
    return planner.graphs[0]


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "frozen"])
def test_a_call_without_gradients_is_not_planned(how: str) -> None:
    model, x = net()
    model.eval()
    if how == "frozen":
        model.requires_grad_(False)
        x = x.detach()
    chosen = limited()
    compiled = torch.compile(model, backend=chosen)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with context.get(how, torch.enable_grad)():
        assert torch.equal(compiled(x), model(x))
    assert chosen.plans == ()


def test_training_after_evaluation_is_planned() -> None:
    model, x = net()
    chosen = limited()
    compiled = torch.compile(model, backend=chosen)
    model.eval()
    with torch.no_grad():
        compiled(x)
    model.train()
    compiled(x).sum().backward()
    assert len(chosen.plans) == 1


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_dynamic_sizes_are_planned_too(dynamic: bool | None) -> None:
    model, _ = net()
    own = copy.deepcopy(model)
    compiled = torch.compile(own, backend=limited(), dynamic=dynamic)
    for batch in (4, 6, 9):
        x = torch.randn(batch, 8)
        assert not compare(record(model, model, (x,)), record(compiled, own, (x,)))


def test_a_mode_of_compile_changes_no_bit_of_eagers() -> None:
    model, x = net()
    own = copy.deepcopy(model)
    chosen = limited()
    compiled = torch.compile(own, backend=chosen, mode="max-autotune-no-cudagraphs")
    assert not compare(record(model, model, (x,)), record(compiled, own, (x,)))
    assert len(chosen.plans) == 1


@pytest.mark.parametrize(
    ("mode", "tuned"), [("max-autotune-no-cudagraphs", True), ("default", None), (None, None)]
)
def test_a_mode_of_compile_reaches_inductor(
    mode: str | None, tuned: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {}

    def compile_(gm: fx.GraphModule, inputs: Any, partitioner: Any, patches: Any, *_: Any) -> Any:
        settings.update(patches)
        return gm.forward

    monkeypatch.setattr(_torch, "compile_with_inductor", compile_)
    model, x = net()
    torch.compile(model, backend=limited(inner="inductor"), mode=mode)(x)
    assert settings.get("max_autotune") is tuned


# --- bad options -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"inner": "jax"}, "inner"),
        ({"solver": "luck"}, "solver"),
        ({"cost": "free"}, "cost"),
        ({"peak": "gradients"}, "peak"),
        ({"limit": "4 lightyears"}, "limit"),
    ],
)
def test_a_bad_option_is_named_before_anything_is_compiled(
    options: dict[str, Any], argument: str
) -> None:
    with pytest.raises(OptionError) as caught:
        backend(**options)
    assert caught.value.argument == argument


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(LimitError):
        backend(-5)


def test_an_unknown_option_by_name_is_refused() -> None:
    model, x = net()
    compiled = torch.compile(model, backend=named_backend, options={"limits": "4GB"})
    with pytest.raises(Exception, match=r"options=\{'limits': '4GB'\} does not work.*'limit'"):
        compiled(x)


def test_options_go_to_the_backend_that_is_made_not_to_compile() -> None:
    model, x = net()
    compiled = torch.compile(model, backend=limited(), options={"limit": "4GB"})
    with pytest.raises(Exception, match=r"the arguments of fxrecals\.backend"):
        compiled(x)


# --- a limit that cannot be kept ---------------------------------------------------------------


def test_a_limit_under_the_floor_is_refused_at_the_call_by_its_own_error() -> None:
    model, x = net()
    before = copy.deepcopy(model.state_dict())
    compiled = torch.compile(model, backend=limited(1000, Asked(floor_bytes=5000)))
    for _ in range(2):
        with pytest.raises(InfeasibleLimitError) as caught:
            compiled(x)
        assert caught.value.floor_bytes == 5000
    assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())
    model(x).sum().backward()


# --- several graphs, one limit -----------------------------------------------------------------


def test_a_later_graph_gets_what_the_earlier_ones_leave() -> None:
    model, x = net(breaks=2)
    planner = Asked()
    torch.compile(model, backend=limited(10**6, planner))(x).sum().backward()
    held = [simulate(g, helpers.just_in_time(g)).saved_bytes for g in planner.graphs]
    assert planner.allowances == [None, 10**6 - held[0], 10**6 - held[0] - held[1]]


def test_a_share_is_one_of_the_first_graph() -> None:
    model, x = net(breaks=1)
    planner = Asked()
    torch.compile(model, backend=limited("100%", planner))(x).sum().backward()
    first = planner.graphs[0]
    baseline = simulate(first, Schedule.keeping_everything(first)).peak_bytes
    held = simulate(first, helpers.just_in_time(first)).saved_bytes
    assert planner.allowances == [None, baseline - held]


def test_a_later_graph_over_its_share_runs_at_its_floor_with_a_warning() -> None:
    model, x = net(breaks=2)
    planner = Asked(floor_bytes=10**6)
    compiled = torch.compile(model, backend=limited(10**6, planner))
    with pytest.warns(UserWarning, match=r"the break at") as caught:
        compiled(x).sum().backward()
    assert len(caught) == 1
    assert "floor" in str(caught[0].message)
    assert planner.allowances[0] is None
    assert planner.allowances[2] == planner.allowances[4] == 10**6


def test_nothing_is_said_where_nothing_is_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    """The later graph just fits, then and after several steps, an evaluation and another size."""
    model, x = net(breaks=1)
    planner = Asked()
    torch.compile(model, backend=limited(10**6, planner))(x).sum().backward()
    _, left = planner.allowances
    assert left is not None
    planner.floor_bytes = left
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=limited(10**6, planner), dynamic=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # Dynamo's own
        for _ in range(3):
            compiled(x).sum().backward()
        with torch.no_grad():
            compiled(x)
        compiled(x[:200]).sum().backward()
    assert [str(warning.message) for warning in caught] == []
    assert capfd.readouterr() == ("", "")
    assert len(planner.graphs) == 2 + 2 * 2


def test_a_step_gives_back_what_it_held() -> None:
    model, x = net(breaks=1)
    chosen = limited()
    compiled = torch.compile(model, backend=chosen)
    out = compiled(x)
    assert chosen.ledger.alive_bytes > 0
    out.sum().backward()
    assert chosen.ledger.is_empty


def test_a_forward_that_is_dropped_gives_back_what_it_held() -> None:
    model, x = net(breaks=1)
    chosen = limited()
    compiled = torch.compile(model, backend=chosen)
    for _ in range(3):
        out = compiled(x)
        held = chosen.ledger.alive_bytes
        del out
        gc.collect()
        assert held > 0
        assert chosen.ledger.is_empty


def test_a_view_as_output_is_followed_to_its_graph() -> None:
    model = nn.Linear(4, 6)
    chosen = limited()
    compiled = torch.compile(lambda x: model(x).sin().view(-1)[1:], backend=chosen)
    out = compiled(torch.ones(2, 4))
    assert chosen.ledger.alive_bytes > 0
    out.sum().backward()
    assert chosen.ledger.is_empty


def test_free_memory_is_already_less_what_others_hold() -> None:
    ledger = Ledger()
    ledger.enter([Held(500)])
    assert ledger.allowance(parse_limit("auto"), baseline_bytes=1000) is None


def test_leaving_twice_is_leaving_once() -> None:
    ledger = Ledger()
    first, second = ledger.enter([Held(100)]), ledger.enter([Held(20)])
    ledger.leave(first)
    ledger.leave(first)
    assert ledger.alive_bytes == 20
    ledger.leave(second)
    assert ledger.is_empty


def test_a_share_is_taken_anew_when_a_step_begins() -> None:
    ledger = Ledger()
    half = parse_limit("50%")
    ledger.allowance(half, 1000)
    ledger.leave(ledger.enter([Held(100)]))
    assert ledger.allowance(half, 4000) is None
    ledger.enter([Held(100)])
    assert ledger.allowance(half, 1) == 1900


# --- gradients under the limit -----------------------------------------------------------------


class Halves(nn.Module):
    """Two graphs: many activations and few parameters, then the other way round."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
        self.first = nn.Sequential(*blocks)
        self.second = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x[:1])


def halves() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Halves(), torch.randn(512, 64)


def stepping(compiled: Any, model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """A step whose output is held to its end."""

    def step() -> Tensor:
        clear(model)
        out = compiled(x)
        out.square().mean().backward()
        return out

    return step


def test_one_graph_keeps_a_limit_on_the_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    x = torch.randn(96, 64)
    chosen = backend("70%", peak="step", inner="eager")
    peak = step_memory(stepping(torch.compile(model, backend=chosen), model, x), model).peak
    (plan,) = chosen.plans
    assert isinstance(plan, Plan)
    assert plan.peak is Peak.STEP
    assert plan.limit_bytes == plan.baseline_step_peak_bytes * 7 // 10
    assert plan.limit_bytes is not None
    assert peak <= plan.limit_bytes
    assert plan.step_peak_bytes == pytest.approx(peak, rel=0.03)


def test_a_share_is_one_of_the_first_graph_with_its_gradients() -> None:
    model, x = halves()
    planner = Asked()
    chosen = backend("100%", peak="step", inner="eager", planner=planner)
    torch.compile(model, backend=chosen)(x[:8]).sum().backward()
    first = planner.graphs[0]
    keep = Schedule.keeping_everything(first)
    whole = simulate(bounded_graph(first, Peak.STEP), keep).peak_bytes
    assert whole > simulate(first, keep).peak_bytes
    held = simulate(first, helpers.just_in_time(first)).saved_bytes
    assert planner.allowances == [None, whole - held]


def test_gradients_stay_until_no_graph_waits() -> None:
    ledger = Ledger()
    first, second = ledger.enter([Held(100, 10)]), ledger.enter([Held(20, 7)])
    ledger.leave(second, has_run=True)
    assert ledger.alive_bytes == 107
    third = ledger.enter([Held(30, 5)])
    ledger.leave(third)
    assert ledger.alive_bytes == 107, "its backward never ran"
    ledger.leave(second, has_run=True)
    assert ledger.alive_bytes == 107
    ledger.leave(first, has_run=True)
    assert ledger.alive_bytes == 0
    ledger.enter([Held(1)])
    assert ledger.alive_bytes == 1, "another step begins"


def test_a_backward_that_has_run_leaves_its_gradients_to_the_ledger() -> None:
    model, x = halves()
    chosen = backend(10**9, peak="step", inner="eager", planner=Asked())
    compiled = torch.compile(model, backend=chosen)
    other = torch.compile(nn.Linear(64, 4), backend=chosen)
    waiting = other(x)
    before = chosen.ledger.alive_bytes
    compiled(x).sum().backward()
    made = sum(p.nbytes for p in model.parameters())
    assert chosen.ledger.alive_bytes == before + made
    waiting.sum().backward()
    assert chosen.ledger.alive_bytes == 0


def test_nothing_is_said_of_a_step_that_was_planned_as_a_whole() -> None:
    model, x = halves()
    floor = fxrecals.plan(model, x, "100%", peak="step").floor_bytes
    small = fxrecals.rewrite(model, x, floor, peak="step")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the graph (at|after)")
        peak = step_memory(stepping(small, model, x), model).peak
    assert peak <= floor


# --- by name -----------------------------------------------------------------------------------


def test_equal_options_share_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Asked()
    monkeypatch.setattr(dynamo, "solve_within", planner)
    monkeypatch.setattr(dynamo, "read_joint", reader)
    model, x = net(breaks=1)
    options = {"limit": 123456, "inner": "eager"}
    torch.compile(model, backend=named_backend, options=options)(x).sum().backward()
    first, second = planner.allowances
    assert first == 123456 // 2, "another graph will need room too"
    assert second is not None
    assert second < 123456


# --- Inductor ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_inductor_draws_the_same_masks_whatever_is_recomputed() -> None:
    model, x = net()
    kept, again = copy.deepcopy(model), copy.deepcopy(model)
    keep = torch.compile(kept, backend=limited(None, inner="inductor"))
    reference = record(keep, kept, (x,))
    torch._dynamo.reset()
    chosen = limited("50%", inner="inductor")
    found = compare(reference, record(torch.compile(again, backend=chosen), again, (x,)))
    assert not found
    assert len(chosen.plans) == 1


@pytest.mark.slow
def test_inductor_finds_its_code_cache_key_usable() -> None:
    # A key that cannot be pickled is only a log line of torch's, in a process of its own here.
    code = (
        "import torch\n"
        "from tests.test_dynamo import limited, net\n"
        "model, x = net()\n"
        "torch.compile(model, backend=limited('50%', inner='inductor'))(x).sum().backward()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert "pickle" not in done.stderr


def test_poolings_are_lowered_by_inductor_under_a_limit() -> None:
    """Inductor has pooling ops of its own, whose names say no number of dimensions."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3), nn.Tanh())
    model, x = nn.Sequential(*layers), torch.randn(2, 2, 16, 16)
    compiled = torch.compile(model, backend=fxrecals.backend("100%"))
    assert torch.allclose(model(x), compiled(x), atol=1e-5)
    compiled(x).sum().backward()
