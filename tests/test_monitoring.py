"""Plans are logged, and a monitor tells when a step does not keep to its plan."""

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fxrecals
from fxrecals import OptionError
from fxrecals.monitoring import Monitor
from tests.cli_models import blocks

ROOT = Path(__file__).parent.parent


def train(watch: Monitor, model: nn.Module, x: torch.Tensor, steps: int = 3) -> None:
    for _ in range(steps):
        with watch:
            model(x).square().mean().backward()


class Repeated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(50, 1).exp()


def test_steps_of_a_rewritten_model_keep_to_their_plan() -> None:
    model, x = blocks()
    plan = fxrecals.plan(model, x, "40%")
    small = fxrecals.rewrite(model, x, plan)
    watch = fxrecals.monitor(small)
    train(watch, small, x)
    assert [each.number for each in watch.steps] == [1, 2]
    for each in watch.steps:
        assert each.planned_bytes == plan.step_peak_bytes
        assert 0.7 * each.planned_bytes < each.measured_bytes <= each.planned_bytes
    assert "2 of 3 steps measured" in repr(watch)


def test_a_compiled_model_is_watched_by_its_backend() -> None:
    torch._dynamo.reset()
    model, x = blocks()
    backend = fxrecals.backend("40%", inner="eager")
    compiled = torch.compile(model, backend=backend)
    watch = fxrecals.monitor(model, backend)
    train(watch, compiled, x)  # type: ignore[arg-type]
    assert len(watch.steps) == 2
    assert all(0 < each.measured_bytes <= each.planned_bytes for each in watch.steps)


def test_a_step_over_its_plan_is_warned_of_once() -> None:
    model, x = blocks()
    small = fxrecals.rewrite(model, x, "40%")
    watch = fxrecals.monitor(small)
    with pytest.warns(UserWarning, match="planned, gradients included: something") as caught:
        train(watch, nn.Sequential(small, Repeated()), x, steps=4)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_plan_for_another_step_is_warned_of() -> None:
    model, x = blocks()
    larger = fxrecals.plan(model, torch.randn(4096, 64), "100%")
    small = fxrecals.rewrite(model, x, "100%")
    watch = fxrecals.monitor(small, larger)
    with pytest.warns(UserWarning, match="the plan is for another step"):
        train(watch, small, x)


def test_one_step_of_so_many_is_measured_after_the_first() -> None:
    model, x = blocks()
    small = fxrecals.rewrite(model, x, "40%")
    watch = fxrecals.monitor(small, every=2, warmup=2)
    train(watch, small, x, steps=6)
    assert [each.number for each in watch.steps] == [2, 4]


def test_a_step_that_fails_is_left_out_and_the_next_one_measured() -> None:
    model, x = blocks()
    small = fxrecals.rewrite(model, x, "40%")
    watch = fxrecals.monitor(small, warmup=0)
    with pytest.raises(RuntimeError), watch:
        small(torch.randn(8, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first step plans, and so measures single ops
        watch.start()
        watch.start()  # one that was never stopped
        small(x).mean().backward()
        watch.stop()
    assert len(watch.steps) == 1


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(OptionError, match="planned=None"):
        fxrecals.monitor(nn.Linear(2, 2))
    with pytest.raises(OptionError, match="every=0"):
        fxrecals.monitor(nn.Linear(2, 2), every=0)
    with pytest.raises(OptionError, match="model='Linear on meta'"):
        fxrecals.monitor(nn.Linear(2, 2, device="meta"))


def test_a_copy_of_a_rewritten_model_has_no_plan() -> None:
    import copy

    model, x = blocks()
    small = fxrecals.rewrite(model, x, "40%")
    with pytest.raises(OptionError, match="planned=None"):
        fxrecals.monitor(copy.deepcopy(small))


def test_a_plan_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model, x = blocks()
    with caplog.at_level(logging.INFO, logger="fxrecals"):
        plan = fxrecals.plan(model, x, "40%")
    (line,) = [r.getMessage() for r in caplog.records if r.name == "fxrecals"]
    assert line.startswith("planned Sequential: limit 2.46 MB, peak 2.42 MB, +")
    assert plan.peak_bytes == 2_424_000 or "2.42" in line
    assert logging.getLogger("fxrecals").handlers == []


def test_the_graphs_of_a_backend_are_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model, x = blocks()
    with caplog.at_level(logging.INFO, logger="fxrecals"):
        torch.compile(model, backend=fxrecals.backend("40%", inner="eager"))(x).mean().backward()
    assert "planned a graph: limit 2.46 MB" in caplog.text


def test_the_plan_is_an_artifact_of_torch_s_trace(tmp_path: Path) -> None:
    program = (
        "import fxrecals; from tests.cli_models import blocks; "
        "print(fxrecals.plan(*blocks(), '40%').to_json())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_TRACE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (trace,) = tmp_path.glob("*.log")
    lines = trace.read_text().splitlines()
    (at,) = (i for i, line in enumerate(lines) if '"fxrecals_plan"' in line)
    assert json.loads(lines[at + 1].strip()) == json.loads(done.stdout)
