"""Models that the benchmarks train, by name: a model, its keyword arguments, its loss.

    model, inputs, loss = build("gpt")

The three of `yardsticks` need torch alone; the others need ``pip install transformers``. All
weights are random, all sizes small enough for two cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import yardsticks

Made = tuple[nn.Module, Any, Callable[[Any], Tensor]]

VOCAB = 2048


def build(name: str) -> Made:
    """The model in training mode, from seed 0."""
    torch.manual_seed(0)
    model, inputs, loss = MODELS[name]()
    return model.train(), inputs, loss


def blocks(name: str, model: nn.Module) -> list[nn.Module]:
    """The blocks that one would wrap in `torch.utils.checkpoint` by hand."""
    if name in ("gpt", "resnet"):
        return list(model.children())[1:-1]
    if name == "unet":
        parts = ("down1", "down2", "down3", "middle", "up3", "up2", "up1")
        return [getattr(model, part) for part in parts]
    classes = ("GPT2Block", "LlamaDecoderLayer", "BertLayer", "ViTLayer")
    return [m for m in model.modules() if type(m).__name__ in classes]


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


def _texts() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (4, 256))
    return {"input_ids": ids, "labels": ids.clone()}


def _own_loss(out: Any) -> Tensor:
    return out.loss


MODELS: dict[str, Callable[[], Made]] = {
    make.__name__: make for make in (gpt, resnet, unet, gpt2, llama, bert, vit)
}
