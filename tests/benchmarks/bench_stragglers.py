"""Samples per second when one of four workers is slowed three times: plain DDP, ours with unequal shares, and replaced.

A worker's step takes 5 ms per sample, asleep but for some arithmetic, so that four workers fit onto two cores; the slow
one's takes 15 ms per sample. Both systems train the same small model on global batches of 96, each first with four
equal workers: everything is told over that, in the same system and the same run. Plain DDP runs under torchrun over
gloo, with a ``DistributedSampler``; ours runs with ``stragglers="replace"`` on a local Ray with room for a fifth
worker. Bars: with shares at least 0.8 of the ideal (3 + 1/3) / 4, after the replacement at least 0.95 of four equal
workers, and a verdict within 20 steps or 5 s.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import HERE, bar, finish, print_table, side_parser, wait_until

WORKERS, BATCH, SAMPLES, SAMPLE_S, TIMES = 4, 96, 9600, 0.005, 3.0
IDEAL = (WORKERS - 1 + 1 / TIMES) / WORKERS
PATIENCE_S = 20.0
_STARTS = 4


def rows() -> Any:
    """Random rows, alike on all ranks."""
    import torch

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 16, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def work(folder: Path, samples: int) -> None:
    """What a step takes: longer in the process that a file in the folder names by its pid."""
    slow = (folder / str(os.getpid())).exists()
    time.sleep(SAMPLE_S * samples * (TIMES if slow else 1.0))


def note_step(folder: Path) -> None:
    """Rank 0 has made a step."""
    with (folder / "steps").open("a") as lines:
        lines.write(f"{time.time()}\n")


def elastic_loop(config: dict[str, Any]) -> None:
    """Ours."""
    import torch

    import elastic_ray as er

    torch.set_num_threads(1)
    folder = Path(config["folder"])
    model: Any = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH)
    for _ in er.remaining_epochs_until(1_000_000):
        for x, y in loader:
            work(folder, len(x))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if er.get_context().get_world_rank() == 0:
                note_step(folder)


def ddp_loop(folder: Path) -> None:
    """One rank of plain DDP; ends when the folder says so."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampler = torch.utils.data.DistributedSampler(rows())
    loader = torch.utils.data.DataLoader(rows(), batch_size=BATCH // WORKERS, sampler=sampler)
    if dist.get_rank() == WORKERS - 1:
        (folder / "last").write_text(str(os.getpid()))
    while True:
        for x, y in loader:
            work(folder, len(x))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if dist.get_rank() == 0:
                note_step(folder)


def step_times(folder: Path) -> list[float]:
    """When rank 0 has made its steps [s since the epoch]."""
    path = folder / "steps"
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []


def rate(folder: Path, seconds: float) -> float:
    """Samples per second over the time to come [s]."""
    begin_s = time.time()
    time.sleep(seconds)
    now = [at_s for at_s in step_times(folder) if at_s > begin_s]
    return BATCH * (len(now) - 1) / (now[-1] - now[0])


def plain_ddp(seconds: float) -> list[dict[str, Any]]:
    """Healthy and slowed, under torchrun."""
    folder = Path(tempfile.mkdtemp(prefix="bench-ddp-"))
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}", __file__, "--ddp"]
    ranks = subprocess.Popen([sys.executable, *command, str(folder)], cwd=HERE, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: len(step_times(folder)) > 20, 120.0), "plain DDP does not train"
        healthy = rate(folder, seconds)
        (folder / (folder / "last").read_text()).touch()
        time.sleep(2.0)
        slowed = rate(folder, seconds)
    finally:
        ranks.terminate()
        ranks.wait(30)
        shutil.rmtree(folder, ignore_errors=True)
    return [row("plain DDP", "four equal", healthy, healthy), row("plain DDP", "one slow", slowed, healthy)]


def row(system: str, phase: str, samples_per_s: float, healthy: float) -> dict[str, Any]:
    """A line of the table."""
    return {"system": system, "phase": phase, "samples/s": samples_per_s, "of four equal": samples_per_s / healthy}


def start_ray() -> Any:
    """A local Ray with room for one worker more than the job has, and Ray's own health checks."""
    from tests.local_cluster import LocalCluster

    for attempt in range(_STARTS):
        try:
            return LocalCluster(num_cpus=WORKERS + 1, _system_config=None)
        except Exception:  # on a busy machine Ray's 30 s for its own start are not enough
            if attempt == _STARTS - 1:
                raise
    return None


def submit(folder: Path) -> Any:
    """Our job."""
    import ray.train

    import elastic_ray as er

    return er.ElasticTrainer(
        elastic_loop,
        train_loop_config={"folder": str(folder)},
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS),
        run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
        elastic_config=er.ElasticConfig(stragglers="replace", straggler_patience_s=PATIENCE_S),
    ).submit()


def pids(handle: Any) -> set[int]:
    """Processes of the present group."""
    return {worker.pid for worker in handle.workers()}


def told(handle: Any, state: str) -> list[Any]:
    """What the job has reported of stragglers."""
    return [e for e in handle.events() if e.kind.value == "straggler" and e.detail["state"] == state]


def ours(seconds: float) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Healthy, slowed, relieved and replaced; and when the verdict came."""
    folder = Path(tempfile.mkdtemp(prefix="bench-ours-"))
    local = start_ray()
    try:
        handle = submit(folder)
        assert wait_until(lambda: handle.status().workers == WORKERS and handle.status().step > 40, 120.0), "no start"
        healthy = rate(folder, seconds)
        assert not told(handle, "slow"), "a false verdict"
        slow = handle.workers()[-1]
        (folder / str(slow.pid)).touch()
        begin_s = time.time()
        assert wait_until(lambda: bool(told(handle, "shares")), 60.0), "no verdict"
        at_s = told(handle, "slow")[0].time_s
        verdict = {"s": at_s - begin_s, "steps": float(sum(begin_s < each < at_s for each in step_times(folder)))}
        time.sleep(4.0)
        shared = rate(folder, min(seconds, PATIENCE_S - 8.0))
        assert wait_until(lambda: slow.pid not in pids(handle), 120.0), "not replaced"
        time.sleep(4.0)
        after = rate(folder, seconds)
        handle.stop()
        handle.result(timeout=60)
    finally:
        local.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    phases = {"four equal": healthy, "one slow, unequal shares": shared, "replaced": after}
    return [row("elastic-ray", phase, value, healthy) for phase, value in phases.items()], verdict


def main(options: argparse.Namespace) -> None:
    """Measure both, and print the tables and the JSON line."""
    seconds = 8.0 if options.quick else 12.0
    lines = plain_ddp(seconds)
    print_table(lines)
    elastic, verdict = ours(seconds)
    relative = [each["of four equal"] for each in elastic]
    finish(
        "stragglers",
        rows=[*lines, *elastic],
        bars=[
            bar("unequal shares over the ideal 3.33 / 4", value=relative[1] / IDEAL, limit=0.8, at_least=True),
            bar("after the replacement over four equal", value=relative[2], limit=0.95, at_least=True),
            bar("steps to the verdict", value=verdict["steps"], limit=20, at_least=False),
            {"claim": "seconds to the verdict", "reached": verdict["s"], "must be": "<= 5, or 20 steps", "met": None},
        ],
    )


if __name__ == "__main__":
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--ddp", type=Path, default=None, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.ddp is not None:
        ddp_loop(parsed.ddp)
    else:
        main(parsed)
