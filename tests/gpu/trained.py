"""A model that is trained on a device, and what it is to be."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import elastic_ray as er
from tests.loop.changing import run_job
from tests.sync.sharded_parameters.sharded import Net, data

STRATEGIES = ("replicated", "zero1", "zero2", "fully_shard")
EPOCHS, BATCH = 2, 12
CLOSE = 1e-3  # kernels of a GPU add up in another order


def wrapped_net(strategy: str, device: torch.device, **options: Any) -> tuple[Net, torch.optim.Optimizer, nn.Module]:
    """The model on the device, its optimizer, and what the loop calls."""
    model = Net().to(device)
    if strategy == "fully_shard":
        for block in model.blocks:
            er.fully_shard(block)
        er.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-2)
    if strategy in ("zero1", "zero2"):
        options["strategy"] = strategy
    return model, optimizer, er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", **options)


def train(strategy: str, device: torch.device) -> dict[str, Tensor] | None:
    """What rank 0 ends with, in the CPU's memory; None on the others."""
    model, optimizer, wrapped = wrapped_net(strategy, device)
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, y in er.AdaptiveDataLoader(data(), batch_size=BATCH, seed=3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x.to(device)), y.to(device)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert all(p.device.type == device.type for p in model.parameters())
    if er.get_context().get_world_rank() != 0:
        return None
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


@functools.cache
def reference() -> dict[str, Tensor]:
    """Of one process on the CPU, undisturbed."""
    (found,) = run_job(lambda: train("replicated", torch.device("cpu"))).results.values()
    assert found is not None
    return found


def check(strategy: str, device: torch.device) -> None:
    """Training on the device ends as on the CPU."""
    (whole,) = run_job(lambda: train(strategy, device), gpu=0 if device.type == "cuda" else None).results.values()
    assert whole is not None
    wanted = reference()
    assert whole.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=CLOSE, msg=lambda m: f"{name}: {m}")  # noqa: B023
