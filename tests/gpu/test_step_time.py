"""Step time and memory of one worker in bfloat16, beside torch's DDP; printed, since time is not asserted."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset

import elastic_ray as er

STEPS, WARM = 40, 10


def built(device: torch.device) -> nn.Sequential:
    """A stack of wide layers; a narrow one without a GPU, where only the code is tried."""
    width, depth = (4096, 8) if device.type == "cuda" else (64, 2)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*layers).to(device)


def rows(device: torch.device) -> TensorDataset:
    width, batch = (4096, 64) if device.type == "cuda" else (64, 4)
    return TensorDataset(torch.randn(batch * STEPS, width))


def batch_size(device: torch.device) -> int:
    return len(rows(device)) // STEPS


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Torch's process group, for DDP."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, device: torch.device) -> Iterator[None]:
    """One pass in bfloat16."""
    for (x,) in loader:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(x.to(device)).float().square().mean()
        loss.backward()
        optimizer.step()
        yield


def ddp(device: torch.device) -> Iterator[None]:
    with group_of_one(device):
        model = nn.parallel.DistributedDataParallel(built(device))
        optimizer = torch.optim.AdamW(model.parameters())
        yield from steps_of(model, optimizer, DataLoader(rows(device), batch_size(device), shuffle=True), device)


def replicated(device: torch.device, **options: Any) -> Iterator[None]:
    model = built(device)
    optimizer = torch.optim.AdamW(model.parameters())
    yield from elastic(model, optimizer, device, **options)


def sharded(device: torch.device) -> Iterator[None]:
    model, policy = built(device), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model:
        er.fully_shard(layer, mp_policy=policy)
    er.fully_shard(model, mp_policy=policy)
    yield from elastic(model, torch.optim.AdamW(model.parameters()), device)


def elastic(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, **options: Any) -> Iterator[None]:
    wrapped = er.AdaptiveDataParallel(model, optimizer, **options)
    loader = er.AdaptiveDataLoader(rows(device), batch_size=batch_size(device))
    for _ in er.remaining_epochs_until(1):
        yield from steps_of(wrapped, optimizer, loader, device)


def measured(steps: Callable[[torch.device], Iterator[None]], device: torch.device) -> tuple[float, float]:
    """Median time of a step [s], and the most memory [MiB]; 0 where there is no GPU."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times, since_s = [], time.perf_counter()
    for _ in steps(device):
        if gpu:
            torch.cuda.synchronize()
        now_s = time.perf_counter()
        times.append(now_s - since_s)
        since_s = now_s
    assert len(times) == STEPS
    return statistics.median(times[WARM:]), torch.cuda.max_memory_allocated() / (1 << 20) if gpu else 0.0


@pytest.mark.benchmark
def test_a_step_beside_ddp(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    sides = {"DDP": ddp, "replicated": replicated, "fully_shard": sharded}
    found = {name: measured(steps, device) for name, steps in sides.items()}
    base_s, base_mib = found["DDP"]
    with capsys.disabled():
        print(f"\n{'':12}{'ms a step':>12}{'of DDP':>10}{'MiB':>10}{'of DDP':>10}")
        for name, (step_s, mib) in found.items():
            memory = f"{mib:10.0f}{mib / base_mib:10.2f}" if base_mib else f"{'-':>10}{'-':>10}"
            print(f"{name:12}{step_s * 1e3:12.2f}{step_s / base_s:10.2f}{memory}")
