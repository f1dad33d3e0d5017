"""A model that several ranks train under strategies that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic_ray as er

ROWS, IDS = 2000, 4


class Tabled(nn.Module):
    """A table of which a batch touches few rows, and two layers."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 64, sparse=sparse)
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(self.table(ids).sum(1)))).squeeze(1)


def data(samples: int = 400) -> TensorDataset:
    ids = torch.randint(ROWS, (samples, IDS), generator=torch.Generator().manual_seed(1))
    return TensorDataset(ids, torch.randn(samples, generator=torch.Generator().manual_seed(2)))


class Trainee:
    """Trains, and calls `between` with itself and the number of the step before each."""

    def __init__(self, strategy: Any, *, sparse: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Tabled(sparse=sparse)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.wrapped = er.AdaptiveDataParallel(self.model, self.optimizer, strategy=strategy)
        self.used: list[str] = []

    def train(
        self, between: Callable[[Trainee, int], None] = lambda trainee, step: None, *, epochs: int = 4, batch: int = 20
    ) -> None:
        step = 0
        for _ in er.remaining_epochs_until(epochs):
            for ids, y in er.AdaptiveDataLoader(data(), batch_size=batch):
                between(self, step)
                self.optimizer.zero_grad()
                (self.wrapped(ids) - y).square().mean().backward()
                self.used.append(self.wrapped.strategy.name)
                self.optimizer.step()
                step += 1

    @property
    def parameters(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])
