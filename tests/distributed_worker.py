"""What `test_distributed` runs in two processes: each case beside the same step without fxrecals.

    torchrun --nproc-per-node 2 tests/distributed_worker.py FOLDER [CASE ...]

Writes what both ranks found to ``FOLDER/CASE.json``. Each rank has a cache of its own, and
measures other figures of its device than the other rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fxrecals
from benchmarks.measure import step_memory
from fxrecals import cost
from fxrecals.ir import Trait
from fxrecals.plans import Plan

STEPS, BATCH, WIDTH = 3, 64, 160
BUCKET_MB = 1
"""DDP's first bucket is not smaller: with three blocks of 0.8 MB there are three buckets."""


# --- models -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(torch.tanh(self.widen(self.norm(x)))))


class Blocks(nn.Module):
    def __init__(self, depth: int, dropout: float = 0.0):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(depth)))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).square().mean()


class Normed(Blocks):
    """With running statistics, which DDP broadcasts before each step."""

    def __init__(self, depth: int, dropout: float):
        super().__init__(depth, dropout)
        self.head = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8))


class Gathered(nn.Module):
    """Gathers its weight from shards, and sums over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shard = nn.Parameter(torch.randn(WIDTH // 2, WIDTH) / 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        weight = functional.all_gather_tensor_autograd(self.shard, 0, everyone())
        h = torch.tanh(h @ weight).sin().cos()
        total = functional.all_reduce(h.detach(), "sum", everyone())
        return torch.tanh(h + total).sin().square().mean()


def everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def blocks() -> Blocks:
    torch.manual_seed(0)
    return Blocks(2)


def normed() -> Normed:
    torch.manual_seed(0)
    model = Normed(3, 0.1)
    torch.manual_seed(10 + dist.get_rank())  # other dropout on each rank
    return model


def gathered() -> Gathered:
    torch.manual_seed(0)
    return Gathered()


def batch(step: int = 0) -> Tensor:
    seed = 100 * step + dist.get_rank()
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))


# --- ways to distribute them --------------------------------------------------------------------


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)


def sharded(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def halved(model: Any) -> Any:
    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def parallel(model: Blocks) -> Blocks:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})
    return model


# --- cases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A model that trains under a limit.

    Attributes:
        call: what is called.
        model: what has the parameters.
        plans: what was planned, so far.
    """

    call: Callable[[Tensor], Tensor]
    model: nn.Module
    plans: Callable[[], tuple[Plan, ...]]


@dataclass(frozen=True)
class Case:
    """One way, and the same without fxrecals."""

    plain: Callable[[], nn.Module]
    way: Callable[[], Way]


def compiled(
    make: Callable[[], Any], limit: str, wrap: Callable[[Any], Any] = lambda model: model
) -> Callable[[], Way]:
    """`make` compiled, and `wrap` around it."""

    def way() -> Way:
        backend = fxrecals.backend(limit, inner="eager")
        model = wrap(torch.compile(make(), backend=backend, dynamic=False))
        return Way(model, model, lambda: backend.plans)

    return way


def compiled_inside(
    make: Callable[[], Any], limit: str, wrap: Callable[[Any], Any]
) -> Callable[[], Way]:
    """The blocks compiled in place, and `wrap` around the model."""

    def way() -> Way:
        backend, model = fxrecals.backend(limit, inner="eager"), make()
        for block in model.blocks:
            block.compile(backend=backend, dynamic=False)
        model = wrap(model)
        return Way(model, model, lambda: backend.plans)

    return way


def rewritten(
    make: Callable[[], Any], limit: str, wrap: Callable[[Any], Any] = lambda model: model
) -> Callable[[], Way]:
    """`make` rewritten, and `wrap` around it."""

    def way() -> Way:
        model = make()
        state = torch.get_rng_state()
        plan = fxrecals.plan(model, batch(), limit)
        small = wrap(fxrecals.rewrite(model, batch(), plan))
        torch.set_rng_state(state)
        return Way(small, small, lambda: (plan,))

    return way


LIMIT, SHARDED, HALVED, GATHERED, PARALLEL = "600kB", "700kB", "600kB", "330kB", "600kB"
CUT = "790kB"
"""What the parts need into which Dynamo cuts a graph for DDP's buckets."""


CASES = {
    "compile_of_ddp": Case(lambda: ddp(normed()), compiled(lambda: ddp(normed()), CUT)),
    "compile_of_ddp_under_the_floor": Case(
        lambda: ddp(blocks()), compiled(lambda: ddp(blocks()), "100kB")
    ),
    "ddp_of_compile": Case(lambda: ddp(normed()), compiled(normed, CUT, ddp)),
    "ddp_of_rewrite": Case(lambda: ddp(normed()), rewritten(normed, LIMIT, ddp)),
    "rewrite_of_ddp": Case(lambda: ddp(normed()), rewritten(lambda: ddp(normed()), LIMIT)),
    "compile_of_fsdp": Case(
        lambda: sharded(blocks()), compiled(lambda: sharded(blocks()), SHARDED)
    ),
    "fsdp_of_compiled_blocks": Case(
        lambda: halved(blocks()), compiled_inside(blocks, HALVED, halved)
    ),
    "fsdp_of_rewrite": Case(lambda: sharded(blocks()), rewritten(blocks, SHARDED, sharded)),
    "rewrite_of_fsdp": Case(
        lambda: sharded(blocks()), rewritten(lambda: sharded(blocks()), SHARDED)
    ),
    "compile_of_collectives": Case(gathered, compiled(gathered, GATHERED)),
    "rewrite_of_collectives": Case(gathered, rewritten(gathered, GATHERED)),
    "compile_of_tensor_parallel": Case(
        lambda: parallel(blocks()), compiled(lambda: parallel(blocks()), PARALLEL)
    ),
    "rewrite_of_tensor_parallel": Case(
        lambda: parallel(blocks()), rewritten(lambda: parallel(blocks()), PARALLEL)
    ),
}


# --- what is found ------------------------------------------------------------------------------


@dataclass
class Found:
    """What one rank found in one case; its fields are empty where an error came.

    Attributes:
        error: type and text of the error, "" for none.
        same_bits: losses, gradients, buffers and generator state of all steps, as without fxrecals.
        hooks: how often the hooks of parameters ran, each number once.
        plans: each as JSON.
        runs_again: how many runs of the plans are second runs.
        collectives: how many collectives the plans have.
        collectives_again: how many of them run again.
        limit_bytes: of the last plan.
        activation_bytes: measured peak of a step; 0 for parameters without a storage.
        warnings: what fxrecals warned of.
    """

    error: str = ""
    same_bits: bool = False
    hooks: list[int] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    runs_again: int = 0
    collectives: int = 0
    collectives_again: int = 0
    limit_bytes: int = 0
    activation_bytes: int = 0
    warnings: list[str] = field(default_factory=list)


def find(case: Case) -> Found:
    torch._dynamo.reset()
    plain = case.plain()
    expected, _ = train(plain, plain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            way = case.way()
            seen, hooks = train(way.call, way.model)
        except Exception as error:
            return Found(error=f"{type(error).__name__}: {error}")
    plans = [plan for plan in way.plans() if isinstance(plan, fxrecals.Plan)]
    first = {id(plan): set[str]() for plan in plans}
    again = [
        plan.graph.op(name)
        for plan in plans
        for name in plan.schedule.runs
        if name in first[id(plan)] or first[id(plan)].add(name)
    ]
    ops = [op for plan in plans for op in plan.graph.ops]
    return Found(
        same_bits=len(expected) == len(seen) and all(map(torch.equal, expected, seen)),
        hooks=sorted(set(hooks.values())),
        plans=[plan.to_json() for plan in plans],
        runs_again=len(again),
        collectives=sum(Trait.COLLECTIVE in op.traits for op in ops),
        collectives_again=sum(Trait.COLLECTIVE in op.traits for op in again),
        limit_bytes=plans[-1].limit_bytes or 0,
        activation_bytes=peak(way),
        warnings=sorted({str(w.message) for w in caught if "fxrecals" in str(w.message)}),
    )


def train(
    call: Callable[[Tensor], Tensor], model: nn.Module
) -> tuple[list[Tensor], dict[str, int]]:
    """All that steps leave behind, and how often the hook of each parameter ran."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = dict.fromkeys((name for name, _ in model.named_parameters()), 0)

    def count(name: str) -> Callable[[Tensor], None]:
        return lambda parameter: counts.update({name: counts[name] + 1})

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(count(name))
    found: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = call(batch(step))
        loss.backward()
        gradients = [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]
        found += [loss.detach(), *gradients]
        optimizer.step()
    return [*found, *model.buffers(), torch.get_rng_state()], counts


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def peak(way: Way) -> int:
    if any(hasattr(parameter, "full_tensor") for parameter in way.model.parameters()):
        return 0
    x = batch()

    def step() -> None:
        way.model.zero_grad()
        way.call(x).backward()

    return step_memory(step, way.model).activations


# --- two processes ------------------------------------------------------------------------------


def gather(x: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, x)
    return found


def figures(device: torch.device) -> cost.Figures:
    """In place of measured ones: the second rank is slow, and most of all in products."""
    slower = 1 + 30 * dist.get_rank()
    like = cost.GPUS["A100"]
    return replace(like, launch_seconds=1e-6 / slower, matmul=like.matmul / slower**2)


def agreement() -> dict[str, bool]:
    """Whether figures differ where each rank has its own, and whether ranks agree."""
    here = torch.device("cpu")
    own, used = gather(figures(here)), gather(cost.device_figures(here))
    measured = gather(fxrecals.plan(gathered(), batch(), GATHERED, cost="measured").to_json())
    return {
        "own": own[0] == own[1],
        "used": used[0] == used[1],
        "measured": measured[0] == measured[1],
    }


@contextlib.contextmanager
def two_processes() -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(folder: Path, names: list[str]) -> None:
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache{os.environ['RANK']}")
    cost.measure = figures
    warnings.simplefilter("ignore", FutureWarning)
    with two_processes():
        for name in names:
            found = agreement() if name == "agreement" else gather(asdict(find(CASES[name])))
            if dist.get_rank() == 0:
                (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ["agreement", *CASES])
