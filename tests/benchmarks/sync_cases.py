"""The models whose synchronisation is compared: an embedding model, a dense MLP, a small ResNet without BatchNorm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 2048
TABLE_ROWS = 200_000
IDS = 10  # of a sample


class Recommender(nn.Module):
    """A table of 200,000 x 128 and an MLP 128-256-256-1; a sample is the sum of ten rows."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(TABLE_ROWS, 128, sparse=sparse)
        self.mlp = nn.Sequential(
            nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of ``ids`` (batch, 10)."""
        return self.mlp(self.table(ids).sum(1)).squeeze(1)


def dense_mlp() -> nn.Module:
    """1024-2048-2048-2048-10: 10.5 million parameters."""
    widths = [1024, 2048, 2048, 2048]
    layers: list[nn.Module] = []
    for wide, next_ in zip(widths, [*widths[1:], 10], strict=True):
        layers += [nn.Linear(wide, next_), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """Two 3 x 3 convolutions with GroupNorm and a shortcut."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, 1, bias=False),
            nn.GroupNorm(8, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.GroupNorm(8, channels),
        )
        self.shortcut = nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Residual sum."""
        return torch.relu(self.body(x) + self.shortcut(x))


def small_resnet() -> nn.Module:
    """Eight blocks of 32 to 256 channels: 2.8 million parameters."""
    widths = [
        (32, 32, 1),
        (32, 32, 1),
        (32, 64, 2),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
        (128, 256, 2),
        (256, 256, 1),
    ]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False),
        *(Residual(*width) for width in widths),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model to measure.

    Attributes:
        name: as printed.
        build: makes the model; ``sparse`` sets its tables to sparse gradients.
        inputs, targets: make the dataset.
        loss: of outputs and targets.
        batch: samples per rank and step.
        momentum: of SGD.
        exact: strategies by hand whose step is DDP's.
        other: strategies by hand whose step is not.
        steps: of a timed block, on loopback.
        tables: whether there are any.
    """

    name: str
    build: Callable[[bool], nn.Module]
    inputs: Callable[[], Tensor]
    targets: Callable[[], Tensor]
    loss: Callable[[Any, Any], Tensor]
    batch: int
    momentum: float
    exact: tuple[str, ...]
    other: tuple[str, ...]
    steps: int
    tables: bool = False
    routed: tuple[str, ...] = ()  # further exact strategies, by the way through the group


_DENSE = ("all_reduce", "two_level", "partitioned_ar", "ps_balanced")
_ROUTED = ("ring", "tree", "star")

CASES = (
    Case(
        name="embedding",
        build=lambda sparse: Recommender(sparse=sparse),
        inputs=lambda: torch.randint(TABLE_ROWS, (ROWS, IDS), generator=torch.Generator().manual_seed(1)),
        targets=lambda: torch.randint(2, (ROWS,), generator=torch.Generator().manual_seed(2)).float(),
        loss=nn.functional.binary_cross_entropy_with_logits,
        batch=200,
        momentum=0.0,
        exact=("parallax",),
        other=(),
        steps=8,
        tables=True,
    ),
    Case(
        name="mlp",
        build=lambda sparse: dense_mlp(),
        inputs=lambda: torch.randn(ROWS, 1024, generator=torch.Generator().manual_seed(1)),
        targets=lambda: torch.randint(10, (ROWS,), generator=torch.Generator().manual_seed(2)),
        loss=nn.functional.cross_entropy,
        batch=32,
        momentum=0.9,
        exact=_DENSE,
        other=("bf16", "powersgd"),
        steps=5,
        routed=_ROUTED,
    ),
    Case(
        name="resnet",
        build=lambda sparse: small_resnet(),
        inputs=lambda: torch.randn(ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(1)),
        targets=lambda: torch.randint(10, (ROWS,), generator=torch.Generator().manual_seed(2)),
        loss=nn.functional.cross_entropy,
        batch=8,
        momentum=0.9,
        exact=_DENSE,
        other=("bf16", "powersgd"),
        steps=5,
        routed=_ROUTED,
    ),
)
