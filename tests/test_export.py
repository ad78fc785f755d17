"""The exported forward and backward run without fxrecals and give eager's bits."""

import ast
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxrecals import export
from fxrecals.capture import Captured, capture, step
from fxrecals.cost import Free
from fxrecals.errors import FxrecalsError
from fxrecals.ir import Graph
from fxrecals.plans import Plan
from fxrecals.schedule import Schedule
from tests.helpers import just_in_time

ALONE = """
import sys
sys.modules["fxrecals"] = None  # importing it is an error
import runpy, torch
folder = sys.argv[1]
given = torch.load(folder + "/given.pt")
forward = runpy.run_path(folder + "/forward.py")["forward"]
backward = runpy.run_path(folder + "/backward.py")["backward"]
torch.manual_seed(0)
made = forward(*given["inputs"])
outputs, saved = made[: len(given["tangents"])], made[len(given["tangents"]) :]
gradients = backward(*saved, *given["tangents"])
found = {"outputs": outputs, "gradients": gradients, "generator": torch.get_rng_state()}
torch.save(found, folder + "/found.pt")
"""
"""A process that has torch and the exported files, and nothing of ours."""


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.3)
    )


class Normed(nn.Module):
    """Updates buffers, and holds a constant that the trace meets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)
        self.weights: Tensor
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.up(x))) * self.weights * torch.tensor([0.5, 1.0, 1.0, 2.0])


class Block(nn.Module):
    """Breaks the graph: where it stands twice in a model, its graph runs twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.linear(x).tanh()


def plan_of(captured: Captured, scheduler: Callable[[Graph], Schedule]) -> Plan:
    graph = step(captured, Free())
    return Plan(graph, scheduler(graph), None, floor_bytes=0)


def exported(
    model: nn.Module,
    x: Tensor,
    folder: Path,
    scheduler: Callable[[Graph], Schedule] = just_in_time,
) -> Captured:
    captured = capture(model, x)
    export.write(plan_of(captured, scheduler), captured, folder)
    return captured


def inputs_of(captured: Captured, model: nn.Module, x: Tensor) -> list[Tensor]:
    """What the only forward of a model takes, by the numbers that tell its parameters apart."""
    (run,) = captured.runs
    owned = [*model.parameters(), *model.buffers()]
    count = len(captured.joints[0].parameter_inputs) + 1
    return [
        owned[run.parameters[i]].detach().clone() if i in run.parameters else x
        for i in range(count)
    ]


def eager(model: nn.Module, x: Tensor, tangent: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """The output, and the gradients by number of parameter."""
    torch.manual_seed(0)
    out = model(x)
    out.backward(tangent)
    grads = {i: p.grad for i, p in enumerate(model.parameters()) if p.grad is not None}
    return out.detach(), grads


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def function(path: Path) -> Callable[..., Any]:
    return runpy.run_path(str(path))[path.stem.partition("_")[0]]


@pytest.mark.parametrize("scheduler", [just_in_time, Schedule.keeping_everything])
def test_exported_files_give_eagers_bits_in_a_process_without_fxrecals(
    tmp_path: Path, scheduler: Callable[[Graph], Schedule]
) -> None:
    model, x, tangent = mlp(), torch.randn(5, 6), torch.randn(5, 16)
    captured = exported(model, x, tmp_path, scheduler)
    given = {"inputs": inputs_of(captured, model, x), "tangents": [tangent]}
    torch.save(given, tmp_path / "given.pt")
    subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], check=True, timeout=300)
    found = torch.load(tmp_path / "found.pt")
    out, grads = eager(model, x, tangent)
    assert torch.equal(found["outputs"][0], out)
    assert torch.equal(found["generator"], torch.get_rng_state())
    numbers = captured.runs[0].parameters
    returned = {numbers[i]: g for i, g in enumerate(found["gradients"]) if i in numbers}
    assert set(returned) == set(grads)
    assert all(torch.equal(returned[i], grads[i]) for i in grads)


def test_exported_forward_updates_buffers_and_reads_constants(tmp_path: Path) -> None:
    model, x, tangent = Normed(), torch.randn(5, 6), torch.randn(5, 4)
    captured = exported(model, x, tmp_path)
    inputs = inputs_of(captured, model, x)
    assert set(torch.load(tmp_path / "constants.pt"))
    made = function(tmp_path / "forward.py")(*inputs)
    gradients = function(tmp_path / "backward.py")(*made[1:], tangent)
    out, grads = eager(model, x, tangent)
    assert torch.equal(made[0], out)
    owned = [*model.parameters(), *model.buffers()]
    for i, number in captured.runs[0].parameters.items():
        assert torch.equal(inputs[i], owned[number]), "parameters stay, statistics are updated"
        assert number not in grads or torch.equal(gradients[i], grads[number])


def test_each_run_of_a_graph_has_files_of_its_own_that_chain(tmp_path: Path) -> None:
    model = nn.Sequential(block := Block(), block, block)
    x, tangent = torch.randn(5, 6), torch.randn(5, 6)
    captured = exported(model, x, tmp_path)
    assert (len(captured.joints), len(captured.runs)) == (2, 3)
    out, grads = eager(model, x, tangent)
    owned = list(model.parameters())
    made: list[Sequence[Tensor]] = []
    for i, run in enumerate(captured.runs):
        forward = function(tmp_path / f"forward_{i}.py")
        places = range(len(forward.__annotations__))
        made.append(
            forward(
                *(
                    made[run.sources[k][0]][run.sources[k][1]]
                    if k in run.sources
                    else owned[run.parameters[k]].detach()
                    if k in run.parameters
                    else x
                    for k in places
                )
            )
        )
    assert torch.equal(made[-1][0], out)
    totals: dict[int, Tensor] = {}
    for i, run in reversed(list(enumerate(captured.runs))):
        count = captured.joints[run.joint].num_fwd_outputs
        gradients = function(tmp_path / f"backward_{i}.py")(*made[i][count:], tangent)
        for k, number in run.parameters.items():
            before = totals.get(number)
            totals[number] = gradients[k] if before is None else before + gradients[k]
        tangent = next((gradients[k] for k in run.sources), tangent)
    assert all(torch.equal(totals[i], grads[i]) for i in grads)
    assert "output 0 of forward_1.py" in (tmp_path / "forward_2.py").read_text()


def test_exported_files_import_torch_alone(tmp_path: Path) -> None:
    exported(mlp(), torch.randn(5, 6), tmp_path)
    for name in ("forward.py", "backward.py"):
        assert set(imported(tmp_path / name)) <= {"torch", "math"}
        assert ast.get_docstring(ast.parse((tmp_path / name).read_text()))


def test_docstrings_say_what_comes_in_and_goes_out(tmp_path: Path) -> None:
    exported(mlp(), torch.randn(5, 6), tmp_path)
    forward, backward = ((tmp_path / f"{n}ward.py").read_text() for n in ("for", "back"))
    assert "float32[16, 6]   parameter or buffer, first read in 0" in forward
    assert "float32[5, 6]    input" in forward
    assert "output 0" in forward
    assert "saved for the backward" in forward
    assert "gradient of output 0" in backward
    assert "gradient of primals_1" in backward


def test_code_says_which_module_runs_again(tmp_path: Path) -> None:
    exported(mlp(), torch.randn(5, 6), tmp_path)
    assert "# [1]\n" in (tmp_path / "forward.py").read_text()
    assert "# [1, again]\n" in (tmp_path / "backward.py").read_text()


def test_no_constants_no_file(tmp_path: Path) -> None:
    exported(mlp(), torch.randn(5, 6), tmp_path)
    assert not (tmp_path / export.CONSTANTS).exists()


def test_plan_of_another_step_is_refused(tmp_path: Path) -> None:
    captured = capture(mlp(), torch.randn(5, 6))
    other = plan_of(capture(Normed(), torch.randn(5, 6)), Schedule.keeping_everything)
    with pytest.raises(FxrecalsError, match="another step"):
        export.write(other, captured, tmp_path)
    assert not list(tmp_path.iterdir())
