"""Training in two processes: the same bits as without fxrecals, the same plans on both ranks.

Each case runs in `tests/distributed_worker.py`, under torchrun on gloo. The quick ones share one
run of it; the others share a second, which only `-m slow` starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch without gloo"
)

ROOT = Path(__file__).parent.parent
SECONDS = 240
"""After which a run counts as hung."""

OWN_BYTES = 4096
"""What DDP allocates by itself within a step: it broadcasts running statistics."""

QUICK = (
    "agreement",
    "compile_of_ddp",
    "ddp_of_rewrite",
    "compile_of_fsdp",
    "compile_of_collectives",
)
SLOW = (
    "compile_of_ddp_under_the_floor",
    "ddp_of_compile",
    "rewrite_of_ddp",
    "fsdp_of_compiled_blocks",
    "fsdp_of_rewrite",
    "rewrite_of_fsdp",
    "rewrite_of_collectives",
    "compile_of_tensor_parallel",
    "rewrite_of_tensor_parallel",
)
REFUSED = ("compile_of_ddp_under_the_floor", "rewrite_of_fsdp")
Results = Callable[[str], Any]


def _cases(*without: str) -> list[Any]:
    quick = [name for name in QUICK if name not in (*without, "agreement")]
    slow = [name for name in SLOW if name not in (*without, *REFUSED)]
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


def _run(folder: Path, names: tuple[str, ...]) -> None:
    """Runs cases under torchrun, and ends all of its processes if it hangs."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    worker = [str(ROOT / "tests" / "distributed_worker.py"), str(folder), *names]
    process = subprocess.Popen(
        [sys.executable, *launch, "--nproc-per-node=2", *worker],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its workers
        printed, _ = process.communicate(timeout=60)
        pytest.fail(f"the run hangs; it had printed:\n{printed[-4000:]}")
    assert process.returncode == 0, printed[-4000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What both ranks found in a case; runs its group at the first question."""

    @lru_cache
    def group(names: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("ranks")
        _run(folder, names)
        return folder

    def found(name: str) -> Any:
        folder = group(QUICK if name in QUICK else SLOW)
        return json.loads((folder / f"{name}.json").read_text())

    return found


def test_ranks_that_measure_other_figures_use_those_of_the_first(results: Results) -> None:
    assert results("agreement") == {"own": False, "used": True, "measured": True}


@pytest.mark.parametrize("name", _cases())
def test_all_steps_have_the_bits_of_the_same_without_fxrecals(results: Results, name: str) -> None:
    assert [rank["error"] for rank in results(name)] == ["", ""]
    assert [rank["same_bits"] for rank in results(name)] == [True, True]


@pytest.mark.parametrize("name", _cases())
def test_the_hook_of_each_parameter_runs_once_a_step(results: Results, name: str) -> None:
    assert [rank["hooks"] for rank in results(name)] == [[3], [3]]


@pytest.mark.parametrize("name", _cases())
def test_both_ranks_have_the_same_plans(results: Results, name: str) -> None:
    one, other = results(name)
    assert one["plans"]
    assert one["plans"] == other["plans"]


# Under FSDP each block is a graph of its own, which leaves little to drop.
@pytest.mark.parametrize("name", _cases("compile_of_fsdp", "fsdp_of_compiled_blocks"))
def test_something_runs_again(results: Results, name: str) -> None:
    assert all(rank["runs_again"] for rank in results(name))


@pytest.mark.parametrize("name", [case for case in _cases() if "collect" in str(case)])
def test_a_collective_never_runs_again(results: Results, name: str) -> None:
    for rank in results(name):
        assert rank["collectives"] > 0
        assert rank["collectives_again"] == 0


@pytest.mark.parametrize(
    "name", ["ddp_of_rewrite", pytest.param("rewrite_of_ddp", marks=pytest.mark.slow)]
)
def test_the_limit_is_held_under_ddp(results: Results, name: str) -> None:
    for rank in results(name):
        assert rank["activation_bytes"] <= rank["limit_bytes"] + OWN_BYTES
        assert rank["warnings"] == []


def test_the_graphs_of_ddp_buckets_hold_one_limit(results: Results) -> None:
    for rank in results("compile_of_ddp"):
        assert rank["activation_bytes"] <= 790_000 + OWN_BYTES


@pytest.mark.slow
def test_a_limit_under_the_floor_of_a_bucket_is_refused_as_such(results: Results) -> None:
    for rank in results("compile_of_ddp_under_the_floor"):
        assert rank["error"].startswith("InfeasibleLimitError: ")


@pytest.mark.slow
def test_rewriting_a_sharded_model_is_refused(results: Results) -> None:
    for rank in results("rewrite_of_fsdp"):
        assert rank["error"].startswith("CaptureError: FSDPBlocks cannot be copied for tracing")
