"""A diffusion U-Net of diffusers under a byte limit: predict the noise that was added.

python examples/diffusers_unet.py
"""

import torch
from diffusers import DDPMScheduler, UNet2DModel  # type: ignore[import-not-found]

import fxrecals

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=16,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(16, 32),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
).train()
scheduler = DDPMScheduler(num_train_timesteps=100)

example = (torch.randn(4, 3, 16, 16), torch.randint(100, (4,)))
plan = fxrecals.plan(model, example, limit="50%")
print(str(plan).splitlines()[0])
small = fxrecals.rewrite(model, example, plan)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
watch = fxrecals.monitor(small)
for step in range(3):
    images, noise = torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16)
    when = torch.randint(100, (4,))
    noisy = scheduler.add_noise(images, noise, when)  # type: ignore[arg-type]
    optimizer.zero_grad()
    with watch:
        loss = torch.nn.functional.mse_loss(small(noisy, when).sample, noise)
        loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
print(watch)
print("measured within the plan:", all(s.measured_bytes <= s.planned_bytes for s in watch.steps))
