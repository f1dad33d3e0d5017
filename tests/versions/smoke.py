"""Two ranks under ``torchrun``, with whatever versions are installed: each way of keeping the replicas together.

    torchrun --nproc-per-node 2 tests/versions/smoke.py [strategy ...]

Prints a line for each: ``ok``, ``refused`` with the reason, or the error; what ranks train must be what one would.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

import elastic_ray as er

WAYS = ("all_reduce", "zero1", "zero2", "fully_shard")
STEPS, BATCH = 6, 16


def rows() -> torch.utils.data.TensorDataset:
    """Fixed rows."""
    x = torch.randn(STEPS * BATCH, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def net() -> nn.Module:
    """A small model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def by_torch() -> list[float]:
    """The losses of one process, by torch alone."""
    model = net()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(2 * STEPS):
        x, y = rows().tensors
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(way: str) -> list[float]:
    """The losses of all ranks together."""
    model: Any = net()
    if way == "fully_shard":
        er.fully_shard(model[0])
        er.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    strategy = None if way == "fully_shard" else way
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=strategy, scaling_rule="none")
    loader = er.AdaptiveDataLoader(rows(), batch_size=STEPS * BATCH, shuffle=False)
    losses = []
    for _ in er.remaining_epochs_until(2 * STEPS):
        sums = er.Accumulator()
        for x, y in loader:
            optimizer.zero_grad()
            loss = (wrapped(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            sums["loss"] += loss.item() * len(x)
            sums["count"] += len(x)
        losses.append(sums["loss"] / sums["count"])
    return losses


def main() -> None:
    """Try each way, the expected failure of one among them."""
    wanted = by_torch()
    for way in sys.argv[1:] or WAYS:
        try:
            found = trained(way)
            off = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
            text = "ok" if off < 1e-4 else f"differs by {off:.1e}"
        except RuntimeError as error:
            known = type(error).__name__ == "UnknownTorchError"
            text = f"{'refused' if known else type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if os.environ.get("RANK", "0") == "0":
            print(f"{way}: {text}", flush=True)


if __name__ == "__main__":
    main()
