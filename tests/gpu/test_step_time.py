"""Step time and memory in bfloat16, beside torch's DDP; printed, since time is not asserted.

    python tests/gpu/test_step_time.py

prints a table and a JSON line in less than three minutes, and needs neither pytest nor Ray. Nobody waits for the GPU
between two steps, as people train: the CPU runs ahead of it, unless a step makes it wait. Such waits are counted
(``torch.cuda.set_sync_debug_mode``). The rows of two ranks have both on one GPU, which NCCL takes for two machines:
their times are those of TCP, and only waits and memory say something.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
else:
    import pytest

import elastic_ray as er
from elastic_ray.run.current import set_worker_session

STEPS, WARM, WATCHED, ROUNDS = 100, 20, 11, 3
_KEPT: list[object] = []


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
    # One that DDP's reducer is the last to hold ends under the interpreter's lock, which gloo's threads may wait for.
    _KEPT.append(dist.group.WORLD)
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


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Both sides of one case.

    Attributes:
        case, side: their names.
        step_ms, mib, waits: of theirs and of ours; see :class:`Measured`.
        time, memory: ours as a multiple of theirs; 0 where nothing is measured.
        bar: what the time is to be at most.
    """

    case: str
    side: str
    step_ms: tuple[float, float]
    mib: tuple[float, float]
    waits: tuple[float, float]
    time: float
    memory: float
    bar: float

    def __str__(self) -> str:
        times = " / ".join(f"{each:.2f}" for each in self.step_ms)
        memory = f"{self.mib[0]:.0f} / {self.mib[1]:.0f} MiB: {self.memory:.3f} x" if self.memory else "-"
        return (
            f"{self.case:18} {self.side:12} {times:>16} ms: {self.time:.3f} x (bar {self.bar})  {memory:>30}"
            f"  waits {self.waits[0]} / {self.waits[1]}"
        )


def launches(side: Side, case: Case, device: torch.device, steps: int = 5) -> collections.Counter[str]:
    """How often a step calls each operation of the GPU and of its driver, by name."""
    found = collections.Counter[str]()
    set_worker_session(None)
    profile = torch.profiler.profile()
    running = side(Batches(case, device))
    for step, _ in enumerate(running, 1):
        if step == WARM:
            profile.start()
        if step == WARM + steps:
            profile.stop()
            break
    running.close()  # type: ignore[attr-defined]
    for each in profile.events() or ():
        on_gpu = str(each.device_type).endswith("CUDA")
        if device.type == "cpu" or on_gpu or each.name.startswith("cuda"):
            found[each.name[:70]] += 1
    return found


def show_launches(device: torch.device) -> None:
    """Print those that the two sides do not call equally often."""
    for name, side in (("small transformer", "replicated"), ("small transformer", "fused"), ("wide MLP", "replicated")):
        theirs, ours = (launches(each, CASES[name], device) for each in SIDES[side])
        print(f"launches in 5 steps, {name}, {side}: {sum(theirs.values())} / {sum(ours.values())}")
        for each in sorted(theirs | ours, key=lambda n: -abs(ours[n] - theirs[n]))[:14]:
            if theirs[each] != ours[each]:
                print(f"  {theirs[each]:5} {ours[each]:5} {each}")


def compared(name: str, side: str, device: torch.device, rounds: int = ROUNDS) -> Row:
    """Medians of rounds in which both sides take turns."""
    return row(name, side, [tuple(measured(each, CASES[name], device) for each in SIDES[side]) for _ in range(rounds)])


def row(name: str, side: str, pairs: Sequence[tuple[Measured, ...]]) -> Row:
    """What rounds of both sides have shown."""
    (theirs, ours), medians = pairs[-1], [statistics.median(pair[k].step_s for pair in pairs) * 1e3 for k in (0, 1)]
    return Row(
        case=name,
        side=side,
        step_ms=(medians[0], medians[1]),
        mib=(theirs.mib, ours.mib),
        waits=(theirs.waits, ours.waits),
        time=statistics.median(b.step_s / a.step_s for a, b in pairs),
        memory=ours.mib / theirs.mib if theirs.mib else 0.0,
        bar=CASES[name].limit,
    )


if __name__ != "__main__":

    @pytest.mark.benchmark
    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize("side", SIDES)
    def test_a_step_beside_ddp(device: torch.device, capsys: pytest.CaptureFixture[str], name: str, side: str) -> None:
        if device.type == "cpu" and side == "compiled":
            pytest.skip("a compiler for CPUs takes minutes")
        found = compared(name, side, device)
        with capsys.disabled():
            print(f"\n{found}", end="")


# -- two ranks on one GPU ----------------------------------------------------------------------------------------------


def run_rank(side: int, name: str, device: torch.device) -> None:
    """One of two ranks, started by torchrun: measure a side; rank 0 prints it."""
    if device.type == "cuda":
        os.environ.update(
            NCCL_HOSTID=f"h{os.getpid()}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket", NCCL_IB_DISABLE="1"
        )
    ours = side == 1

    def steps(what: Batches) -> Iterator[None]:
        if ours:
            what.batch *= 2  # of both ranks
            what.rows = TensorDataset(torch.arange(what.batch * STEPS))
            yield from elastic(what)
            return
        dist.init_process_group("nccl" if what.device.type == "cuda" else "gloo")
        model = nn.parallel.DistributedDataParallel(what.model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters())
        yield from steps_of(what, model, optimizer, DataLoader(what.rows, what.batch, shuffle=True))

    found = measured(steps, CASES[name], device)
    if os.environ["RANK"] == "0":
        print("RESULT", json.dumps(dataclasses.asdict(found)), flush=True)
    sys.stdout.flush()
    os._exit(0)  # there is nothing to take leave of


def two_ranks(name: str, device: torch.device) -> Row:
    """Both sides, each in processes of its own."""
    found = []
    for side in (0, 1):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [__file__, "--rank-of", str(side), "--case", name, "--device", device.type]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise RuntimeError(f"{name}: no result: {ran.stderr[-1500:]}")
        found.append(Measured(**json.loads(lines[-1].removeprefix("RESULT "))))
    return row(name, "two ranks", [tuple(found)])


# In this order: what comes last is left out where time is up.
ROWS = [
    *((name, side) for side in ("replicated", "fused") for name in ("small transformer", "wide MLP")),
    ("GPT-2 small", "replicated"),
    ("small transformer", "two ranks"),
    ("small transformer", "compiled"),
    ("wide MLP", "compiled"),
    ("GPT-2 small", "compiled"),
    ("small transformer", "fully_shard"),
    ("small transformer", "zero2"),
]


def main() -> None:
    """Print the table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the code only")
    parser.add_argument("--limit-s", type=float, default=165.0, help="begin no row after so long")
    parser.add_argument("--sides", nargs="+", default=[*SIDES, "two ranks"], help="rows by side")
    parser.add_argument("--launches", action="store_true", help="count launches of both sides, and measure nothing")
    parser.add_argument("--rank-of", type=int, help="internal: the side that this rank measures")
    parser.add_argument("--case", default="", help="internal: the model that it measures")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.rank_of is not None:
        run_rank(options.rank_of, options.case, device)
    if options.launches:
        return show_launches(device)
    began_s, found, left_out = time.perf_counter(), [], []
    for name, side in ROWS:
        if side not in options.sides:
            continue
        if time.perf_counter() - began_s > options.limit_s:
            left_out.append(f"{name}, {side}: no time")
            continue
        try:
            if side == "two ranks":
                each = two_ranks(name, device)
            else:
                each = compared(
                    name, side, device, rounds=1 if side in ("compiled", "fully_shard", "zero2") else ROUNDS
                )
        except Exception as error:  # torch may be of a version that knows no shards of ours
            left_out.append(f"{name}, {side}: {error!r:.300}")
            print(left_out[-1], flush=True)
            continue
        found.append(each)
        print(each, flush=True)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    rows = [dataclasses.asdict(each) for each in found]
    print(
        json.dumps(
            {"benchmark": "gpu_step_time", "torch": torch.__version__, "gpu": gpu, "rows": rows, "left_out": left_out}
        )
    )


if __name__ == "__main__":
    main()
