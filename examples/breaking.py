"""A model whose Python depends on values: its graphs share one limit under `torch.compile`.

python examples/breaking.py

`rewrite` cannot trace such a model ahead of time. The backend plans each graph when the step
reaches it, and a step that it has seen as a whole.
"""

from typing import Any

import torch
from torch import Tensor, nn

import fxrecals


class Choosing(nn.Module):
    """Takes one of two ways, by a value that only the step itself knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep, self.shallow = (self.blocks(n) for n in (2, 4, 1))

    @staticmethod
    def blocks(count: int) -> nn.Module:
        """Blocks with dropout."""
        made = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(count))
        return nn.Sequential(*made)

    def forward(self, x: Tensor) -> Tensor:
        """Deep where the sum is positive."""
        x = self.first(x)
        return self.deep(x) if x.sum() > 0 else self.shallow(x)


torch.manual_seed(0)
model, x = Choosing(), torch.randn(512, 64)
backend = fxrecals.backend(limit="1.5MB", inner="eager")
compiled = torch.compile(model, backend=backend)


def step(module: Any, batch: Tensor) -> list[Tensor]:
    """The loss and the gradients, from the same seed."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    loss = module(batch).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


batches = [x, -x, x, -x]
for number, batch in enumerate(batches):
    same = all(map(torch.equal, step(model, batch), step(compiled, batch)))
    print(f"step {number}: same bits: {same}, {len(backend.plans)} plans so far")
