"""Errors and warnings as a new user meets them: by a mistake in real use, with what works."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxrecals
from fxrecals import _torch, plot
from fxrecals.solve import exact

X = torch.randn(64, 32)


def stack(blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(blocks)])


class Branching(nn.Module):
    """Its Python asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if x.sum() > 0:  # the line that the error is to name
            x = x * 2
        return x


class Locked(nn.Module):
    """It cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(32, 32), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Idle(nn.Module):
    """It runs no op."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> int:
        return 3


def made(batch: int = 4) -> tuple[nn.Module, Tensor]:
    return stack(), torch.randn(batch, 32)


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


MISTAKES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a function for a model": (
        lambda: fxrecals.plan(len, X, "50%"),  # type: ignore[arg-type]
        ["model is a builtin_function_or_method; what works: a torch.nn.Module"],
    ),
    "a device that torch does not know": (
        lambda: fxrecals.plan(stack(), X, "50%", device="gpu0"),
        ["device='gpu0' does not work", '"cuda:0"'],
    ),
    "a limit for such a device": (
        lambda: fxrecals.plan(stack(), X, {"gpu 0": "4GB"}),
        ["limit={'gpu 0': '4GB'} does not work; what works: devices as torch names them"],
    ),
    "a limit for a device where the model is not": (
        lambda: fxrecals.plan(stack(), X, {"cuda:0": "4GB"}),
        ["limit='cuda:0: 4GB' does not work", '{"cpu": "4GB"}'],
    ),
    "a cost that there is not": (
        lambda: fxrecals.plan(stack(), X, "50%", cost="fast"),
        ["cost='fast' does not work; what works: 'roofline' or 'measured'"],
    ),
    "an inner compiler that there is not": (
        lambda: fxrecals.backend("1GB", inner="jax"),  # type: ignore[arg-type]
        ["inner='jax' does not work; what works: 'inductor' or 'eager'"],
    ),
    "a solver that there is not": (
        lambda: fxrecals.backend("1GB", solver="best"),
        ["solver='best' does not work; what works: 'auto' or 'exact'"],
    ),
    "an example of another size": (
        lambda: fxrecals.plan(stack(), torch.randn(64, 31), "50%"),
        ["Sequential cannot be traced with example=Tensor(64, 31) float32", "[64, 31] X [32, 32];"],
    ),
    "a branch on values": (
        lambda: fxrecals.plan(Branching(), X, "50%"),
        ["Branching cannot be traced", "(test_messages.py:", "fxrecals.recals(limit)"],
    ),
    "a model that cannot be copied": (
        lambda: fxrecals.plan(Locked(), X, "50%"),
        ["Locked cannot be copied for tracing", "_thread.lock", "fxrecals.recals(limit)"],
    ),
    "a model without ops": (
        lambda: fxrecals.plan(Idle(), X, "50%"),
        ["nothing could be traced", "no op at all", "fxrecals.recals(limit)"],
    ),
    "a limit that only the loss is over": (
        lambda: fxrecals.plan(stack(), X, "1kB"),
        ["limit 1.00 kB is below", "set by your loss, between forward and backward", "(limit="],
    ),
    "a limit that no size trains under": (
        lambda: fxrecals.fit(made, "100B"),
        ["limit 100 B is below", "for inputs (1, 32)"],
    ),
    "a model in place of a factory": (
        lambda: fxrecals.fit(stack(), "1MB"),  # type: ignore[arg-type]
        ["factory='Sequential' does not work; what works: a function that returns a model"],
    ),
    "a factory of something else": (
        lambda: fxrecals.fit(lambda batch=4: stack(), "1MB"),
        ["it returned Sequential"],
    ),
    "a factory without the keyword": (
        lambda: fxrecals.fit(made, "1MB", vary="tokens"),
        ["made(tokens=2)", "unexpected keyword argument 'tokens'"],
    ),
    "a watch of a model without memory": (
        lambda: fxrecals.monitor(nn.Linear(3, 3, device="meta")),
        ["model='Linear on meta' does not work; what works: a model whose parameters are on"],
    ),
    "a watch without a plan": (
        lambda: fxrecals.monitor(stack()),
        ["planned=None does not work; what works: a plan, the fxrecals.backend in use"],
    ),
    "a model that fxrecals.compile did not return": (
        lambda: fxrecals.ran(stack()),
        ["model='Sequential' does not work; what works: what fxrecals.compile returned"],
    ),
    "a share for the engine": (
        lambda: fxrecals.recals("50%"),
        ["limit='50%' does not work", "analyze() tells it"],
    ),
    "a policy that there is not": (
        lambda: fxrecals.recals("1MB", policy="fifo"),
        ["policy='fifo' does not work; what works: 'lru', 'dtr', or a function"],
    ),
    "a device for the engine that there is not": (
        lambda: fxrecals.recals("1MB", devices="gpu!"),
        ["devices='gpu!' does not work; what works: \"all\""],
    ),
    "a curve of a plan without one": (
        lambda: plot.pareto(fxrecals.plan(stack(), X, "100%")),
        ["the plan has no curve; what works: a plan made without a limit"],
    ),
}
"""By name: what is done, and words of the message."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_what_works(mistake: str) -> None:
    do, words = MISTAKES[mistake]
    with pytest.raises(fxrecals.FxrecalsError) as caught:
        do()
    message = str(caught.value)
    assert [each for each in words if each not in message] == [], message
    assert ".;" not in message


def test_the_line_that_cannot_be_traced_is_the_users() -> None:
    with pytest.raises(fxrecals.CaptureError) as caught:
        fxrecals.plan(Branching(), X, "50%")
    found = re.search(r"\(test_messages\.py:(\d+)\)", str(caught.value))
    assert found is not None
    line = Path(__file__).read_text().splitlines()[int(found[1]) - 1]
    assert "the line that the error is to name" in line


def test_a_step_too_large_for_the_exact_solver_says_how_large_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("highspy")
    monkeypatch.setattr(exact, "MOST_RUNS", 3)
    with pytest.raises(fxrecals.OptionError, match=r"up to 3 recomputes .* step of \d+ ops"):
        fxrecals.plan(stack(), X, "80%", solver="exact")


def test_without_matplotlib_a_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = fxrecals.plan(stack(), X)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(fxrecals.FxrecalsError, match=r'pip install "fxrecals\[plot\]"'):
        plot.pareto(curve)


# --- the engine ---------------------------------------------------------------------------------


def test_an_error_of_the_users_own_comes_without_a_log_of_torchs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(RuntimeError, match="3x5 and 4x4"):
            fxrecals.recals("1MB")(nn.Linear(4, 4), torch.randn(3, 5))
        assert caplog.records == []
        logger.error("what others log is heard")
        assert len(caplog.records) == 1
    finally:
        logger.removeHandler(caplog.handler)


def test_torch_is_quiet_in_one_thread_alone(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    try:
        with _torch.quiet():
            logger.error("here")
            other = threading.Thread(target=logger.error, args=("there",))
            other.start()
            other.join()
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records] == ["there"]


def test_the_limit_that_the_engine_names_is_that_of_the_op() -> None:
    def one_op(x: Tensor) -> Tensor:
        return x.exp().sum()

    x = torch.randn(1000, requires_grad=True)
    with pytest.raises(fxrecals.InfeasibleLimitError, match=r"alive when aten\.exp") as caught:
        fxrecals.recals("1kB")(one_op, x)
    assert caught.value.so_far
    assert f"at least limit={caught.value.floor_bytes}, if no later op needs more" in str(
        caught.value
    )
    relaxed = fxrecals.recals("1kB", on_overflow="exceed")
    with pytest.warns(UserWarning, match="stats.peak is a limit that works"):
        relaxed(one_op, x).backward()
    fxrecals.recals(relaxed.stats.peak)(one_op, x).backward()


def test_an_input_that_is_written_to_too_early_is_named_by_its_shape() -> None:
    x, weight = torch.randn(64, 32), torch.ones(64, 32, requires_grad=True)

    def twenty_of_the_input() -> Tensor:
        found = weight.sum()
        for shift in range(20):
            found = found + (weight * (x + shift)).sum()
        return found

    engine = fxrecals.recals("64kB")
    loss = engine(twenty_of_the_input)
    assert engine.stats.evictions > 0
    x.mul_(2)
    with pytest.raises(RuntimeError, match=r"shape \(64, 32\) was written to in place after the"):
        loss.backward()


# --- warnings of the backend ----------------------------------------------------------------------


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = stack(), stack()

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.other(x)


def test_a_first_step_over_the_limit_says_by_how_much_and_what_comes_next() -> None:
    limit = fxrecals.plan(Broken(), X, "100%").floor_bytes
    compiled = torch.compile(Broken(), backend=fxrecals.backend(limit, inner="eager"))
    with pytest.warns(UserWarning, match="is planned at its floor") as caught:
        compiled(X).sum().backward()
    assert "; the next step is planned as a whole" in str(caught[0].message)


def test_gradients_that_an_earlier_graph_was_planned_without_are_warned_of() -> None:
    backend = fxrecals.backend("100kB", inner="eager", peak="step")
    with pytest.warns(
        UserWarning, match=r"makes 12\.7 kB of gradients, which the graphs before it"
    ):
        torch.compile(Broken(), backend=backend)(X).sum().backward()
