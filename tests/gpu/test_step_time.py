"""Step time and memory of one worker in bfloat16, beside torch's DDP; printed, since time is not asserted.

Nobody waits for the GPU between two steps, as people train: the CPU runs ahead of it, unless a step makes it wait. Such
waits are counted (``torch.cuda.set_sync_debug_mode``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
import warnings
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

STEPS, WARM, WATCHED, ROUNDS = 100, 20, 11, 3


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model and its batches.

    Attributes:
        build: makes the model, whose children are what is sharded; without a GPU a small one, to try the code only.
        shape: of a batch.
        limit: the bar: our step time as a multiple of DDP's.
    """

    build: Callable[[bool], nn.Sequential]
    shape: Callable[[bool], tuple[int, ...]]
    limit: float


def wide(gpu: bool) -> nn.Sequential:
    """Layers of many parameters and little computation."""
    width, depth = (4096, 8) if gpu else (64, 2)
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth))
    )


def transformer(width: int, depth: int) -> Callable[[bool], nn.Sequential]:
    """Encoder layers."""

    def build(gpu: bool) -> nn.Sequential:
        size, layers = (width, depth) if gpu else (64, 2)
        return nn.Sequential(
            *(
                nn.TransformerEncoderLayer(size, size // 64, 4 * size, 0.0, "gelu", batch_first=True, norm_first=True)
                for _ in range(layers)
            )
        )

    return build


CASES = {
    "small transformer": Case(transformer(256, 6), lambda gpu: (16, 128, 256) if gpu else (2, 8, 64), 1.05),
    "wide MLP": Case(wide, lambda gpu: (64, 4096) if gpu else (4, 64), 1.03),
    "GPT-2 small": Case(transformer(768, 12), lambda gpu: (16, 1024, 768) if gpu else (2, 8, 64), 1.01),
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


def ddp(what: Batches, *, fused: bool = False, **options: Any) -> Iterator[None]:
    with group_of_one(what.device):
        model = nn.parallel.DistributedDataParallel(what.model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused or None)
        yield from steps_of(what, model, optimizer, DataLoader(what.rows, what.batch, shuffle=True), **options)


def fsdp2(what: Batches) -> Iterator[None]:
    with group_of_one(what.device):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in what.model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(what.model, mp_policy=policy)
        optimizer = torch.optim.AdamW(what.model.parameters())
        yield from steps_of(what, what.model, optimizer, DataLoader(what.rows, what.batch, shuffle=True))


def elastic(what: Batches, *, compiled: bool = False, fused: bool = False, **options: Any) -> Iterator[None]:
    optimizer = torch.optim.AdamW(what.model.parameters(), fused=fused or None)
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


Side = Callable[[Batches], Iterator[None]]
# Each beside the side that it is compared with.
SIDES: dict[str, tuple[Side, Side]] = {
    "replicated": (ddp, elastic),
    "fused": (lambda what: ddp(what, fused=True), lambda what: elastic(what, fused=True)),
    "compiled": (lambda what: ddp(what, compiled=True), lambda what: elastic(what, compiled=True)),
    "zero2": (ddp, lambda what: elastic(what, strategy="zero2")),
    "fully_shard": (fsdp2, sharded),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Of one side.

    Attributes:
        step_s: mean time of a step, from a wait for the GPU to the next that many steps later.
        mib: the most memory beside what others hold; 0 where there is no GPU.
        waits: host-device synchronisations of a step.
    """

    step_s: float
    mib: float
    waits: float


def measured(side: Side, case: Case, device: torch.device) -> Measured:
    gpu, others, waits, since_s = device.type == "cuda", 0, 0, 0.0
    set_worker_session(None)  # what has run before lets go of its model
    torch._dynamo.reset()
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated()
    step_s = 0.0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step, _ in enumerate(side(Batches(case, device)), 1):
            if step == WARM or step == STEPS - WATCHED:
                if gpu:
                    torch.cuda.synchronize()
                now_s = time.perf_counter()
                step_s, since_s = (now_s - since_s) / (STEPS - WATCHED - WARM), now_s
            if gpu and step == STEPS - WATCHED:
                seen.clear()
                torch.cuda.set_sync_debug_mode("warn")
            if gpu and step == STEPS - 1:  # the pass's end may wait
                torch.cuda.set_sync_debug_mode("default")
                waits = sum("synchroniz" in str(each.message) for each in seen)
    mib = (torch.cuda.max_memory_allocated() - others) / (1 << 20) if gpu else 0.0
    return Measured(step_s, mib, waits / (WATCHED - 1))


def compared(name: str, side: str, device: torch.device) -> str:
    """One line: medians of rounds in which both sides take turns."""
    pairs = [tuple(measured(each, CASES[name], device) for each in SIDES[side]) for _ in range(ROUNDS)]
    theirs, ours = pairs[-1]
    ratio = statistics.median(b.step_s / a.step_s for a, b in pairs)
    times = " / ".join(f"{statistics.median(pair[k].step_s for pair in pairs) * 1e3:.2f}" for k in (0, 1))
    memory = f"{theirs.mib:.0f} / {ours.mib:.0f} MiB: {ours.mib / theirs.mib:.3f} x" if theirs.mib else "-"
    bar = f"bar {CASES[name].limit}"
    return f"{name:18} {side:12} {times:>16} ms: {ratio:.3f} x ({bar})  {memory}  waits {theirs.waits} / {ours.waits}"


@pytest.mark.benchmark
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("side", SIDES)
def test_a_step_beside_ddp(device: torch.device, capsys: pytest.CaptureFixture[str], name: str, side: str) -> None:
    if device.type == "cpu" and side == "compiled":
        pytest.skip("a compiler for CPUs takes minutes")
    line = compared(name, side, device)
    with capsys.disabled():
        print(f"\n{line}", end="")


if __name__ == "__main__":  # where pytest's other fixtures cannot be imported
    for name in CASES:
        for side in SIDES:
            try:
                print(compared(name, side, torch.device("cuda")), flush=True)
            except Exception as error:  # torch may be of a version that knows no shards of ours
                print(name, side, repr(error)[:200], flush=True)
