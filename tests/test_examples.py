"""The examples do what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

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
