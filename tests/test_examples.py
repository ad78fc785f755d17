"""The examples do what they say."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "examples/train_gpt2.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_gpt2_trains_under_the_limit_with_the_same_losses() -> None:
    done = _run("--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measured peak within the limit: yes" in done.stdout
    assert "losses equal to the bit:        yes" in done.stdout


@pytest.mark.slow
def test_a_limit_under_the_floor_is_refused_before_training() -> None:
    done = _run("--quick", "--limit", "1MB")
    assert done.returncode != 0
    assert "the smallest limit that works is" in done.stderr
    assert "plain loss" not in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch without gloo"
)
@pytest.mark.parametrize("example", ["ddp", "fsdp2"])
def test_two_processes_train_with_the_same_losses_under_one_plan(example: str) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [sys.executable, *launch, "--nproc-per-node=2", f"examples/{example}.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses and gradients equal to the bit: yes" in done.stdout
    assert "one plan on all ranks: yes" in done.stdout


WITHIN = "measured within the plan: True"
SAME = "same bits: True"

RECIPES = {
    "absent_gpu": ((), ["H100: ", "is the largest that trains under 40.0 GB"]),
    "accelerate_loop": (("accelerate",), [WITHIN]),
    "breaking": ((), [f"step 3: {SAME}"]),
    "data_dependent": ((), ["gradients equal to the bit: yes"]),
    "diffusers_unet": (("diffusers",), [WITHIN]),
    "gradient_accumulation": ((), [SAME]),
    "look_first": ((), ["graph kept: ", "evaluation builds graphs: ", "no fault found"]),
    "hf_trainer": (("transformers", "accelerate"), ["step 3: planned", WITHIN]),
    "lightning_module": (("lightning",), [WITHIN]),
    "mixed_precision": ((), [SAME]),
    "peft_lora": (("transformers", "peft"), [SAME, WITHIN]),
}
"""By name: the packages that it needs, and what it prints if it works."""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_does_what_it_says(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages, expected = RECIPES[name]
    for package in packages:
        pytest.importorskip(package)
    torch._dynamo.reset()
    # Run here rather than as a process: to import torch again takes longer than most recipes.
    path = ROOT / "examples" / f"{name}.py"
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)  # Dynamo looks it up
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # a library's advice is no fault of the recipe
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    printed = capsys.readouterr().out
    assert [words for words in expected if words not in printed] == [], printed


@pytest.mark.parametrize("name", [*RECIPES, "ddp", "fsdp2"])
def test_a_recipe_is_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 60


def test_every_example_is_tested() -> None:
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names == {*RECIPES, "ddp", "fsdp2", "train_gpt2"}
