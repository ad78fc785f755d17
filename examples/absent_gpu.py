"""Plans for a GPU that is not there, of a model that is not there either: shapes are enough.

python examples/absent_gpu.py

The model is on `meta`, where parameters take no memory; times are by the GPU's data sheet. What
ops allocate for themselves on the GPU is not known then, and counts as nothing: leave some room.
"""

import torch
from torch import nn

import fxrecals
from fxrecals.cost import GPUS, Roofline

WIDTH, LAYERS, TOKENS = 4096, 3, 2048


def make(batch: int = 4) -> tuple[nn.Module, torch.Tensor]:
    """Layers of a transformer, and what they are called with."""
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=32, dim_feedforward=4 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS), torch.empty(batch, TOKENS, WIDTH)


with torch.device("meta"):
    model, x = make()
for name in ("A100", "H100"):
    options = {"device": "cuda", "cost": Roofline(GPUS[name])}
    plan = fxrecals.plan(model, x, limit="12GB", **options)
    step = 1e3 * (plan.baseline_seconds + plan.extra_seconds)
    print(f"{name}: {step:.1f} ms a step; {str(plan).splitlines()[0]}")

found = fxrecals.fit(make, "40GB", device="cuda", cost=Roofline(GPUS["H100"]))
print(found)
