"""What metrics cost: a job's step time with metrics on against off, and CPU time of the samples.

One job of one worker after the other trains for some seconds, with metrics (its controller's and the allocator's) and
without in turn, in one run. The ratio is that of the median step times of two neighbours; their median counts.
The allocator's samples are those of a real ``AllocatorCore`` with 1000 jobs.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from common import bar, finish, median, side_parser

from placement.allocator.config import AllocatorConfig
from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobHeartbeat, NodesChanged, TimePassed
from placement.allocator.metrics import cluster_samples
from placement.policies import GoodputPolicy
from placement.simulator.nodes.clusters import parse_cluster

JOBS, NODES = 1000, 256
_WARM = 50  # steps that are not counted
BEGIN_S = 1_000_000_000.0


def main() -> None:
    """Both measurements in turn."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--blocks", type=int, default=12, help="jobs of each side")
    parser.add_argument("--seconds", type=float, default=8.0, help="that each job trains")
    options = parser.parse_args()
    row, bars = measure_steps(2 if options.quick else options.blocks, 2.0 if options.quick else options.seconds)
    cpu_s = measure_samples(5 if options.quick else 50)
    finish("metrics", rows=[{**row, f"gauges of {JOBS} jobs, a second [CPU ms]": 1e3 * cpu_s}], bars=bars)


def measure_samples(repeats: int) -> float:
    """CPU time [s] of the allocator's gauges once, of 1000 jobs."""
    from bench_decision import make_views

    core = AllocatorCore(GoodputPolicy(), AllocatorConfig(rounds=True, silence_s=1e9))
    core.handle(NodesChanged(cluster=parse_cluster(f"aws:{NODES}x4")), BEGIN_S)
    for view in make_views(JOBS, 0):
        core.handle(JobHeartbeat(view=view), BEGIN_S)
    core.handle(TimePassed(), BEGIN_S)
    times = list[float]()
    for _ in range(repeats):
        begun = time.process_time()
        cluster_samples(core.snapshot(core.recorded), prices=core.prices)
        times.append(time.process_time() - begun)
    return median(times) or 0.0


def train(config: dict[str, Any]) -> None:
    """Steps until the file is there, each with its time in a log."""
    import torch

    import elastic_ray as er

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model = er.AdaptiveDataParallel(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(4096, 256), torch.randint(10, (4096,)))
    loader = er.AdaptiveDataLoader(data, batch_size=64)
    end, times = Path(config["end"]), list[float]()
    for _ in er.remaining_epochs_until(1_000_000):
        for x, y in loader:
            begun = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            times.append(time.perf_counter() - begun)
        Path(config["log"]).write_text("\n".join(f"{each:.9f}" for each in times[_WARM:]))
        if end.exists():
            return


def measure_steps(blocks: int, block_s: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Median step time of one job after the other, with metrics and without in turn."""
    from tests.local_cluster import LocalCluster

    local = LocalCluster(num_cpus=4, _system_config=None)
    found: dict[str, list[float]] = {"on": [], "off": []}
    try:
        for block in range(blocks):
            for side in ("on", "off") if block % 2 else ("off", "on"):
                found[side].append(
                    _one_job(Path(tempfile.mkdtemp(dir="/tmp")), f"{side}{block}", side == "on", block_s)
                )
    finally:
        local.shutdown()
    ratios = [on / off for on, off in zip(found["on"], found["off"], strict=True)]
    row = {
        "what": "a step",
        "on [ms]": 1e3 * (median(found["on"]) or 0.0),
        "off [ms]": 1e3 * (median(found["off"]) or 0.0),
        "fastest on [ms]": 1e3 * min(found["on"]),
        "fastest off [ms]": 1e3 * min(found["off"]),
        "ratios from": min(ratios),
        "to": max(ratios),
    }
    return row, [
        bar("a job's step time with metrics, against without", value=median(ratios), limit=1.01, at_least=False)
    ]


def _one_job(folder: Path, name: str, metrics: bool, block_s: float) -> float:
    """Median step time [s] of a job of one worker; without TensorBoard, which both sides would write alike."""
    import ray.train

    import elastic_ray as er
    from placement.allocator.actor import get_or_create_allocator

    get_or_create_allocator(config=AllocatorConfig(metrics=metrics))
    log, end = folder / "log", folder / "end"
    handle = er.ElasticTrainer(
        train,
        train_loop_config={"log": str(log), "end": str(end)},
        scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name=name, storage_path=str(folder / "runs")),
        elastic_config=er.ElasticConfig(metrics=metrics, tensorboard=False, automatic_checkpoints=False),
    ).submit()
    _until(log.exists)
    time.sleep(block_s)
    end.touch()
    handle.result(timeout=60)
    return median(map(float, log.read_text().split())) or 0.0


def _until(condition: Any, timeout_s: float = 120.0) -> None:
    """Wait for something to come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
