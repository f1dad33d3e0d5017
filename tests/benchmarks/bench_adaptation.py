"""Adaptation policies: KungFu's figures (OSDI 2020) and Or et al.'s (MLSys 2020) again.

``--part batch``: a batch that follows the noise scale reaches the small batch's accuracy sooner, on scikit-learn's
digits. Rows alternate in one process.

``--part sizes``: on jobs whose step time is a made function of the workers, the search ends at the size that a sweep
over fixed sizes finds. A simulation: no worker runs, and each resize costs the pause that live resizes have here.

``--part network``: two ranks, each in a network namespace behind 1 Gbit/s, until their links carry a tenth of that. How
soon that is noticed, and what part of what the best strategy gives the switch wins back. Needs root.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common import bar, finish, side_parser

from elastic_ray.adaptation import (
    Interference,
    NoiseScaleBatch,
    Policy,
    PolicyView,
    Resize,
    SetStrategy,
    ThroughputScaling,
    UtilityCost,
)
from elastic_ray.adaptation.policy import Answer
from placement.cluster.utility import scaling_efficiency
from tests.adaptation.scripted import ScriptedRun

# -- a batch that follows the noise scale --------------------------------------------------------------------

SMALL, LARGE, RATE = 16, 256, 0.0875
EPOCHS = {"small": 20, "noise": 40, "large": 60}


@dataclasses.dataclass(frozen=True, slots=True)
class Reached:
    """After each epoch: held-out accuracy, steps and seconds of training so far."""

    accuracies: list[float]
    steps: list[int]
    seconds: list[float]
    cpu: list[float]

    def at(self, target: float) -> int | None:
        """The first epoch that reaches the target."""
        return next((epoch for epoch, value in enumerate(self.accuracies) if value >= target), None)


def digits(way: str, seed: int) -> Reached:
    """One training: ``small``, ``large`` (rate by the linear rule) or ``noise``."""
    import torch
    from sklearn.datasets import load_digits

    import elastic_ray as er

    pixels, labels_of = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels_of)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, held_out = order[360:], order[:360]
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    rate = RATE * LARGE / SMALL if way == "large" else RATE
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    policy = NoiseScaleBatch() if way == "noise" else None
    parallel = er.AdaptiveDataParallel(model, optimizer, policy=policy, nonfinite="ignore")
    data = torch.utils.data.TensorDataset(images[training], labels[training])
    loader = er.AdaptiveDataLoader(data, batch_size=LARGE if way == "large" else SMALL, seed=seed)
    if policy is not None:
        loader.autoscale_batch_size(max_batch_size=LARGE)
    found = Reached([], [], [], [])
    steps, passed_s, passed_cpu_s = 0, 0.0, 0.0
    for _ in er.remaining_epochs_until(EPOCHS[way]):
        since_s, since_cpu_s = time.perf_counter(), time.process_time()
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(parallel(x), y).backward()
            optimizer.step()
            steps += 1
        passed_s += time.perf_counter() - since_s
        passed_cpu_s += time.process_time() - since_cpu_s
        with torch.no_grad():
            right = (model(images[held_out]).argmax(1) == labels[held_out]).float().mean()
        found.accuracies.append(float(right))
        found.steps.append(steps)
        found.seconds.append(passed_s)
        found.cpu.append(passed_cpu_s)
    return found


def batch_part(seeds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and bars: until the accuracy that the small batch has at the end, in the mean of its last five epochs."""
    import torch

    torch.set_num_threads(1)
    ways = ("small", "large", "noise")
    found: dict[str, list[Reached]] = {way: [] for way in ways}
    digits("large", 99)  # warms up
    for seed in range(seeds):
        for way in ways if seed % 2 else reversed(ways):
            found[way].append(digits(way, seed))
    target = statistics.mean(value for each in found["small"] for value in each.accuracies[-5:])
    rows = []
    for way in ways:
        reached = [(each, each.at(target)) for each in found[way]]
        there = [(each, epoch) for each, epoch in reached if epoch is not None]
        rows.append(
            {
                "batch": way,
                "reached": f"{len(there)} of {seeds}",
                "steps": _middle([each.steps[epoch] for each, epoch in there]),
                "wall s": _middle([each.seconds[epoch] for each, epoch in there]),
                "CPU s": _middle([each.cpu[epoch] for each, epoch in there]),
                "steps in all": _middle([each.steps[-1] for each, _ in reached]),
                "accuracy at the end": round(statistics.mean(each.accuracies[-1] for each in found[way]), 4),
            }
        )
    small, noise = rows[0], rows[2]
    arrived = sum(each.at(target) is not None for each in found["noise"]) / seeds
    bars = [
        bar("digits, noise scale: part of the seeds that reach it", value=arrived, limit=1.0, at_least=True),
        *_ratios(small, noise, target),
    ]
    return rows, bars


def _ratios(small: Mapping[str, Any], noise: Mapping[str, Any], target: float) -> list[dict[str, Any]]:
    """Medians over the seeds that reach it."""
    return [
        bar(
            f"digits, to the small batch's accuracy ({target:.3f}), noise scale against small batch: {unit}",
            value=noise[unit] / small[unit] if noise[unit] and small[unit] else None,
            limit=1.0,
            at_least=False,
        )
        for unit in ("steps", "wall s", "CPU s")
    ]


def _middle(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


# -- the size that pays --------------------------------------------------------------------------------------

PAUSE_S = 0.35  # the longest planned change of docs/measurements.md
STEPS = 40_000  # 200 epochs of CIFAR-10 with batches of 250
NOISE = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class MadeJob:
    """A job with sizes ``stride``, 2 ``stride``, ... and a step of a + b / k + c k seconds on k workers."""

    name: str
    stride: int
    most: int
    a: float
    b: float
    c: float

    def step_s(self, workers: int) -> float:
        """In the median."""
        return self.a + self.b / workers + self.c * workers

    @property
    def sizes(self) -> list[int]:
        """What a sweep tries."""
        return list(range(self.stride, self.most + 1, self.stride))

    def swept(self, threshold: float) -> int:
        """The largest size up to which each pays by the rule, as a sweep over all finds."""
        rates = {size: 1 / self.step_s(size) for size in self.sizes}
        return next(
            (
                old
                for old, new in itertools.pairwise(self.sizes)
                if scaling_efficiency(old, rates[old], new, rates[new]) <= threshold
            ),
            self.sizes[-1],
        )


JOBS = (MadeJob("1 to 8 workers", 1, 8, 0.1, 0.9, 0.02), MadeJob("4 to 60 workers", 4, 60, 0.05, 8.0, 0.002))


def simulated(job: MadeJob, policy: Policy, workers: int, seed: int) -> ScriptedRun:
    """A training of ``STEPS`` steps; step times vary by a tenth."""
    dice = random.Random(seed)
    script = ScriptedRun(
        policy=policy,
        view=PolicyView(workers=workers, batch_size=256, min_workers=job.stride, max_workers=job.most, epochs=1),
        step_s=lambda view: job.step_s(view.workers) * dice.lognormvariate(0.0, NOISE),
        pause_s=PAUSE_S,
    )
    for step in range(STEPS):
        script.step(epoch_progress=(step + 1) / STEPS)
    return script


def sizes_part(seeds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and bars of both jobs: all fixed sizes, and both rules from the smallest size."""
    rows, bars = [], []
    for job in JOBS:
        mean = math.exp(NOISE**2 / 2)
        fixed_s = {size: STEPS * job.step_s(size) * mean for size in job.sizes}
        value = 4 * fixed_s[job.stride] * job.stride / 3600  # of being done at once: 4 x what the smallest size costs
        runs: dict[str, list[ScriptedRun]] = {"ThroughputScaling": [], "UtilityCost": []}
        for seed in range(seeds):
            rules: Mapping[str, Policy] = {
                "ThroughputScaling": ThroughputScaling(stride=job.stride),
                "UtilityCost": UtilityCost(f"{value},{fixed_s[job.stride]}", stride=job.stride),
            }
            for name, policy in rules.items():
                runs[name].append(simulated(job, policy, job.stride, seed))
        rows += [
            _size_row(job, f"fixed {size}", [size], [(took_s, took_s * size)], []) for size, took_s in fixed_s.items()
        ]
        for name, found in runs.items():
            spent = [(run.view.elapsed_s, run.view.worker_s) for run in found]
            rows.append(_size_row(job, name, [run.view.workers for run in found], spent, found))
        ended = [run.view.workers for run in runs["ThroughputScaling"]]
        swept = job.swept(0.1)
        near = sum(abs(size - swept) <= job.stride for size in ended) / seeds
        bars += [
            bar(
                f"{job.name}: part of runs that end at the size {swept} of the sweep",
                value=ended.count(swept) / seeds,
                limit=1.0,
                at_least=True,
            ),
            bar(f"{job.name}: the same, or at a neighbour of it", value=near, limit=1.0, at_least=True),
            bar(
                f"{job.name}: part of the time until the size was found, the longest of {seeds}",
                value=max(map(_searched, runs["ThroughputScaling"])),
                limit=0.06,
                at_least=False,
            ),
        ]
    return rows, bars


def _searched(run: ScriptedRun) -> float:
    """Part of the training's time until it first turned back from a size, or stopped growing."""
    sizes = [request.to or 0 for _, request in run.asked if isinstance(request, Resize)]
    turned = next((at for at, (old, new) in enumerate(itertools.pairwise(sizes), 1) if new < old), len(sizes) - 1)
    return run.ends_s[run.asked[turned][0] - 1] / run.view.elapsed_s if sizes else 0.0


def _last_change(run: ScriptedRun) -> float:
    """Part of the training's time until the last change was asked for."""
    return run.ends_s[run.asked[-1][0] - 1] / run.view.elapsed_s if run.asked else 0.0


def _size_row(
    job: MadeJob,
    way: str,
    ends: Sequence[int],
    spent: Sequence[tuple[float, float]],
    runs: Sequence[ScriptedRun],
) -> dict[str, Any]:
    """One line of the table; ``spent`` are seconds and worker-seconds."""
    return {
        "job": job.name,
        "workers": way,
        "ends at": "/".join(str(size) for size in sorted(set(ends))),
        "time h": round(statistics.mean(took_s for took_s, _ in spent) / 3600, 3),
        "worker-hours": round(statistics.mean(worker_s for _, worker_s in spent) / 3600, 2),
        "search": round(max(map(_searched, runs)), 4) if runs else None,
        "last change": round(max(map(_last_change, runs)), 4) if runs else None,
    }


# -- others on the network -----------------------------------------------------------------------------------

STRATEGIES = ("all_reduce", "bf16", "powersgd")
FREE_STEPS, SHARED_STEPS = 25, 60


class Noticing(Interference):
    """Interference that writes down when it asked, and falls silent when the comparison begins."""

    def __init__(self) -> None:
        super().__init__(STRATEGIES)
        self.log: list[list[Any]] = []

    def after_step(self, view: PolicyView) -> Answer:
        """As of its class."""
        if view.step >= FREE_STEPS + SHARED_STEPS:
            return None
        answer = super().after_step(view)
        if isinstance(answer, SetStrategy):
            self.log.append([view.step, answer.strategy])
        return answer


def run_rank(interface: str) -> None:
    """One rank: steps on a free link, on a shared one, then each strategy in turn; rank 0 prints what it found."""
    import torch

    import elastic_ray as er

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    policy = Noticing()
    parallel = er.AdaptiveDataParallel(model, optimizer, policy=policy)
    data = torch.utils.data.TensorDataset(torch.randn(64, 512).repeat(20, 1))
    times: list[float] = []
    names: list[str] = []

    def steps() -> Any:
        for _ in er.remaining_epochs_until(1000):
            for (x,) in er.AdaptiveDataLoader(data, batch_size=16):
                since_s = time.perf_counter()
                optimizer.zero_grad()
                parallel(x).square().mean().backward()
                optimizer.step()
                names.append(parallel.strategy.name)
                yield
                times.append(time.perf_counter() - since_s)

    running = steps()
    for step in range(FREE_STEPS + SHARED_STEPS):
        if step == FREE_STEPS:
            shape = f"tc qdisc change dev {interface} root tbf rate 100mbit burst 256kb latency 50ms"
            subprocess.run(shape.split(), check=True)
        next(running)
    blocks: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for order in (STRATEGIES, STRATEGIES[::-1]):
        for name in order:
            parallel.set_strategy(name)
            for _ in range(3):
                next(running)
            first = len(times)
            for _ in range(5):
                next(running)
            blocks[name] += times[first:]
    if os.environ["RANK"] == "0":
        result = {"times": times, "names": names, "log": policy.log, "blocks": blocks}
        print("RESULT " + json.dumps(result), flush=True)
    time.sleep(0.5)
    os._exit(0)  # in the middle of an epoch: nothing to finish


def network_part() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and bars; throughput is 1 over the median step."""
    from bench_sync import launch
    from network import may_make_namespaces, namespaces

    if not may_make_namespaces():
        return [], [bar("interference: needs root and iproute2", value=None, limit=10, at_least=False)]
    with namespaces(2) as network:
        found = launch(network, 2, [network.prefix], timeout_s=500, script=__file__)
    times, blocks = found["times"], {name: statistics.median(each) for name, each in found["blocks"].items()}
    asked = [step for step, _ in found["log"] if step > FREE_STEPS]
    noticed = asked[0] - FREE_STEPS if asked else None
    chosen = found["names"][FREE_STEPS + SHARED_STEPS - 1]
    settled = statistics.median(times[FREE_STEPS + SHARED_STEPS - 12 : FREE_STEPS + SHARED_STEPS - 2])
    best = min(blocks.values())
    slow = blocks["all_reduce"]
    gain = (1 / settled - 1 / slow) / (1 / best - 1 / slow) if best < slow else None
    rows = [
        {"link": "free", "strategy": "all_reduce", "step ms": 1000 * statistics.median(times[5 : FREE_STEPS - 1])},
        *({"link": "a tenth", "strategy": name, "step ms": 1000 * each} for name, each in blocks.items()),
        {"link": "a tenth", "strategy": f"settled on {chosen}", "step ms": 1000 * settled},
        {"link": "asked", "strategy": json.dumps(found["log"]), "step ms": None},
    ]
    return rows, [
        bar("interference: steps until the first change is asked for", value=noticed, limit=10, at_least=False),
        bar("interference: part of what the best strategy gives", value=gain, limit=0.85, at_least=True),
    ]


def main() -> None:
    """The parts that were asked for."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("batch", "sizes", "network"), help="only this part")
    parser.add_argument("--seeds", type=int, default=None, help="runs of each row, 5 unless --quick")
    options = parser.parse_args()
    if options.rank_of:
        run_rank(f"{options.rank_of}i{os.environ['RANK']}")
        return
    seeds = options.seeds or (1 if options.quick else 5)
    parts: Mapping[str, Callable[[], tuple[list[dict[str, Any]], list[dict[str, Any]]]]] = {
        "batch": lambda: batch_part(seeds),
        "sizes": lambda: sizes_part(seeds),
        "network": network_part,
    }
    for name, part in parts.items():
        if options.part in (None, name):
            rows, bars = part()
            finish(f"adaptation, {name}", rows=rows, bars=bars)


if __name__ == "__main__":
    main()
