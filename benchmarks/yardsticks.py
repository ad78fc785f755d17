"""The three yardstick models.

    model, args = gpt()      # 12 pre-norm blocks: (batch, tokens) int64 -> (batch, tokens, vocab)
    model, args = resnet()   # 12 basic blocks: (batch, 3, side, side) -> (batch, 10)
    model, args = unet()     # 3 levels of skips: (batch, 3, side, side) -> (batch, 2, side, side)

Weights and inputs come from seed 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Tensor, ...]]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (t.view(split).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop1, self.drop2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop1(self.attention(self.norm1(x)))
        return x + self.drop2(self.down(F.gelu(self.up(self.norm2(x)))))


class Embed(nn.Module):
    def __init__(self, vocab: int, width: int, tokens: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(1, tokens, width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position


def gpt(
    blocks: int = 12,
    width: int = 256,
    heads: int = 8,
    vocab: int = 512,
    tokens: int = 256,
    batch: int = 8,
    dropout: float = 0.0,
) -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(
        Embed(vocab, width, tokens),
        *[Block(width, heads, dropout) for _ in range(blocks)],
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab)),
    )
    return model, (torch.randint(0, vocab, (batch, tokens)),)


class Basic(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        same = stride == 1 and inner == outer
        self.short = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.short(x))


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def resnet(batch: int = 16, side: int = 64, width: int = 32) -> Made:
    torch.manual_seed(0)
    parts: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    ]
    inner = width
    for outer, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        for index in range(3):
            parts.append(Basic(inner, outer, stride if index == 0 else 1))
            inner = outer
    parts.append(nn.Sequential(Pool(), nn.Linear(inner, 10)))
    return nn.Sequential(*parts), (torch.randn(batch, 3, side, side),)


def twice(inner: int, outer: int) -> nn.Sequential:
    """Two 3x3 convolutions, each with BatchNorm and ReLU."""
    parts: list[nn.Module] = []
    for width in (inner, outer):
        parts += [nn.Conv2d(width, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*parts)


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        w = width
        self.down1, self.down2, self.down3 = twice(3, w), twice(w, 2 * w), twice(2 * w, 4 * w)
        self.middle = twice(4 * w, 8 * w)
        self.rise3 = nn.ConvTranspose2d(8 * w, 4 * w, 2, 2)
        self.rise2 = nn.ConvTranspose2d(4 * w, 2 * w, 2, 2)
        self.rise1 = nn.ConvTranspose2d(2 * w, w, 2, 2)
        self.up3, self.up2, self.up1 = twice(8 * w, 4 * w), twice(4 * w, 2 * w), twice(2 * w, w)
        self.out = nn.Conv2d(w, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.down3(F.max_pool2d(b, 2))
        y = self.middle(F.max_pool2d(c, 2))
        y = self.up3(torch.cat([c, self.rise3(y)], 1))
        y = self.up2(torch.cat([b, self.rise2(y)], 1))
        return self.out(self.up1(torch.cat([a, self.rise1(y)], 1)))


def unet(batch: int = 4, side: int = 128, width: int = 16) -> Made:
    torch.manual_seed(0)
    return UNet(width), (torch.randn(batch, 3, side, side),)


def square_loss(out: Tensor) -> Tensor:
    return out.float().square().mean()
