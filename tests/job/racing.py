"""A train loop under ``strategy="auto"`` that returns which strategies its steps had, and its nodes' domains."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import elastic_ray as er
from elastic_ray.loop.api import current_session


def train(config: dict[str, Any]) -> tuple[list[str], tuple[str, ...]]:
    """``config``: epochs of ten steps. 8 MiB of parameters, so that several strategies race."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy="auto")
    data = torch.randn(80, 1024, generator=torch.Generator().manual_seed(1))
    used: list[str] = []
    for _ in er.remaining_epochs_until(config["epochs"]):
        for x in er.AdaptiveDataLoader(data, batch_size=8):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            used.append(wrapped.strategy.name)
            optimizer.step()
            domains = current_session().run.group.domains
    return used, domains
