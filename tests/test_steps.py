"""Steps of several graphs, and graphs with symbolic sizes: one limit, whatever runs."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxrecals
from benchmarks.measure import clear, compare, record, step_memory
from fxrecals.errors import InfeasibleLimitError
from fxrecals.plans import Plan
from tests.helpers import peak_bytes


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def blocks(count: int, width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(count)]
    )


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = blocks(4), blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.wide(x))
        torch._dynamo.graph_break()
        return x + self.back(torch.sin(h))


class Layers(nn.Module):
    """Two graphs, each of which runs for each of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def once(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x)


def twice(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x) * model(x * 0.5)


STEPS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "two graphs": (Broken, once),
    "graphs that run for each layer": (Layers, once),
    "two passes before one backward": (lambda: blocks(6), twice),
    "two passes of two graphs": (Broken, twice),
}


def made(name: str) -> tuple[nn.Module, Tensor, Any]:
    torch.manual_seed(0)
    make, call = STEPS[name]
    return make(), torch.randn(128, 32), call


def step_of(compiled: Any, call: Any, model: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        clear(model)
        call(compiled, x).square().mean().backward()

    return step


def compiled_within(model: nn.Module, limit: Any, **options: Any) -> tuple[Any, Any]:
    chosen = fxrecals.backend(limit, inner="eager")
    return torch.compile(model, backend=chosen, **options), chosen


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step is|the graph (at|after)")
        yield


@pytest.mark.parametrize(
    "name",
    [*list(STEPS)[:-1], pytest.param("two passes of two graphs", marks=pytest.mark.slow)],
)
def test_a_step_of_several_graphs_keeps_one_limit(name: str) -> None:
    model, x, call = made(name)
    wanted = record(partial(call, model), model, (x,), steps=3)
    whole = step_memory(step_of(model, call, model, x), model).activations
    floor = smallest_limit(name)
    for limit in (whole, (whole + floor) // 2, floor):
        torch._dynamo.reset()
        model, x, call = made(name)
        compiled, _ = compiled_within(model, limit)
        with quiet():
            assert compare(wanted, record(partial(call, compiled), model, (x,), steps=3)) == []
        assert peak_bytes(step_of(compiled, call, model, x), model) <= limit


@lru_cache
def smallest_limit(name: str) -> int:
    """The least limit under which the second step goes on, which is planned as a whole."""
    model, x, call = made(name)
    limit = 1
    for _ in range(4):
        torch._dynamo.reset()
        step = step_of(compiled_within(model, limit)[0], call, model, x)
        try:
            with quiet():
                step()
                step()
        except InfeasibleLimitError as error:
            limit = error.floor_bytes
        else:
            return limit
    raise AssertionError("the floor that an error names does not work")


@pytest.mark.parametrize("name", ["two graphs", "graphs that run for each layer"])
def test_a_rewritten_model_keeps_its_limit_from_the_first_step(name: str) -> None:
    model, x, _ = made(name)
    wanted = record(model, model, (x,), steps=3)
    model, x, _ = made(name)
    floor = fxrecals.plan(model, x, "100%").floor_bytes
    small = fxrecals.rewrite(model, x, floor)
    torch.manual_seed(0)
    small(x).square().mean().backward()
    assert peak_bytes(step_of(small, once, model, x), model) <= floor
    assert compare(wanted, record(small, model, (x,), steps=3)) == []


def test_two_passes_through_a_rewritten_model_share_its_limit() -> None:
    model, x, call = made("two passes before one backward")
    limit = smallest_limit("two passes before one backward")
    small = fxrecals.rewrite(model, x, limit)
    step = step_of(small, call, model, x)
    with quiet():
        step()
        step()
    assert peak_bytes(step, model) <= limit


def test_a_step_that_recomputes_says_once_what_its_breaks_cost() -> None:
    model, x, call = made("two graphs")
    compiled, chosen = compiled_within(model, smallest_limit("two graphs"))
    step = step_of(compiled, call, model, x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the graph (at|after)")
        step()
        with pytest.warns(UserWarning, match=r"2 graphs, planned together.*16.4 kB here.*break at"):
            step()
        step()
    whole = [plan for plan in chosen.plans if isinstance(plan, Plan)][-1]
    assert whole.prefixes == ("g0.", "g1.")


def test_nothing_is_compiled_again_where_the_limit_is_far() -> None:
    model, x, call = made("graphs that run for each layer")
    compiled, chosen = compiled_within(model, "1GB")
    step = step_of(compiled, call, model, x)
    step()
    graphs = len(chosen.plans)
    step()
    step()
    assert len(chosen.plans) == graphs + 1, "the plan of the whole step"


def test_steps_that_take_turns_are_each_planned_once() -> None:
    model, x, _ = made("two passes before one backward")
    compiled, chosen = compiled_within(model, "1GB")
    steps = [step_of(compiled, call, model, x) for call in (twice, once)]
    for step in steps * 2:
        step()
    plans = len(chosen.plans)
    for step in steps * 3:
        step()
    assert len(chosen.plans) == plans


def test_a_forward_that_was_only_looked_at_is_no_part_of_a_step() -> None:
    model, x, _ = made("two passes before one backward")
    floor = fxrecals.plan(model, x, "100%").floor_bytes
    compiled, chosen = compiled_within(model, floor)
    out = compiled(x)
    for _ in range(3):
        clear(model)
        out = compiled(x)  # the one before is alive until here
        out.square().mean().backward()
    assert len(chosen.plans) == 1, "two runs were not planned as a whole, nor refused"
    assert chosen.ledger.is_empty


def test_a_backend_keeps_no_model_alive() -> None:
    model, x, call = made("two passes of two graphs")
    compiled, chosen = compiled_within(model, "1GB")
    step = step_of(compiled, call, model, x)
    for _ in range(3):
        step()
    gone = [weakref.ref(p) for p in model.parameters()]
    del model, compiled, step
    torch._dynamo.reset()
    gc.collect()
    assert all(reference() is None for reference in gone)
    assert chosen.plans


# --- symbolic sizes -----------------------------------------------------------------------------


def peak_at(size: int, compiled: Any, model: nn.Module) -> int:
    step = step_of(compiled, once, model, torch.randn(size, 32))
    step()
    return peak_bytes(step, model)


def test_a_limit_holds_at_every_size() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(blocks(5), nn.BatchNorm1d(32))
    model = copy.deepcopy(plain)
    limit = fxrecals.plan(model, torch.randn(256, 32), "55%").limit_bytes
    assert limit is not None
    compiled, chosen = compiled_within(model, limit)
    for size in (64, 100, 256, 300, 128, 20, 256):
        x = torch.randn(size, 32)
        wanted, found = record(plain, plain, (x,)), record(compiled, model, (x,))
        assert compare(wanted, found) == [], size
    assert all(peak_at(size, compiled, model) <= limit for size in (64, 100, 256, 300, 128, 20))
    assert len(chosen.plans) <= 5, "a plan holds at smaller sizes too"


def test_a_size_that_cannot_be_held_is_refused_and_the_next_one_is_not() -> None:
    model = blocks(4)
    compiled, _ = compiled_within(model, "200kB")
    for size in (8, 16):
        compiled(torch.randn(size, 32)).sum().backward()
    for _ in range(2):
        with pytest.raises(InfeasibleLimitError) as caught:
            compiled(torch.randn(4096, 32))
        assert caught.value.floor_bytes > 4096 * 32 * 4
        assert ", for inputs (4096, 32); " in str(caught.value)
    compiled(torch.randn(12, 32)).sum().backward()


def test_a_size_that_a_rewritten_model_cannot_hold_is_named() -> None:
    model = blocks(4)
    small = fxrecals.rewrite(model, torch.randn(16, 32), "100%")
    with pytest.raises(InfeasibleLimitError, match=r"for inputs \(4096, 32\); "):
        small(torch.randn(4096, 32))


def test_a_step_of_several_graphs_that_cannot_be_held_names_its_inputs() -> None:
    model, x, call = made("two graphs")
    compiled, _ = compiled_within(model, 1)
    with quiet():
        step_of(compiled, call, model, x)()
    with pytest.raises(InfeasibleLimitError) as caught:
        step_of(compiled, call, model, x)()
    assert caught.value.shapes == (tuple(x.shape),)


def test_a_share_is_refused_of_the_step_and_not_of_the_first_of_its_graphs() -> None:
    """The share is one of the step, and how much that is shows when the step has ended."""
    model, x, call = made("two graphs")
    compiled, _ = compiled_within(model, "20%")
    with pytest.warns(UserWarning, match=r"^the graph at test_steps.* limit=20% is [^:]*: it is"):
        step_of(compiled, call, model, x)()
    with pytest.raises(InfeasibleLimitError) as caught:
        step_of(compiled, call, model, x)()
    assert caught.value.limit_bytes == fxrecals.plan(model, x, "100%").baseline_peak_bytes // 5


def test_several_graphs_of_changing_sizes_keep_one_limit() -> None:
    model, x, call = made("two graphs")
    whole = step_memory(step_of(model, call, model, x), model).activations
    compiled, _ = compiled_within(model, limit := whole * 6 // 10)
    sizes = (128, 64, 100, 32)
    with quiet():
        for size in sizes * 2:
            step_of(compiled, call, model, x[:size])()
    for size in sizes:
        assert peak_bytes(step_of(compiled, call, model, x[:size]), model) <= limit


def test_a_size_that_depends_on_data_is_taken_at_its_bound() -> None:
    def positive(x: Tensor) -> Tensor:
        kept = torch.tanh(x)[(x > 0).nonzero()[:, 0]]
        return (kept * kept.sin()).sum() + x.exp().sum()

    x = torch.randn(64, requires_grad=True)
    positive(x).backward()
    wanted = x.grad
    x.grad = None
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled, chosen = compiled_within(positive, "80%", fullgraph=True)  # type: ignore[arg-type]
        compiled(x).backward()
    assert x.grad is not None
    assert wanted is not None
    assert torch.equal(x.grad, wanted)
    (plan,) = chosen.plans
    assert plan.graph.values["nonzero"].nbytes == 64 * 8
