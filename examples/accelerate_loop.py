"""Accelerate: the model is rewritten before `prepare`, and trains under the limit behind it.

python examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxrecals

torch.manual_seed(0)
blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6))
model = nn.Sequential(*blocks)
data = DataLoader(TensorDataset(torch.randn(1024, 64)), batch_size=256)

plan = fxrecals.plan(model, torch.randn(256, 64), limit="60%")
print(str(plan).splitlines()[0])
small = fxrecals.rewrite(model, torch.randn(256, 64), plan)

accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
small, optimizer, data = accelerator.prepare(small, optimizer, data)
watch = fxrecals.monitor(small, plan)
for epoch in range(2):
    for (batch,) in data:
        with watch:
            loss = small(batch).square().mean()
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
print(watch)
print("measured within the plan:", all(s.measured_bytes <= s.planned_bytes for s in watch.steps))
