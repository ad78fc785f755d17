"""Lightning: a LightningModule trains under a byte limit, with the planned and the measured peak.

    python examples/lightning_module.py

The network is rewritten when fitting starts, on the device that Lightning chose. It keeps its class
and its parameters, so that optimizers and checkpoints see no difference.
"""

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxrecals


class Regression(lightning.LightningModule):
    """A stack of blocks that learns to give its input back."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6))
        self.network = nn.Sequential(*blocks)

    def on_fit_start(self) -> None:
        """The network is on its device, and in training mode."""
        example = torch.randn(256, 64, device=self.device)
        self.network = fxrecals.rewrite(self.network, example, limit="60%")
        self.watch = fxrecals.monitor(self.network)

    def on_train_batch_start(self, *_: Any) -> None:
        """The forward comes next."""
        self.watch.start()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Mean square error."""
        return nn.functional.mse_loss(self.network(batch[0]), batch[0])

    def on_before_optimizer_step(self, _: Any) -> None:
        """The backward has run."""
        self.watch.stop()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The parameters are those of the network, rewritten or not."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
model, data = Regression(), DataLoader(TensorDataset(torch.randn(1024, 64)), batch_size=256)
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, barebones=True)
trainer.fit(model, data)
print(model.watch)
steps = model.watch.steps
print("measured within the plan:", all(s.measured_bytes <= s.planned_bytes for s in steps))
