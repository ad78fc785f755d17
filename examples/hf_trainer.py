"""Hugging Face Trainer under a byte limit, with the planned and the measured peak in its log.

    python examples/hf_trainer.py

The model is compiled in place before the Trainer gets it: `torch_compile_backend` of
TrainingArguments takes only the backends that Accelerate knows by name.
"""

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import fxrecals


class Texts(Dataset):
    """Texts of random words."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(64, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class PeakCallback(TrainerCallback):
    """Logs the planned and the measured peak of every step."""

    def __init__(self, watch: Any) -> None:
        self.watch = watch

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The forward comes next."""
        self.watch.start()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The backward has run."""
        self.watch.stop()
        for step in self.watch.steps[-1:]:
            planned, measured = step.planned_bytes / 1e6, step.measured_bytes / 1e6
            print(f"step {step.number}: planned {planned:.1f} MB, measured {measured:.1f} MB")


config = GPT2Config(vocab_size=64, n_embd=64, n_layer=3, n_head=4, n_positions=64, use_cache=False)
config.bos_token_id = config.eos_token_id = 0
model = GPT2LMHeadModel(config).train()
backend = fxrecals.backend(limit="50%", inner="eager")
model.compile(backend=backend)  # in place: the Trainer sees the model's own class
watch = fxrecals.monitor(model, backend, warmup=2)  # the second step is planned as a whole
with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(folder, max_steps=4, use_cpu=True, report_to=[], disable_tqdm=True)
    Trainer(model, options, train_dataset=Texts(), callbacks=[PeakCallback(watch)]).train()
print("measured within the plan:", all(s.measured_bytes <= s.planned_bytes for s in watch.steps))
