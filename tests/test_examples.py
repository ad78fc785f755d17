"""The examples do what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
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
def test_two_processes_train_with_the_same_losses_under_one_plan() -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [sys.executable, *launch, "--nproc-per-node=2", "examples/ddp.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses and gradients equal to the bit: yes" in done.stdout
    assert "one plan on all ranks: yes" in done.stdout
