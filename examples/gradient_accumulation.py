"""Gradients of several small batches, summed: each batch is a step of its own for the limit.

python examples/gradient_accumulation.py

Gradients that were there before come on top of the limit, as parameters do.
"""

import torch
from torch import Tensor, nn

import fxrecals

PARTS = 4
torch.manual_seed(0)
blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6))
model = nn.Sequential(*blocks)
batch = torch.randn(1024, 64)
parts = batch.chunk(PARTS)

plan = fxrecals.plan(model, parts[0], limit="60%")
whole = fxrecals.plan(model, batch, limit="100%")
print(f"the whole batch at once: {whole.peak_bytes / 1e6:.1f} MB; a part: ", end="")
print(str(plan).splitlines()[0])
small = fxrecals.rewrite(model, parts[0], plan)


def accumulated(module: nn.Module) -> list[Tensor]:
    """The gradients of all parts, from the same seed."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    for part in parts:
        loss = module(part).square().mean() / PARTS
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


print("same bits:", all(map(torch.equal, accumulated(model), accumulated(small))))
