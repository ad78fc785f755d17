"""Models that the benchmarks train, by name: a model, its keyword arguments, its loss.

    model, inputs, loss = build("gpt")

The three of `yardsticks` and `lstm` need torch alone, `diffusion` needs ``pip install diffusers``,
the others ``pip install transformers``. All weights are random, all sizes small enough for two
cores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import yardsticks

Made = tuple[nn.Module, Any, Callable[[Any], Tensor]]

VOCAB = 2048


def build(name: str) -> Made:
    """The model in training mode, from seed 0."""
    torch.manual_seed(0)
    model, inputs, loss = ALL[name]()
    return model.train(), inputs, loss


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that one would wrap in `torch.utils.checkpoint` by hand.

    What a chain has between its ends, the levels of our U-Net, else what the outermost module
    lists hold.
    """
    if isinstance(model, nn.Sequential):
        return list(model.children())[1:-1]
    if isinstance(model, yardsticks.UNet):
        parts = ("down1", "down2", "down3", "middle", "up3", "up2", "up1")
        return [getattr(model, part) for part in parts]
    return _listed(model)


def _listed(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList) and len(module) > 1:
        return list(module)
    return [found for child in module.children() for found in _listed(child)]


def installed() -> list[str]:
    """Names of the models whose packages are there."""
    return [name for name in ALL if name not in SMALL and find_spec(PACKAGES.get(name, "torch"))]


def gpt() -> Made:
    model, inputs = yardsticks.gpt(heads=4, dropout=0.1)
    return model, inputs, yardsticks.square_loss


def resnet() -> Made:
    return *yardsticks.resnet(), yardsticks.square_loss


def unet() -> Made:
    return *yardsticks.unet(), yardsticks.square_loss


def gpt2() -> Made:
    """Two graphs: looking up the loss logs a warning, which breaks the trace."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=256, n_embd=256, n_layer=6, n_head=8,
        bos_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config), _texts(), _own_loss


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=704, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config), _texts(), _own_loss


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=256, num_hidden_layers=6, num_attention_heads=8,
        intermediate_size=1024, max_position_embeddings=256, return_dict=False,
    )  # fmt: skip
    mask = torch.ones(4, 256, dtype=torch.long)
    mask[1::2, 192:] = 0
    return BertForMaskedLM(config), {**_texts(), "attention_mask": mask}, lambda out: out[0]


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = dict(
        image_size=112, patch_size=8, hidden_size=192, num_hidden_layers=6, num_attention_heads=6,
        intermediate_size=768, hidden_dropout_prob=0.1, num_labels=10,
    )  # fmt: skip
    images = {"pixel_values": torch.randn(8, 3, 112, 112), "labels": torch.randint(10, (8,))}
    return ViTForImageClassification(ViTConfig(**sizes)), images, _own_loss


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=256, d_kv=32, d_ff=1024, num_layers=3, num_decoder_layers=3,
        num_heads=8, use_cache=False,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config), _texts(), _own_loss


def moe() -> Made:
    """Routes tokens by a Python loop over the experts that were hit."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256,
        num_experts_per_tok=2, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    config._experts_implementation = "eager"
    return MixtralForCausalLM(config), _texts(), _own_loss


def diffusion() -> Made:
    from diffusers.models.unets.unet_2d_condition import (  # pyright: ignore[reportMissingImports]
        UNet2DConditionModel,
    )

    model = UNet2DConditionModel(
        sample_size=32, block_out_channels=(64, 128), layers_per_block=1, cross_attention_dim=64,
        attention_head_dim=8, norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    inputs = {
        "sample": torch.randn(4, 4, 32, 32),
        "timestep": torch.randint(1000, (4,)),
        "encoder_hidden_states": torch.randn(4, 16, 64),
    }
    wanted = torch.randn(4, 4, 32, 32)
    return model, inputs, lambda out: F.mse_loss(out.sample, wanted)


class Recurrent(nn.Module):
    """Predicts the next token by a recurrence, one op that Dynamo leaves alone."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.1)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.out(self.lstm(self.embedding(input_ids))[0])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def lstm() -> Made:
    return Recurrent(256, 2), _texts(), lambda loss: loss


def _texts() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (4, 256))
    return {"input_ids": ids, "labels": ids.clone()}


def _own_loss(out: Any) -> Tensor:
    return out.loss


MODELS: dict[str, Callable[[], Made]] = {
    make.__name__: make for make in (gpt, resnet, unet, gpt2, llama, bert, vit)
}
"""Those of `benchmarks.promises`: they trace."""

MORE: dict[str, Callable[[], Made]] = {make.__name__: make for make in (t5, moe, diffusion, lstm)}
"""Those whose Python depends on their data among them."""


def _squared(make: Callable[[], yardsticks.Made]) -> Made:
    return *make(), yardsticks.square_loss


SMALL: dict[str, Callable[[], Made]] = {
    "gpt-small": partial(
        _squared, partial(yardsticks.gpt, 4, 128, 4, tokens=128, batch=8, dropout=0.1)
    ),
    "resnet-small": partial(_squared, partial(yardsticks.resnet, 8, 32, 16)),
    "unet-small": partial(_squared, partial(yardsticks.unet, 2, 64, 16)),
}
"""The yardsticks, for those who are in a hurry."""

ALL = MODELS | MORE | SMALL

PACKAGES = dict.fromkeys(("gpt2", "llama", "bert", "vit", "t5", "moe"), "transformers") | {
    "diffusion": "diffusers"
}
"""That a model needs beside torch."""
