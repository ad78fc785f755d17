"""What a training script may meet: errors in mid-step, threads, copies, resets, many steps."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxrecals
from benchmarks.measure import clear, compare, record, total
from fxrecals import dynamo, rng, schedule
from fxrecals.errors import InfeasibleLimitError
from fxrecals.ir import Graph
from fxrecals.plans import Plan
from fxrecals.schedule import Schedule
from tests import helpers

Step = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- a small model, at its floor -----------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x, range(2))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.part(x, range(2, len(self.layers)))

    def part(self, x: Tensor, which: range) -> Tensor:
        for i in which:
            x = F.dropout(torch.tanh(self.norms[i](self.layers[i](x))), 0.3, self.training)
        return x


def made(breaks: bool = False) -> tuple[Net, Tensor]:
    torch.manual_seed(2)
    return Net(breaks), torch.randn(64, 32)


@lru_cache
def planned() -> Plan:
    """At the floor, where dropout is among what runs again."""
    model, x = made()
    plan = fxrecals.plan(model, x, fxrecals.plan(model, x, "100%").floor_bytes)
    again = schedule.recomputed(plan.graph, plan.schedule)
    assert any(plan.graph.op(name).is_random for name in again)
    return plan


@lru_cache
def roomy(doubled: bool) -> Plan:
    model, x = made()
    return fxrecals.plan(model, x, planned().baseline_peak_bytes * (18 if doubled else 9) // 10)


def limit_bytes() -> int:
    found = planned().limit_bytes
    assert found is not None
    return found


def rewritten(model: nn.Module, x: Tensor) -> Step:
    return fxrecals.rewrite(model, x, planned())


def within(limit: Any = None, planner: Any = None) -> dynamo.Backend:
    """A backend that takes the plan above where it fits: it need not be found again."""
    given = None if planner else planned()
    return fxrecals.backend(limit or limit_bytes(), inner="eager", planner=planner, given=given)


def just_in_time(graph: Graph, *_: Any, **__: Any) -> Schedule:
    return helpers.just_in_time(graph)


def all_again(model: nn.Module, x: Tensor) -> Plan:
    """A plan that nobody has searched for: all that can runs again."""
    graph = helpers.graph_of(model, x)
    return Plan(graph, helpers.just_in_time(graph), limit_bytes=10**6, floor_bytes=0)


def backed(model: nn.Module, x: Tensor) -> Step:
    return compiled(model, within())


def compiled(model: nn.Module, backend: Any, **options: Any) -> Step:
    return torch.compile(model, backend=backend, dynamic=False, **options)


WAYS = pytest.mark.parametrize("way", [rewritten, backed])
Way = Callable[[nn.Module, Tensor], Step]


def train(step: Step, x: Tensor) -> None:
    torch.manual_seed(5)
    total(step(x)).backward()


def differs(expected: Step, plain: nn.Module, found: Step, model: nn.Module, x: Tensor) -> Any:
    """What two more steps of both leave otherwise."""
    return compare(record(expected, plain, (x,)), record(found, model, (x,)))


def measured(step: Step, model: nn.Module, x: Tensor) -> int:
    """Peak of activations in a step of a model that has been trained before."""

    def whole() -> Tensor:
        out = step(x)
        out.square().mean().backward()
        return out

    clear(model)
    return helpers.peak_bytes(whole, model)


def live() -> tuple[int, int]:
    """How many tensors are alive, and their bytes."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [o for o in gc.get_objects() if isinstance(o, Tensor) and type(o) is not Fake]
    return len(found), sum(t.nbytes for t in found)


Fake = torch._subclasses.FakeTensor


def graphs() -> int:
    gc.collect()
    return sum(type(o).__name__.startswith("GraphModule") for o in gc.get_objects())


# --- an op that fails when it is told to ---------------------------------------------------------


class Trouble:
    """`native_dropout` on the CPU, which fails at its nth run from now once it has drawn."""

    def __init__(self) -> None:
        self.countdown = 0
        self.error: BaseException = ArithmeticError()

    def arm(self, nth: int, error: BaseException) -> None:
        self.countdown, self.error = nth, error

    def kernel(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
        self.countdown -= 1
        if self.countdown == 0:
            raise self.error
        return x.mul(mask).mul_(1 / (1 - p)), mask


@pytest.fixture
def trouble() -> Iterator[Trouble]:
    found = Trouble()
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        library.impl("native_dropout", found.kernel, "CPU", allow_override=True)
        yield found


def errors() -> list[BaseException]:
    no_memory = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    return [ArithmeticError("an op fails"), KeyboardInterrupt(), MemoryError(), no_memory]


FORWARDS = 3
"""Runs of dropout in a forward; a later one is a replay."""


@WAYS
def test_an_op_that_fails_while_it_is_recomputed_leaves_the_generator_as_a_step_does(
    way: Way, trouble: Trouble
) -> None:
    (plain, x), (model, _) = made(), made()
    step = way(model, x)
    for call in (plain, step):
        train(call, x)
    for error in errors():
        clear(model)
        train(plain, x)
        expected = torch.get_rng_state()
        trouble.arm(FORWARDS + 1, error)
        with pytest.raises(type(error)):
            train(step, x)
        assert torch.equal(torch.get_rng_state(), expected)
        assert all(p.grad is None for p in model.parameters())
    assert not differs(plain, plain, step, model, x)


@WAYS
def test_an_op_that_fails_in_the_forward_leaves_what_it_leaves_without_a_limit(
    way: Way, trouble: Trouble
) -> None:
    """Running statistics are those of before, and the generator has moved."""
    (other, x), (model, _) = made(), made()
    steps = (compiled(other, "aot_eager"), way(model, x))
    for error in errors():
        states: list[Tensor] = []
        for step in steps:
            train(step, x)
            trouble.arm(2, error)
            with pytest.raises(type(error)):
                train(step, x)
            states.append(torch.get_rng_state())
        assert torch.equal(*states)
    assert not differs(steps[0], other, steps[1], model, x)


@pytest.mark.parametrize("nth", [2, FORWARDS + 1], ids=["forward", "recompute"])
@WAYS
def test_accidents_leave_nothing_alive(way: Way, nth: int, trouble: Trouble) -> None:
    model, x = made()
    step = way(model, x)
    train(step, x)

    def accident() -> None:
        trouble.arm(nth, MemoryError())
        with pytest.raises(MemoryError):
            train(step, x)

    found: list[Any] = []
    for _ in range(2):
        for _ in range(24):
            accident()
        trouble.error = ArithmeticError()  # the error's traceback holds the frames it went through
        found.append(live())
    assert found[0] == found[1]


# --- Python that fails ---------------------------------------------------------------------------


class Second(nn.Module):
    """Raises at its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise LookupError("not today")
        return x


def with_second(model: Net) -> nn.Module:
    return nn.Sequential(model, Second(), nn.Linear(32, 32), nn.Dropout(0.2))


@WAYS
def test_a_submodule_that_raises_once_leaves_what_it_leaves_in_eager(way: Way) -> None:
    (one, x), (two, _) = made(), made()
    torch.manual_seed(1)
    plain = with_second(one)
    torch.manual_seed(1)
    model = with_second(two)
    step = (
        fxrecals.rewrite(model, x, all_again(model, x))
        if way is rewritten
        else compiled(model, within(10**6, just_in_time))
    )
    for call in (plain, step):
        torch.manual_seed(5)
        train(call, x)
        with pytest.raises(LookupError, match="not today"):
            call(x)
    assert torch.equal(torch.get_rng_state(), _after_failing(x))
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), model.buffers(), strict=True))
    assert not differs(plain, plain, step, model, x)


def _after_failing(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    plain = with_second(made()[0])
    torch.manual_seed(5)
    train(plain, x)
    with pytest.raises(LookupError):
        plain(x)
    return torch.get_rng_state()


def failing(*_: Any) -> None:
    raise LookupError("a hook")


def _doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


@pytest.mark.filterwarnings("ignore:the graph (at|after)")
@pytest.mark.parametrize("where", ["", "norms.1"])
def test_hooks_put_on_a_rewritten_module_after_its_first_step_are_called_and_may_fail(
    where: str,
) -> None:
    (plain, x), (model, _) = made(), made()
    small = fxrecals.rewrite(model, x, planned())
    for step in (plain, small):
        train(step, x)
        handle = step.get_submodule(where).register_forward_hook(failing)
        with pytest.raises(LookupError, match="a hook"):
            step(x)
        handle.remove()
        double = step.get_submodule(where).register_forward_hook(_doubled)
        torch.manual_seed(0)
        assert step(x).isfinite().all()
        double.remove()
    model.load_state_dict(plain.state_dict())
    assert not differs(plain, plain, small, model, x)


@WAYS
def test_a_hook_on_a_tensor_that_raises_in_the_backward_leaves_the_next_step_right(
    way: Way,
) -> None:
    (plain, x), (model, _) = made(), made()
    step = way(model, x)
    for call, own in ((plain, plain), (step, model)):
        train(call, x)
        out = call(x)
        out.register_hook(failing)
        with pytest.raises(LookupError):
            total(out).backward()
        del out
        handle = next(own.parameters()).register_hook(failing)
        with pytest.raises(LookupError):
            train(call, x)
        handle.remove()
    assert not differs(plain, plain, step, model, x)


@torch.library.custom_op("fxrecals_bad_days::brittle", mutates_args=())
def brittle(g: Tensor) -> Tensor:
    if Brittle.fails:
        raise LookupError("a backward")
    return g.clone()


brittle.register_fake(lambda g: torch.empty_like(g))


class Brittle(torch.autograd.Function):
    """The identity, with a backward that may fail."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return brittle(grads[0])


class WithBrittle(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Brittle.apply(super().forward(x)))


@WAYS
def test_a_function_whose_backward_raises_leaves_the_next_step_right(way: Way) -> None:
    torch.manual_seed(0)
    plain, x = WithBrittle(), torch.randn(64, 32)
    model = copy.deepcopy(plain)
    limited = within(10**6, just_in_time)
    step = (
        fxrecals.rewrite(model, x, all_again(model, x))
        if way is rewritten
        else compiled(model, limited)
    )
    for call, own in ((plain, plain), (step, model)):
        train(call, x)
        Brittle.fails = True
        try:
            with pytest.raises(LookupError, match="a backward"):
                train(call, x)
        finally:
            Brittle.fails = False
        clear(own)
    assert not differs(plain, plain, step, model, x)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_ledger_is_empty_after_an_accident_anywhere(breaks: bool, trouble: Trouble) -> None:
    model, x = made(breaks)
    chosen = within(10**6, just_in_time)
    step = compiled(model, chosen)
    train(step, x)
    for nth in (1, 2, 3):
        trouble.arm(nth, MemoryError())
        with pytest.raises(MemoryError):
            step(x)
        trouble.error = ArithmeticError()
        gc.collect()
        assert chosen.ledger.is_empty
    out = step(x)
    out.register_hook(failing)
    with pytest.raises(LookupError):
        total(out).backward()
    del out
    gc.collect()
    assert chosen.ledger.is_empty
    assert chosen.ledger.alive_bytes == 0


def test_a_refused_limit_leaves_the_model_and_the_caller_alone() -> None:
    model, x = made()
    step = compiled(model, fxrecals.backend(1000, inner="eager"))

    class Big:
        pass

    def call() -> weakref.ref[Any]:
        big = Big()
        with pytest.raises(InfeasibleLimitError):
            step(x)
        return weakref.ref(big)

    alive = call()
    gc.collect()
    assert alive() is None


# --- threads -------------------------------------------------------------------------------------


def together(*work: Callable[[], None], seconds: float = 60) -> None:
    """Runs all of it at once; raises what any of it raised, or if it does not end."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a deadlock"
    if errors:
        raise errors[0]


class Steady(Net):
    """Without dropout: threads cannot change its bits."""

    def part(self, x: Tensor, which: range) -> Tensor:
        for i in which:
            x = torch.tanh(self.norms[i](self.layers[i](x)))
        return x


@pytest.mark.parametrize("how", ["rewritten", "backends of their own", "one backend"])
def test_two_threads_train_two_models_with_the_bits_of_each_alone(how: str) -> None:
    torch.manual_seed(3)
    models, x = [Steady(), Steady()], torch.randn(64, 32)
    plain = copy.deepcopy(models)
    plan = all_again(models[0], x)
    shared = within(10**6, just_in_time)

    def step_of(model: nn.Module) -> Step:
        if how == "rewritten":
            return fxrecals.rewrite(model, x, plan)
        one = shared if how == "one backend" else within(10**6, just_in_time)
        return compiled(model, one)

    def work(step: Step) -> Callable[[], None]:
        def run() -> None:
            for _ in range(8):
                train(step, x)

        return run

    together(*[work(step_of(model)) for model in models])
    for model in plain:
        work(model)()
    pairs = zip(
        [t for m in plain for t in (*(p.grad for p in m.parameters()), *m.buffers())],
        [t for m in models for t in (*(p.grad for p in m.parameters()), *m.buffers())],
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)
    gc.collect()
    assert shared.ledger.is_empty


class Masks(nn.Module):
    """Its output and its gradient are zero at the same places, if both had the same masks."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x), 0.5) + 0 * F.dropout(torch.sin(x), 0.5)


def test_what_one_thread_replays_is_not_disturbed_by_steps_of_another() -> None:
    wrong: list[int] = []

    def work(step: Step) -> Callable[[], None]:
        def run() -> None:
            for i in range(400):
                x = torch.full((64,), 0.3, requires_grad=True)
                out = step(x)
                out.sum().backward()
                assert x.grad is not None
                if not torch.equal(out != 0, x.grad.abs() > 0.5):
                    wrong.append(i)

        return run

    steps = [torch.compile(Masks(), backend=helpers.ByHand(helpers.just_in_time)) for _ in "ab"]
    for step in steps:
        step(torch.ones(64, requires_grad=True)).sum().backward()
    together(*map(work, steps))
    assert wrong == []


def test_an_interrupt_while_the_generator_is_set_back_puts_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn_from = rng.state("cpu")
    torch.rand(3)
    now = rng.state("cpu")
    set_state = rng.set_state

    def interrupted(device: str, state: Tensor) -> None:
        set_state(device, state)
        if state is drawn_from:
            raise KeyboardInterrupt

    monkeypatch.setattr(rng, "set_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rng.replay(drawn_from, "cpu", torch.rand, 2)
    assert torch.equal(rng.state("cpu"), now)


# --- copies and changes --------------------------------------------------------------------------


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@WAYS
def test_a_copy_trains_with_the_same_bits_and_shares_nothing(way: Way, how: Any) -> None:
    (plain, x), (model, _) = made(), made()
    step: Any = way(model, x)
    for call in (plain, step):
        train(call, x)
    twin = how(step)
    assert type(twin) is type(step)
    pairs = zip(twin.parameters(), model.parameters(), strict=True)
    assert all(a.data_ptr() != b.data_ptr() for a, b in pairs)
    own = getattr(twin, "_orig_mod", twin)
    expected = record(plain, plain, (x,))
    assert not compare(expected, record(step, model, (x,)))
    assert not compare(expected, record(twin, own, (x,)))


def test_a_copy_of_a_compiled_model_keeps_the_limit_bytes() -> None:
    model, x = made()
    step: Any = backed(model, x)
    train(step, x)
    twin = copy.deepcopy(step)
    assert measured(twin, twin._orig_mod, x) <= limit_bytes()


def to_double(model: Net, x: Tensor) -> Tensor:
    model.double()
    return x.double()


def to_bfloat16(model: Net, x: Tensor) -> Tensor:
    model.bfloat16().eval()  # dropout in bfloat16 is rounded otherwise by torch's own tracing
    return x.bfloat16()


def freeze_some(model: Net, x: Tensor) -> Tensor:
    model.layers[0].requires_grad_(False)
    model.norms[0].requires_grad_(False)
    return x


def freeze_and_thaw(model: Net, x: Tensor) -> Tensor:
    model.requires_grad_(False)
    assert not model(x).requires_grad  # a forward in training: it draws, and updates statistics
    model.requires_grad_(True)
    return x


def grow(model: Net, x: Tensor) -> Tensor:
    torch.manual_seed(8)
    model.layers.append(nn.Linear(32, 32))
    model.norms.append(nn.BatchNorm1d(32))
    return x


def shrink(model: Net, x: Tensor) -> Tensor:
    del model.layers[1]
    del model.norms[1]
    return x


def replace_a_module(model: Net, x: Tensor) -> Tensor:
    torch.manual_seed(8)
    model.layers[1] = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 32))
    return x


def load(model: Net, x: Tensor) -> Tensor:
    torch.manual_seed(9)
    model.load_state_dict(Net().state_dict())
    return x


def swap_parameters(model: Net, x: Tensor) -> Tensor:
    torch.manual_seed(9)
    model.load_state_dict(Net().state_dict(), assign=True)
    return x


def evaluate_and_return(model: Net, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    return x


def train_in_eval(model: Net, x: Tensor) -> Tensor:
    model.eval()
    return x


CHANGES = [
    to_double,
    to_bfloat16,
    freeze_some,
    freeze_and_thaw,
    grow,
    shrink,
    replace_a_module,
    load,
    swap_parameters,
    evaluate_and_return,
    train_in_eval,
]


OF_GRAPHS = (to_double, to_bfloat16, freeze_some, freeze_and_thaw, grow, train_in_eval)
"""Those that Dynamo must notice."""


@pytest.mark.parametrize(
    ("way", "change"),
    [*((rewritten, change) for change in CHANGES), *((backed, change) for change in OF_GRAPHS)],
)
def test_a_change_after_the_first_step_gives_eagers_bits(
    way: Way, change: Callable[[Any, Tensor], Tensor]
) -> None:
    (plain, x), (model, _) = made(), made()
    if way is rewritten:  # with room for a model that has grown, not to keep everything
        plan = roomy(doubled=change is to_double)
        step: Any = fxrecals.rewrite(model, x, plan)
        bound = plan.limit_bytes or 0
    else:
        step = compiled(model, within(bound := 10**6, just_in_time))
    for call in (plain, step):
        train(call, x)
    torch.manual_seed(5)
    y = change(plain, x)
    torch.manual_seed(5)
    assert torch.equal(y, change(getattr(step, "_orig_mod", step), x))
    assert not differs(plain, plain, step, model, y)
    assert measured(step, model, y) <= bound


def test_a_rewritten_module_says_so_where_another_type_does_not_fit() -> None:
    model, x = made()
    small = fxrecals.rewrite(model, x, planned())
    train(small, x)
    small.double()
    with pytest.raises(InfeasibleLimitError, match="the smallest limit that works"):
        small(x.double())


def test_a_copy_that_is_made_between_forward_and_backward_waits_for_nothing() -> None:
    model, x = made()
    chosen = within()
    out = compiled(model, chosen)(x)
    twin = copy.deepcopy(chosen)
    total(out).backward()
    assert chosen.ledger.is_empty
    assert twin.ledger.is_empty


# --- resets --------------------------------------------------------------------------------------


@WAYS
def test_a_reset_between_steps_and_within_one_changes_no_bit(way: Way) -> None:
    (plain, x), (model, _) = made(), made()
    step = way(model, x)

    def resetting(x: Tensor) -> Tensor:
        out = step(x)
        torch.compiler.reset()
        return out

    assert not differs(plain, plain, resetting, model, x)
    assert measured(resetting, model, x) <= limit_bytes()


def test_one_backend_serves_two_models_one_after_the_other() -> None:
    chosen = within()
    for seed in (0, 1):
        torch.manual_seed(seed)
        model, x = Net(), torch.randn(64, 32)
        plain = copy.deepcopy(model)
        step = compiled(model, chosen)
        assert not differs(plain, plain, step, model, x)
        assert measured(step, model, x) <= limit_bytes()
    assert chosen.ledger.is_empty


# --- what stays alive ----------------------------------------------------------------------------


def named(model: nn.Module, x: Tensor) -> Step:
    return compiled(model, dynamo.named_backend, options={"limit": limit_bytes(), "inner": "eager"})


def shared(model: nn.Module, x: Tensor) -> Step:
    return compiled(model, SHARED)


SHARED = within(10**6, just_in_time)


@pytest.mark.parametrize("way", [rewritten, backed, named, shared])
def test_a_deleted_model_frees_its_memory_at_once(way: Way) -> None:
    def life() -> list[weakref.ref[Any]]:
        model, x = made()
        step = way(model, x)
        train(step, x)
        train(step, x)
        out = step(x)
        return [weakref.ref(t) for t in (model, out, x, *model.parameters(), *model.buffers())]

    gc.collect()
    gc.disable()
    try:
        assert [alive() for alive in life()].count(None) == 3 + 6 + 6 + 9
    finally:
        gc.enable()


def test_a_backward_runs_after_its_rewritten_module_is_gone() -> None:
    (plain, x), (model, _) = made(), made()
    train(plain, x)
    small = fxrecals.rewrite(model, x, planned())
    torch.manual_seed(5)
    out = small(x)
    del small
    gc.collect()
    total(out).backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(
        a.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs if b.grad is not None
    )
    assert all(p.grad is not None for p in model.parameters())


def test_the_graphs_of_a_rewritten_module_die_with_it() -> None:
    plan = planned()

    def life() -> int:
        model, x = made()
        train(fxrecals.rewrite(model, x, plan), x)
        del model
        return graphs()

    found = [life() for _ in range(3)]
    assert found == found[:1] * 3


def test_planning_leaves_no_graphs() -> None:
    model, x = made()

    def life() -> int:
        helpers.graph_of(model, x)
        return graphs()

    found = [life() for _ in range(3)]
    assert found == found[:1] * 3


def test_a_backend_that_serves_many_models_does_not_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamo, "MOST_PLANS", 1)
    chosen = within(10**6, just_in_time)
    found: list[int] = []
    for _ in range(3):
        model, x = made()
        train(compiled(model, chosen), x)
        torch.compiler.reset()
        found.append(len(chosen.plans))
    assert found == found[:1] * 3


def test_many_steps_leave_no_more_than_two(tmp_path: Any) -> None:
    model, x = made()
    chosen = within()
    steps = [rewritten(model, x), compiled(model, chosen)]

    def found() -> Any:
        files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        sizes = {k: len(v) for k, v in vars(chosen).items() if hasattr(v, "__len__")}
        own = {k: len(v) for k, v in vars(chosen.ledger).items() if hasattr(v, "__len__")}
        return live(), graphs(), threading.active_count(), files, sizes, own

    after: list[Any] = []
    for number in range(50):
        clear(model)
        for step in steps:
            train(step, x)
        if number in (1, 49):
            after.append(found())
    assert after[0] == after[1]
    assert chosen.ledger.is_empty
