"""Training steps that the tests of `fxrecals doctor` examine; their lines are in its output."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(512, 64)
losses = []


def leaking():
    optimizer.zero_grad()
    out = model(x)
    loss = out.square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    losses.append(loss)


def healthy():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
