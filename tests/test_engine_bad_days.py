"""The engine after accidents, over many steps, and in several threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import clear, compare, record, total
from fxrecals import InfeasibleLimitError
from fxrecals.engine import Recals, recals
from tests.engines import TIGHT, equal, gradients, held, is_clean, made, under

# --- accidents ------------------------------------------------------------------------------------


class Breaks(torch.autograd.Function):
    """The identity, of which the backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Any) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ctx.error


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_an_accident_is_right(where: str, error: BaseException) -> None:
    model, x = made()
    wanted = record(model, model, (x,))
    model, x = made()
    engine = recals(TIGHT)

    def fails(x: Tensor) -> Any:
        h = torch.tanh(model.layers[0](x)).exp().sin()
        if where == "forward":
            raise error
        return model.layers[1](Breaks.apply(h, error))

    for _ in range(3):
        with pytest.raises(type(error)):
            engine(fails, x).sum().backward()
    error.__traceback__ = None
    gc.collect()
    assert is_clean(engine)
    assert compare(wanted, record(under(engine, model), model, (x,))) == []
    assert is_clean(engine)


def test_a_step_refused_for_its_limit_leaves_nothing_and_others_work() -> None:
    engine, x = recals(4000), nn.Parameter(torch.randn(100))
    with pytest.raises(InfeasibleLimitError):
        engine(lambda: x.exp() @ torch.ones(100, 100))
    assert is_clean(engine)
    engine(lambda: x.exp().exp().sum()).backward()
    assert is_clean(engine)


def test_a_limit_that_fails_in_the_backward_leaves_the_generator_and_the_next_step_right() -> None:
    x = nn.Parameter(torch.linspace(-1, 1, 1000))

    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0] + torch.ones(20, 1000).sum(0)

    engine = recals(30_000)
    with pytest.raises(InfeasibleLimitError):
        engine(lambda: Greedy.apply(F.dropout(x, 0.5).exp()).sum()).backward()
    state = torch.get_rng_state()
    engine(lambda: x.exp().tanh().sum()).backward()
    assert torch.equal(state, torch.get_rng_state())
    gc.collect()
    assert is_clean(engine)


# --- many steps -----------------------------------------------------------------------------------


def objects() -> int:
    return len(gc.get_objects())


@pytest.mark.parametrize("collects", [True, False])
def test_two_hundred_steps_leave_no_more_than_twenty(collects: bool) -> None:
    model, x = made()
    engine = recals(TIGHT)

    def step() -> None:
        clear(model)
        total(engine(model, x)).backward()

    found = steps(engine, step, collects)
    assert found[0] == found[1]


def test_two_hundred_forwards_without_a_backward_leave_no_more_than_twenty() -> None:
    model, x = made()
    engine = recals(TIGHT)

    def step() -> None:
        engine(model, x)

    found = steps(engine, step, collects=False)
    assert found[0] == found[1]


def test_steps_with_another_number_each_leave_no_more() -> None:
    model, x = made()
    engine = recals(TIGHT)
    numbers = iter(range(1, 1000))

    def step() -> None:
        clear(model)
        total(engine(lambda: model(x) * (1 / next(numbers)))).backward()

    found = steps(engine, step, collects=False)
    assert found[0] == found[1]


def steps(engine: Recals, step: Callable[[], None], collects: bool) -> list[Any]:
    """What there is after twenty and after two hundred steps."""
    found: list[Any] = []
    gc.collect()
    if not collects:
        gc.disable()
    try:
        for number in range(1, 201):
            step()
            if number in (20, 200):
                if collects:
                    gc.collect()
                found.append((held(engine), objects()))
    finally:
        gc.enable()
    (first, before), (last, after) = found
    return [(first, 0), (last, max(0, after - before - 20))]


# --- threads --------------------------------------------------------------------------------------


def together(*work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("shared", [False, True])
def test_two_threads(shared: bool) -> None:
    def quiet(seed: int) -> tuple[nn.Module, Tensor]:
        model, x = made(seed)
        return nn.Sequential(*(nn.Sequential(m, nn.Tanh()) for m in model.layers)), x

    def train(engine: Any, seed: int, out: dict[int, Any]) -> None:
        model, x = models[seed]
        for _ in range(5):
            clear(model)
            total(engine(model, x)).backward()
        out[seed] = gradients(model)

    wanted: dict[int, Any] = {}
    found: dict[int, Any] = {}
    models = {seed: quiet(seed) for seed in range(2)}
    for seed in models:
        train(lambda f, x: f(x), seed, wanted)
    models = {seed: quiet(seed) for seed in range(2)}
    engines = [recals(2 * TIGHT)] * 2 if shared else [recals(TIGHT), recals(TIGHT)]
    together(*(lambda s=s: train(engines[s], s, found) for s in models))
    assert equal(wanted, found)
    assert all(map(is_clean, engines))


def test_a_backward_in_another_thread() -> None:
    model, x = made()
    torch.manual_seed(5)
    total(model(x)).backward()
    wanted = gradients(model)
    clear(model)
    torch.manual_seed(5)
    engine = recals(TIGHT)
    loss = engine(lambda: total(model(x)))
    together(loss.backward)
    assert equal(wanted, gradients(model))
