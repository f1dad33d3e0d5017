"""A model, data and results of ranks, for tests of shapes of loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from tests.loop.ranks import Ranks

WORLDS = [None, 2, 3]


def each(ranks: Ranks, world: int | None, function: Any, *args: Any) -> list[Any]:
    """Results of one process or of several, as a list."""
    found = ranks.run(function, *args, world=world)
    return [found] if world is None else list(found)


def numbers(count: int) -> TensorDataset:
    """0..count-1."""
    return TensorDataset(torch.arange(count))


class Trainee:
    """A model that a loop may train on any batch."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.wrapped = er.AdaptiveDataParallel(self.model, self.optimizer)

    def train(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.wrapped(x.float()[:, None] / 10).square().mean().backward()
        self.optimizer.step()

    def state(self) -> list[float]:
        return [p.item() for p in self.model.parameters()]
