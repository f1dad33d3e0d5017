"""Step time and memory of one worker in bfloat16, beside torch's DDP; printed, since time is not asserted."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import elastic_ray as er
from elastic_ray.run.current import set_worker_session

STEPS, WARM = 30, 10


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model and its batches.

    Attributes:
        build: makes the model, whose children are what is sharded; without a GPU a small one, to try the code only.
        shape: of a batch.
    """

    build: Callable[[bool], nn.Sequential]
    shape: Callable[[bool], tuple[int, ...]]


def wide(gpu: bool) -> nn.Sequential:
    """Layers of many parameters and little computation."""
    width, depth = (4096, 8) if gpu else (64, 2)
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth))
    )


def transformer(gpu: bool) -> nn.Sequential:
    """A transformer of GPT-2's smallest size."""
    width, depth = (768, 12) if gpu else (64, 2)
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
    )


CASES = {
    "wide": Case(wide, lambda gpu: (64, 4096) if gpu else (4, 64)),
    "transformer": Case(transformer, lambda gpu: (16, 1024, 768) if gpu else (2, 8, 64)),
}


class Batches:
    """What a side trains on: a case on a device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.device, gpu = device, device.type == "cuda"
        torch.manual_seed(0)
        self.model = case.build(gpu).to(device)
        self.batch, *sample = case.shape(gpu)
        self.rows = TensorDataset(torch.arange(self.batch * STEPS))
        self.x = torch.randn(self.batch, *sample, device=device)


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Torch's process group, for DDP."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def steps_of(
    what: Batches, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, compiled: bool = False
) -> Iterator[None]:
    """One pass in bfloat16."""
    forward = torch.compile(model) if compiled else model
    for (rows,) in loader:
        optimizer.zero_grad()
        with torch.autocast(what.device.type, torch.bfloat16):
            loss = forward(what.x[: len(rows)]).float().square().mean()
        loss.backward()
        optimizer.step()
        yield


def ddp(what: Batches, **options: Any) -> Iterator[None]:
    with group_of_one(what.device):
        model = nn.parallel.DistributedDataParallel(what.model)
        optimizer = torch.optim.AdamW(model.parameters())
        yield from steps_of(what, model, optimizer, DataLoader(what.rows, what.batch, shuffle=True), **options)


def fsdp2(what: Batches) -> Iterator[None]:
    with group_of_one(what.device):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in what.model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(what.model, mp_policy=policy)
        optimizer = torch.optim.AdamW(what.model.parameters())
        yield from steps_of(what, what.model, optimizer, DataLoader(what.rows, what.batch, shuffle=True))


def elastic(what: Batches, *, compiled: bool = False, **options: Any) -> Iterator[None]:
    optimizer = torch.optim.AdamW(what.model.parameters())
    wrapped = er.AdaptiveDataParallel(what.model, optimizer, **options)
    loader = er.AdaptiveDataLoader(what.rows, batch_size=what.batch)
    for _ in er.remaining_epochs_until(1):
        yield from steps_of(what, wrapped, optimizer, loader, compiled)


def sharded(what: Batches) -> Iterator[None]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in what.model:
        er.fully_shard(layer, mp_policy=policy)
    er.fully_shard(what.model, mp_policy=policy)
    yield from elastic(what)


SIDES: dict[str, Callable[[Batches], Iterator[None]]] = {
    "DDP": ddp,
    "replicated": elastic,
    "zero2": lambda what: elastic(what, strategy="zero2"),
    "FSDP2": fsdp2,
    "fully_shard": sharded,
    "DDP, compiled": lambda what: ddp(what, compiled=True),
    "replicated, compiled": lambda what: elastic(what, compiled=True),
}


def measured(side: Callable[[Batches], Iterator[None]], case: Case, device: torch.device) -> tuple[float, float]:
    """Median time of a step [s], and the most memory beside what others hold [MiB]; 0 where there is no GPU."""
    gpu, others = device.type == "cuda", 0
    set_worker_session(None)  # what has run before lets go of its model
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated()
    times, since_s = [], time.perf_counter()
    for _ in side(Batches(case, device)):
        if gpu:
            torch.cuda.synchronize()
        now_s = time.perf_counter()
        times.append(now_s - since_s)
        since_s = now_s
    assert len(times) == STEPS
    return statistics.median(times[WARM:]), (torch.cuda.max_memory_allocated() - others) / (1 << 20) if gpu else 0.0


@pytest.mark.benchmark
@pytest.mark.parametrize("name", CASES)
def test_a_step_beside_ddp(device: torch.device, capsys: pytest.CaptureFixture[str], name: str) -> None:
    found = {}
    for each, side in SIDES.items():
        if device.type == "cpu" and "compiled" in each:
            continue
        found[each] = measured(side, CASES[name], device)
        base_s, base_mib = found["DDP"]
        step_s, mib = found[each]
        with capsys.disabled():
            memory = f"{mib:10.0f}{mib / base_mib:10.2f}" if base_mib else f"{'-':>10}{'-':>10}"
            print(f"\n{name:12} {each:22}{step_s * 1e3:8.2f} ms{step_s / base_s:8.2f} x{memory} MiB, x", end="")
