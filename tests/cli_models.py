"""What the tests of the command line plan for; the source lines are in the expected output."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def blocks(batch=512):
    return nn.Sequential(*[Block(64) for _ in range(4)]).train(), torch.randn(batch, 64)


def convolutions(side=16):
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(2, 3, side, side)


def by_position_and_name():
    return Block(8), (torch.randn(4, 8),), {"scale": 2.0}


def by_name():
    return Block(8), {"x": torch.randn(4, 8), "scale": 2.0}


def needs_values():
    width = int(torch.tensor([8.0]).item())  # on meta this is an error
    return Block(width), torch.randn(4, width)


def frozen():
    return nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4)


def no_model():
    return torch.randn(2, 2)


def needs_an_argument(width):
    return Block(width), torch.randn(4, width)


NOT_A_FUNCTION = 1
