"""A train loop with a table whose rows live with owners; the same by torch alone."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from elastic_ray.sync import ShardedEmbedding

SAMPLES, BATCH, EPOCHS, ROWS = 96, 12, 4, 300


def data() -> torch.utils.data.TensorDataset:
    """Ids and targets."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(ROWS, (SAMPLES, 4), generator=generator)
    return torch.utils.data.TensorDataset(ids, torch.randn(SAMPLES, generator=generator))


def model_of(table: nn.Module) -> nn.Sequential:
    """A table of bags with these rows, and a layer."""
    table.load_state_dict({"weight": torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(2))})
    model = nn.Sequential(table, nn.Linear(3, 1))
    with torch.no_grad():
        for p in model[1].parameters():
            p.fill_(0.5)
    return model


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Of a batch."""
    return (torch.tanh(model(ids)).squeeze(1) - targets).square().mean()


def summary(weight: Tensor) -> dict[str, float]:
    """Of a whole table, as metrics."""
    return {"sum": float(weight.sum(dtype=torch.float64)), "squares": float(weight.double().square().sum())}


def train(config: dict[str, Any]) -> None:
    """``config``: copies."""
    model = model_of(ShardedEmbedding(ROWS, 3, mode="sum", copies=config["copies"]))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(data(), batch_size=BATCH, seed=3)
    for _ in er.remaining_epochs_until(EPOCHS):
        for ids, targets in loader:
            optimizer.zero_grad()
            loss_of(wrapped, ids, targets).backward()
            optimizer.step()
            time.sleep(0.05)  # a job long enough for what is done to it
    weight = model[0].state_dict()["weight"]
    er.report(summary(weight))


def by_torch() -> dict[str, float]:
    """The same in one process."""
    model = model_of(nn.EmbeddingBag(ROWS, 3, mode="sum"))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        order = torch.from_numpy(IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:])
        for share in order.split(BATCH):
            ids, targets = data()[share]
            optimizer.zero_grad()
            loss_of(model, ids, targets).backward()
            optimizer.step()
    return summary(model[0].weight.detach())
