"""The command line, through `main` and once as a process; what it prints is in `tests/golden`.

Plans are for a GPU that is not there: its figures are given, so every machine prints the same.
"""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fxrecals
from fxrecals.cli import examine, main
from fxrecals.cli.output import Output
from tests import cli_models, cli_steps

ROOT = Path(__file__).parent.parent
BLOCKS = "tests.cli_models:blocks"
GPU = ("--gpu", "H100")

Golden = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def _as_wide_as_the_golden_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize("verb", ["", "plan", "pareto", "explain", "export", "fit", "doctor"])
def test_help(verb: str, golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*verb.split(), "--help"])
    assert stopped.value.code == 0
    golden(f"help-{verb or 'fxrecals'}.txt", capsys.readouterr().out)


OUTPUTS = {
    "plan.txt": ["plan", BLOCKS, "--limit", "40%", *GPU],
    "plan.json": ["plan", BLOCKS, "--limit", "40%", *GPU, "--json"],
    "plan-step.txt": ["plan", BLOCKS, "--limit", "60%", "--peak", "step", *GPU],
    "pareto.txt": ["pareto", BLOCKS, *GPU],
    "pareto.csv": ["pareto", BLOCKS, *GPU, "--csv"],
    "pareto.json": ["pareto", BLOCKS, *GPU, "--json"],
    "explain-tensor.txt": ["explain", BLOCKS, "gelu_1", "--limit", "40%", *GPU],
    "explain-tensor.json": ["explain", BLOCKS, "gelu_1", "--limit", "40%", *GPU, "--json"],
    "explain-module.txt": ["explain", BLOCKS, "1", "--limit", "40%", *GPU],
    "fit.txt": ["fit", BLOCKS, "--limit", "3MB", "--step", "8", *GPU],
    "fit.json": ["fit", BLOCKS, "--limit", "3MB", "--step", "8", *GPU, "--json"],
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_output(name: str, golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(OUTPUTS[name]) == 0
    printed = capsys.readouterr()
    golden(name, printed.out)
    assert printed.err == "", "nobody looks: there is no progress to show"


def test_a_limit_below_the_floor_exits_with_3_and_says_the_floor(
    golden: Golden, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", BLOCKS, "--limit", "1kB", *GPU]
    assert main(command) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    golden("infeasible.txt", printed.err)
    assert main([*command, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert main(["plan", BLOCKS, "--limit", f"{found['floor_bytes']}B", *GPU]) == 0


UNUSABLE = {
    "no colon": (["plan", "tests.cli_models", "--limit", "1GB"], "a module and a function in it"),
    "no module": (["plan", "tests.nowhere:make", "--limit", "1GB"], "no module named"),
    "no attribute": (["plan", "tests.cli_models:make", "--limit", "1GB"], "blocks"),
    "no function": (["plan", "tests.cli_models:NOT_A_FUNCTION", "--limit", "1GB"], "of type int"),
    "no model": (["plan", "tests.cli_models:no_model", "--limit", "1GB"], "it returned Tensor"),
    "an argument is missing": (
        ["plan", "tests.cli_models:needs_an_argument", "--limit", "1GB"],
        "missing a required argument: 'width'",
    ),
    "no unit": (["plan", BLOCKS, "--limit", "6"], "6GB"),
    "no such GPU": (["plan", BLOCKS, "--limit", "1GB", "--gpu", "Z80"], "RTX 4090"),
    "no such name": (["explain", BLOCKS, "gelu_9", "--limit", "40%", *GPU], "'gelu_1'"),
    "no such keyword": (["fit", BLOCKS, "--limit", "1GB", "--vary", "side"], "side"),
    "a share of what varies": (["fit", BLOCKS, "--limit", "40%"], "a share grows with the size"),
    "no sizes": (["fit", BLOCKS, "--limit", "1GB", "--step", "0"], "a whole number from 1 on"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_command_that_cannot_be_used_exits_with_2_and_says_what_can(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, words = UNUSABLE[case]
    assert main(command) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err


@pytest.mark.parametrize("command", [[], ["plan"], ["plan", BLOCKS], ["bake", BLOCKS]])
def test_what_argparse_refuses_exits_with_2(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    assert "usage: fxrecals" in capsys.readouterr().err


def test_a_model_that_cannot_be_planned_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tests.cli_models:frozen", "--limit", "1GB"]) == 1
    assert "requires a gradient" in capsys.readouterr().err


def test_a_package_that_the_module_lacks_is_not_taken_for_a_wrong_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacks_a_package.py").write_text("import a_package_that_is_nowhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_nowhere"):
        main(["plan", "lacks_a_package:make", "--limit", "1GB"])


@pytest.mark.parametrize("name", ["by_position_and_name", "by_name", "needs_values"])
def test_every_way_to_return_an_example_is_understood(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"tests.cli_models:{name}", "--limit", "1GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


def test_the_csv_is_read_as_csv_and_says_what_the_json_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(OUTPUTS["pareto.csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert main(OUTPUTS["pareto.json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert [{key: float(x) for key, x in row.items()} for row in rows] == choices
    assert all(each["bound_seconds"] <= each["extra_seconds"] for each in choices)


def test_the_curve_is_drawn_where_matplotlib_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["pareto", BLOCKS, *GPU, "--plot", str(tmp_path / "curve.svg")]) == 0
    assert "curve.svg" in capsys.readouterr().err
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    assert main(["pareto", BLOCKS, *GPU, "--plot", str(tmp_path / "curve.docx")]) == 1
    assert "cannot be drawn" in capsys.readouterr().err


def test_live_bytes_are_drawn_where_matplotlib_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.svg"
    assert main([*OUTPUTS["plan.txt"], "--plot", str(path)]) == 0
    assert "memory.svg" in capsys.readouterr().err
    assert "<svg" in path.read_text()


@pytest.mark.parametrize("name", ["plan.txt", "pareto.txt"])
def test_the_page_is_written_beside_what_is_printed(
    name: str, tmp_path: Path, golden: Golden, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.html"
    assert main([*OUTPUTS[name], "--html", str(path)]) == 0
    printed = capsys.readouterr()
    golden(name, printed.out)
    assert "plan.html" in printed.err
    assert path.read_text().startswith("<!DOCTYPE html>")


def test_a_page_that_cannot_be_written_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*OUTPUTS["plan.txt"], "--html", str(tmp_path / "none" / "plan.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_export_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", BLOCKS, "--limit", "40%", "--out", str(tmp_path / "out"), "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert {"plan.json", "forward.py", "backward.py"} <= set(found["files"])


def test_doctor_finds_this_machine_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    words = capsys.readouterr().out
    assert torch.__version__ in words
    assert "NO" not in words.split()
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"versions", "devices", "supported", "self_test"}
    assert found["self_test"]["seconds"] < 20


@pytest.mark.parametrize("form", ["txt", "json"])
def test_doctor_examines_a_step(
    form: str, golden: Golden, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--json"] if form == "json" else []
    assert main(["doctor", "tests.cli_steps:leaking", "--steps", "3", *options]) == 1
    shown = capsys.readouterr()
    golden(f"doctor.{form}", shown.out)
    assert shown.err == "fxrecals doctor: tests.cli_steps:leaking has 2 to mend\n"
    cli_steps.losses.clear()


def test_doctor_lets_a_sound_step_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tests.cli_steps:healthy", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["findings"] == []
    assert found["limit"]["peak_bytes"] <= found["limit"]["limit_bytes"]
    assert main(["doctor", "tests.cli_steps:healthy", "--steps", "1"]) == 2


def test_doctor_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rewrite(model: nn.Module, *_: object) -> nn.Module:
        return nn.Sequential(model, nn.Identity(), nn.Softplus())

    monkeypatch.setattr(fxrecals, "rewrite", rewrite)
    assert main(["doctor"]) == 1
    assert "same bits" in capsys.readouterr().err
    assert not examine.self_test()["outputs and gradients have the same bits"]


def test_progress_is_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown, printed = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(sys, "stdout", printed)
    output = Output(as_json=False)
    output.progress("tracing")
    output.better(1e-3, 5e-4, 2.0)
    output.result("a table", {})
    assert printed.getvalue() == "a table\n"
    assert "\n" not in shown.getvalue()
    assert shown.getvalue().endswith("\r")
    assert "+1.00 ms found, at least +500 us" in shown.getvalue()


def test_the_command_as_a_process_finds_modules_where_it_is_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(Path(cli_models.__file__).read_text())
    done = subprocess.run(
        [sys.executable, "-m", "fxrecals", "plan", "train:blocks", "--limit", "40%", *GPU],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    expected = (ROOT / "tests" / "golden" / "plan.txt").read_text()
    assert done.stdout.splitlines()[0] == expected.splitlines()[0]
    assert done.stderr == ""
