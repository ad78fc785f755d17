"""FSDP2 in two processes, plainly and under a byte limit.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Planned and rewritten first, sharded then: FSDP gathers and frees parameters outside the graphs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fxrecals


def make_model() -> nn.Module:
    """Some layers with dropout; the same weights at every call."""
    torch.manual_seed(0)
    layers = [f() for _ in range(6) for f in (lambda: nn.Linear(64, 64), nn.GELU, nn.Dropout)]
    return nn.Sequential(*layers)


def train(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Shards and trains a model; the loss and this rank's part of the gradients at every step."""
    fully_shard(model)
    parameters: list[Any] = list(model.parameters())
    optimizer, found = torch.optim.SGD(parameters, lr=0.1), []
    torch.manual_seed(1 + dist.get_rank())
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.to_local().clone() for p in parameters)]
        optimizer.step()
    return found


def main() -> None:
    """Trains twice and compares."""
    dist.init_process_group("gloo")
    batches = list(torch.randn(dist.get_world_size(), 3, 256, 64)[dist.get_rank()])
    plain = train(make_model(), batches)
    model = make_model()
    plan = fxrecals.plan(model, batches[0], limit="60%")
    small = train(fxrecals.rewrite(model, batches[0], plan), batches)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (all(map(torch.equal, plain, small)), plan.to_json()))
    if dist.get_rank() == 0:
        print(str(plan).splitlines()[0])
        print("losses and gradients equal to the bit:", "yes" if all(r[0] for r in ranks) else "no")
        print("one plan on all ranks:", "yes" if len({r[1] for r in ranks}) == 1 else "no")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
