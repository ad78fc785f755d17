"""An exported folder trains without fxrecals, within the plan, and only what it was planned for."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxrecals
from fxrecals import FxrecalsError, runtime
from tests.cli_models import Block, blocks, by_position_and_name
from tests.helpers import peak_bytes

ALONE = """
import sys
sys.modules["fxrecals"] = None  # importing it is an error
import torch
folder, model, args = torch.load(sys.argv[1], weights_only=False)
sys.path.insert(0, folder)
from runtime import attach
step = attach(model)
torch.manual_seed(0)
out = step(*args)
out.square().mean().backward()
torch.save([out.detach(), *(p.grad for p in model.parameters()), *model.buffers()], sys.argv[1])
"""


def normed() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)]
    return nn.Sequential(*layers)


class Named(nn.Module):
    """Returns more than a tensor, and is called by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.block = Block(8)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        y = self.block(x, scale)
        return {"rest": (y.sin(), None), "first": y, "places": y.argmax(-1)}


def exported(model: nn.Module, example: Any, folder: Path, limit: str = "100%") -> fxrecals.Plan:
    plan = fxrecals.plan(model, example, limit)
    plan.export(folder)
    return plan


def results(call: Callable[..., Any], model: nn.Module, *args: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    out = call(*args)
    out.square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [out.detach(), *grads, *(x.clone() for x in model.buffers())]


@pytest.mark.parametrize("make", [normed, lambda: blocks()[0]])
def test_two_steps_have_eagers_bits(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    model = make()
    x = torch.randn(32, 6 if make is normed else 64)
    exported(model, x, tmp_path)
    step = fxrecals.load(tmp_path, model)
    for _ in range(2):
        pairs = zip(results(plain, plain, x), results(step, model, x), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_it_trains_where_fxrecals_is_not(tmp_path: Path) -> None:
    model, x = normed(), torch.randn(32, 6)
    exported(model, x, tmp_path / "out")
    torch.save((str(tmp_path / "out"), model, (x,)), tmp_path / "given.pt")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "given.pt")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "given.pt")
    assert all(map(torch.equal, found, results(model, model, x)))


def test_its_peak_is_within_the_plan(tmp_path: Path) -> None:
    model, x = blocks()
    plan = exported(model, x, tmp_path, "40%")
    step = fxrecals.load(tmp_path, model)
    step(x).square().mean().backward()
    assert peak_bytes(lambda: step(x).square().mean().backward(), model) <= plan.peak_bytes


def test_results_of_several_tensors_and_calls_by_name(tmp_path: Path) -> None:
    model, x = Named(), torch.randn(4, 8)
    exported(model, {"x": x, "scale": 2.0}, tmp_path, "100%")
    step = fxrecals.load(tmp_path, model)
    torch.manual_seed(0)
    expected = model(x=x, scale=2.0)
    torch.manual_seed(0)
    found = step(x=x, scale=2.0)
    assert list(found) == list(expected)
    assert found["rest"][1] is None
    assert torch.equal(found["rest"][0], expected["rest"][0])
    assert torch.equal(found["places"], expected["places"])
    assert not found["places"].requires_grad
    with pytest.raises(ValueError, match=r"argument 1 is 3\.0, not 2\.0"):
        step(x=x, scale=3.0)


def test_the_plan_comes_back(tmp_path: Path) -> None:
    plan = exported(*blocks(), tmp_path)
    assert fxrecals.load(tmp_path) == plan


WRONG = {
    "a parameter is missing": (lambda: normed()[:4], "parameter 4.weight is absent"),
    "another size": (
        lambda: nn.Sequential(nn.Linear(6, 8), *list(normed())[1:]),
        r"parameter 0.weight is float32\[8, 6\], not float32\[16, 6\]",
    ),
    "another type": (lambda: normed().double(), "is float64"),
    "a parameter more": (
        lambda: nn.Sequential(*normed(), nn.Linear(4, 4)),
        r"parameter 5.weight is float32\[4, 4\], not absent",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_another_model_is_refused_with_the_difference(case: str, tmp_path: Path) -> None:
    make, words = WRONG[case]
    exported(normed(), torch.randn(32, 6), tmp_path)
    with pytest.raises(FxrecalsError, match=words):
        fxrecals.load(tmp_path, make())


def test_another_mode_or_size_of_a_call_is_refused(tmp_path: Path) -> None:
    model = normed()
    exported(model, torch.randn(32, 6), tmp_path)
    step = fxrecals.load(tmp_path, model)
    with pytest.raises(ValueError, match=r"argument 0 is float32\[8, 6\], not float32\[32, 6\]"):
        step(torch.randn(8, 6))
    model.eval()
    with pytest.raises(ValueError, match="training is False, not True"):
        step(torch.randn(32, 6))


def test_a_second_backward_is_refused(tmp_path: Path) -> None:
    model, x = normed(), torch.randn(32, 6)
    exported(model, x, tmp_path)
    out = fxrecals.load(tmp_path, model)(x).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call the forward again"):
        out.backward()


def test_a_step_of_several_graphs_says_that_it_cannot(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.up(x).tanh()
            torch._dynamo.graph_break()
            return self.down(x)

    model = Broken()
    exported(model, torch.randn(4, 8), tmp_path, "100%")
    with pytest.raises(FxrecalsError, match="2 graphs, with Python between them"):
        fxrecals.load(tmp_path, model)


def test_a_folder_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FxrecalsError, match=r"no plan\.json"):
        fxrecals.load(tmp_path)
    with pytest.raises(FxrecalsError, match="is missing"):
        fxrecals.load(tmp_path, normed())


def test_the_graph_for_graphviz_has_every_op_and_marks_what_runs_again(tmp_path: Path) -> None:
    plan = exported(*blocks(), tmp_path, "40%")
    text = (tmp_path / "graph.dot").read_text()
    assert text.startswith("digraph plan {")
    assert text.count("label=") == sum(not op.is_view for op in plan.graph.ops)
    again = {name for region in plan.regions for name in region.ops}
    assert text.count("#fdae6b") == len(again)


def test_the_runtime_is_short_and_stands_alone() -> None:
    text = Path(runtime.__file__).read_text()
    assert len(text.splitlines()) < 100
    assert "import fxrecals" not in text
    assert "from fxrecals" not in text


def test_arguments_by_position_and_name_are_planned_by_name(tmp_path: Path) -> None:
    model, args, kwargs = by_position_and_name()
    exported(model, {"x": args[0], **kwargs}, tmp_path, "100%")
    assert fxrecals.load(tmp_path, model)(x=args[0], **kwargs).shape == (4, 8)
