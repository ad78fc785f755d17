"""Autocast to bfloat16 under a byte limit: put autocast inside the model, and plan that.

python examples/mixed_precision.py

What is planned is then what runs, and activations in bfloat16 count with two bytes. With autocast
around the call instead, the plan is made of the same ops, and rounds as PyTorch's tracing does.
"""

import torch
from torch import Tensor, nn

import fxrecals


class Mixed(nn.Module):
    """Runs a model under autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """In bfloat16 where autocast says so; the result in float32."""
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.model(x).float()


torch.manual_seed(0)
blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(6))
plain = nn.Sequential(*blocks)
model, x = Mixed(plain), torch.randn(512, 64)

single = fxrecals.plan(plain, x, limit="100%")
plan = fxrecals.plan(model, x, limit="50%")
print(f"float32 without recompute: {single.peak_bytes / 1e6:.2f} MB; in bfloat16: ", end="")
print(str(plan).splitlines()[0])


def step(module: nn.Module) -> list[Tensor]:
    """The loss and the gradients."""
    model.zero_grad(set_to_none=True)
    loss = module(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


small = fxrecals.rewrite(model, x, plan)
print("same bits:", all(map(torch.equal, step(model), step(small))))
