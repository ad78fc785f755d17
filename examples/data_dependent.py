"""A model whose depth depends on its data, under a byte limit by the runtime engine.

Prints the limit, the peaks and whether the gradients are those of a plain step.
"""

import copy

import torch
from torch import Tensor, nn

import fxrecals


class Adaptive(nn.Module):
    """Refines its state until it changes little: as many rounds as the data ask for."""

    def __init__(self, width: int, most: int) -> None:
        super().__init__()
        self.most = most
        self.refine = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1))
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        for _ in range(self.most):
            change = self.back(self.refine(x))
            x = x + change
            if change.abs().mean().item() < 0.05:  # no graph can hold this
                break
        return x


def step(model: nn.Module, x: Tensor) -> Tensor:
    """Forward and loss: both go into the engine."""
    return model(x).square().mean()


torch.manual_seed(0)
plain, x = Adaptive(width=64, most=12), torch.randn(512, 64)
small = copy.deepcopy(plain)
saved = fxrecals.recals(None).analyze(step, plain, x).total
recals = fxrecals.recals(saved // 4)

torch.manual_seed(1)
step(plain, x).backward()
torch.manual_seed(1)
recals(step, small, x).backward()

gradients = [[p.grad for p in m.parameters() if p.grad is not None] for m in (plain, small)]
same = all(map(torch.equal, *gradients))
print(f"saved by a plain step   {saved / 1e6:.1f} MB")
print(f"limit                   {saved // 4 / 1e6:.1f} MB")
print(f"peak under the engine   {recals.stats.peak / 1e6:.1f} MB")
print(f"ops run again           {recals.stats.recomputes}")
print(f"gradients equal to the bit: {'yes' if same else 'no'}")
