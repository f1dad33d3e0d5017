"""A recommender on made click data, trained with `strategy="auto"`, beside plain DDP in the same run.

The model has one large table of embeddings and a small MLP. A step touches few rows of the table, but DDP sends all of
it. elastic-ray measures the links and the steps while it trains, tries the strategies that look best, and keeps the
fastest; then the job grows from two workers to three, and one of them is killed. Takes about a minute and a half on
two cores:

    python examples/recommender.py
    python examples/recommender.py --smoke     a few steps of each: whether the installation works
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from typing import Any

# One thread per worker, for several of them share two cores; read when torch is imported, here and in workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
import ray.train
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import elastic_ray as er

ITEMS = 100_000
WIDTH = 64
HISTORY = 8  # items that a user has clicked on before
BATCH = 256
SAMPLES, SMOKE_SAMPLES = 51_200, 12_800
EPOCHS, SMOKE_EPOCHS = 8, 2
GROW_AT, KILL_AT = 3, 5  # epochs
BASELINE_STEPS, SMOKE_BASELINE_STEPS = 60, 10
TIME_LIMIT_S = 900.0  # a busy machine takes several times as long


class Recommender(nn.Module):
    """Predictor of clicks: an MLP over the item, and the mean of the items that the user clicked before."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=sparse)
        nn.init.normal_(self.items.weight, std=0.1)
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of ``ids`` (batch, HISTORY + 1), the last column being the item that is offered."""
        rows = self.items(ids)
        logits: Tensor = self.mlp(torch.cat([rows[:, :-1].mean(1), rows[:, -1]], 1))
        return logits.squeeze(1)


def clicks(samples: int) -> torch.utils.data.TensorDataset:
    """Made clicks: few items are popular, users like items of two hidden kinds."""
    generator = torch.Generator().manual_seed(0)
    popularity = torch.rand(samples, HISTORY + 1, generator=generator) ** 4
    kind = torch.randint(2, (samples, 1), generator=generator)
    offered = torch.randint(2, (samples, 1), generator=generator)
    kinds = torch.cat([kind.expand(-1, HISTORY), offered], 1)
    ids = (popularity * (ITEMS // 2)).long() * 2 + kinds  # even and odd items are of one kind each
    likes = torch.where(kind == offered, 0.9, 0.1).squeeze(1)
    return torch.utils.data.TensorDataset(ids, torch.bernoulli(likes, generator=generator))


def train(config: dict[str, Any]) -> None:
    """The train function of the elastic job."""
    torch.manual_seed(0)
    model: Any = Recommender(sparse=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    model = er.AdaptiveDataParallel(model, optimizer, strategy="auto")
    loader = er.AdaptiveDataLoader(clicks(config["samples"]), batch_size=BATCH)
    for _ in er.remaining_epochs_until(config["epochs"]):
        totals, begin_s = er.Accumulator(), time.perf_counter()
        for ids, clicked in loader:
            optimizer.zero_grad()
            logits = model(ids)
            binary_cross_entropy_with_logits(logits, clicked).backward()
            optimizer.step()
            totals["right"] += ((logits > 0) == (clicked > 0.5)).sum().item()
        er.report(
            {
                "accuracy": totals["right"] / config["samples"],
                "samples_per_s": config["samples"] / (time.perf_counter() - begin_s),
                "strategy": str(model.explain_strategy()),
            }
        )


def ddp_rank(rank: int, world: int, port: int, samples: int, steps: int, speeds: Any) -> None:
    """One rank of the baseline: the same model and batch under plain DDP, with the table's whole gradient."""
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Recommender(sparse=False))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    data = clicks(samples)
    sampler: Any = torch.utils.data.DistributedSampler(data)
    loader = iter(torch.utils.data.DataLoader(data, batch_size=BATCH // world, sampler=sampler, drop_last=True))
    for step in range(steps + 3):
        if step == 3:
            begin_s = time.perf_counter()
        ids, clicked = next(loader)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(ids), clicked).backward()
        optimizer.step()
    if rank == 0:
        speeds.put(steps * BATCH / (time.perf_counter() - begin_s))
    torch.distributed.destroy_process_group()


def baseline(world: int, samples: int, steps: int) -> float:
    """Samples per second of plain DDP on ``world`` ranks."""
    spawn = multiprocessing.get_context("spawn")
    speeds = spawn.Queue()
    port = free_port()
    arguments = (world, port, samples, steps, speeds)
    ranks = [spawn.Process(target=ddp_rank, args=(rank, *arguments), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    speed = float(speeds.get(timeout=TIME_LIMIT_S))
    for process in ranks:
        process.join(30.0)
    return speed


def free_port() -> int:
    """A port that is free for the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Demo:
    """Submits the job, has it grow, kills a worker, and shows what happens."""

    def __init__(self, directory: str, *, smoke: bool) -> None:
        self.smoke = smoke
        config = {"samples": SMOKE_SAMPLES, "epochs": SMOKE_EPOCHS} if smoke else {"samples": SAMPLES, "epochs": EPOCHS}
        self.handle = er.ElasticTrainer(
            train,
            train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=(1, 3)),
            run_config=ray.train.RunConfig(name="recommender", storage_path=directory),
            elastic_config=er.ElasticConfig(heartbeat_timeout_s=10.0),  # on two cores, workers may be slow to answer
        ).submit()
        self.handle.resize(2)
        self.speeds: dict[int, list[float]] = {}
        self.seen = self.reported = 0
        self._start_s = time.monotonic()

    def run(self) -> None:
        """Poll the job until it has ended."""
        grown = killed = self.smoke
        while not self.handle.done():
            self.poll()
            status = self.handle.status()
            if not grown and status.epoch >= GROW_AT:
                grown = True
                self.handle.resize(3)
            workers = self.handle.workers()
            if grown and not killed and status.epoch >= KILL_AT and len(workers) == 3:
                killed = True
                self.say(f"--- kill -9 {workers[-1].pid} (rank {workers[-1].rank} of 3) ---")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(workers[-1].pid, signal.SIGKILL)
            if time.monotonic() - self._start_s > TIME_LIMIT_S:
                raise TimeoutError(f"the job has not ended within {TIME_LIMIT_S:g} s")
            time.sleep(0.2)
        self.poll()

    def poll(self) -> None:
        """Show what is new."""
        for event in self.handle.events(since=self.seen):
            self.seen += 1
            changed = event.from_workers != event.to_workers
            sizes = f"{event.from_workers} -> {event.to_workers} workers: " if changed else ""
            self.say(f"{event.kind.value:<9} {sizes}{event.reason}")
        while (report := self.handle.next_report(self.reported, timeout=0.0)) is not None:
            self.reported = report.index
            accuracy, speed = report.metrics["accuracy"], report.metrics["samples_per_s"]
            self.speeds.setdefault(report.workers, []).append(speed)
            self.say(
                f"epoch {report.index}: accuracy {accuracy:.3f}, {speed:.0f} samples/s on {report.workers} workers"
            )

    def say(self, text: str) -> None:
        """One line of the log."""
        show(f"{time.monotonic() - self._start_s:6.1f} s  {text}")


def show(line: str) -> None:
    """Print a line. Standard output itself is redirected, for Ray fills it with a paragraph on the killed worker."""
    print(line, file=sys.__stdout__, flush=True)


def main(arguments: argparse.Namespace) -> int:
    """Baseline, job, comparison; 0 when the job has learnt and is faster."""
    samples = SMOKE_SAMPLES if arguments.smoke else SAMPLES
    steps = SMOKE_BASELINE_STEPS if arguments.smoke else BASELINE_STEPS
    ddp = baseline(2, samples, steps)
    show(f"plain DDP, 2 ranks: {ddp:.0f} samples/s")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory(prefix="elastic-ray-recommender-") as directory:
        try:
            demo = Demo(directory, smoke=arguments.smoke)
            demo.run()
            metrics = demo.handle.result().metrics or {}
        finally:
            ray.shutdown()
    show(f"\n{metrics['strategy']}")
    ours = max(demo.speeds.get(2, [0.0]))
    show(f"\n2 workers: {ours:.0f} samples/s, {ours / ddp:.1f} x plain DDP; accuracy {metrics['accuracy']:.3f}")
    good = arguments.smoke or (ours > ddp and metrics["accuracy"] > 0.8)
    return 0 if good else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps of each")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(options)
    sys.exit(code)
