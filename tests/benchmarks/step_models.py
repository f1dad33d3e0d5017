"""The models whose step time is compared: ResNet-18 for 32 x 32 images, a transformer, two MLPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

ROWS = 4096
TOKENS = 64
VOCABULARY = 256


class Block(nn.Module):
    """ResNet's basic block: two 3 x 3 convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Residual sum."""
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 with CIFAR's 3 x 3 stem: 11.2 million parameters in 62 tensors."""
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*stem, *(Block(*width) for width in widths), *head)


class Transformer(nn.Module):
    """Four encoder layers of width 128 over 64 tokens; classifies the sequence. 0.8 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.position = nn.Parameter(torch.zeros(TOKENS, 128))
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, 10) of tokens (batch, 64)."""
        return self.head(self.layers(self.embedding(tokens) + self.position).mean(1))


def tiny_mlp() -> nn.Module:
    """64-128-128-10: a step is nearly all overhead."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def deep_mlp() -> nn.Module:
    """150 layers of width 16: 300 parameters, none of which takes long."""
    return nn.Sequential(nn.Linear(64, 16), *(nn.Linear(16, 16) for _ in range(148)), nn.Linear(16, 10))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model to measure.

    Attributes:
        name: as printed.
        build: makes the model.
        inputs: makes the dataset's inputs.
        batch: samples per rank and step.
        block: steps per timed block.
        blocks: pairs of blocks.
        limit: the bar: our step time as a multiple of DDP's.
        limit_of_four: the same for four ranks; None if it is no other.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    batch: int
    block: int
    blocks: int
    limit: float
    limit_of_four: float | None = None


CASES = (
    Case(
        name="ResNet-18",
        build=resnet18,
        inputs=lambda: torch.randn(256, 3, 32, 32).repeat(ROWS // 256, 1, 1, 1),
        batch=8,
        block=3,
        blocks=10,
        limit=1.01,
    ),
    Case(
        name="transformer",
        build=Transformer,
        inputs=lambda: torch.randint(VOCABULARY, (ROWS, TOKENS)),
        batch=8,
        block=12,
        blocks=20,
        limit=1.01,
    ),
    Case(
        name="tiny MLP",
        build=tiny_mlp,
        inputs=lambda: torch.randn(ROWS, 64),
        batch=32,
        block=100,
        blocks=30,
        limit=1.05,
        limit_of_four=1.08,
    ),
    Case(
        name="300 parameters",
        build=deep_mlp,
        inputs=lambda: torch.randn(ROWS, 64),
        batch=32,
        block=20,
        blocks=30,
        limit=1.05,
    ),
)
