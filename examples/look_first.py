"""A training loop that leaks, examined before anything is planned.

python examples/look_first.py

The running loss keeps each step's graph, and validation builds graphs. Both are found with their
lines. Of the mended loop the report says that activations are the most of it, and what a limit
would do.
"""

import torch
from torch import nn

import fxrecals

torch.manual_seed(0)
blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6))
model = nn.Sequential(*blocks)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train, held_out = torch.randn(512, 64), torch.randn(256, 64)
running = torch.zeros(())


def update() -> torch.Tensor:
    """Forward, loss, backward, update."""
    optimizer.zero_grad()
    loss = model(train).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def leaking() -> None:
    """Adds up losses with their graphs, and validates without `no_grad`."""
    global running
    running = running + update()
    model.eval()
    print(f"held out: {model(held_out).square().mean().item():.4f}")
    model.train()


def mended() -> None:
    """The same, with two changes."""
    global running
    running = running + update().detach()
    model.eval()
    with torch.no_grad():
        print(f"held out: {model(held_out).square().mean().item():.4f}")
    model.train()


print(fxrecals.doctor(leaking), end="\n\n")
running = torch.zeros(())
print(fxrecals.doctor(mended))
