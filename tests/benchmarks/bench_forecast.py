"""What it is worth to an allocator to know how a job's batch will grow, in the simulator.

Queues of eight jobs with a declared batch, 12 to 384 samples, one half doubled early, as by hand, the other half late,
as Seesaw doubles it under a cosine. Each job tells its present batch in either case; with foresight it also tells the
batches to come. ``bert`` trains on T4s (Pollux's profile), ``gpt`` on pairs of A100 (Sia's pipelined profile, a worker
is a pipeline of two GPUs). The cluster follows the jobs (nodes start in 180 s, an hour is worth 20 USD), or stays.

Bar, for the mean of each queue over the seeds: average completion at most 0.9 x, GPU-hours of the workers at most
1.02 x. The time for which a decision counts was chosen on ``bert`` and seeds 0 and 1; the bars are those of seeds 2
to 5.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_allocation import DATA
from common import bar, finish, side_parser

from placement.autoscaling.objectives.cost_per_progress import CostPerProgress
from placement.goodput.fitting import Observation, fit
from placement.simulator import simulate
from placement.simulator.nodes.provider import AutoscaledCluster
from placement.simulator.workloads.profiles import Application, load_profiles
from placement.simulator.workloads.recorded import FittedTimes
from placement.simulator.workloads.traces import TraceJob
from placement.simulator.world.rules import LiveRules, Pace

LATE = ((0.0, 12), (0.5, 24), (0.667, 48), (0.77, 96), (0.839, 192), (0.887, 384))
EARLY = ((0.0, 12), (0.05, 24), (0.1, 48), (0.2, 96), (0.35, 192), (0.5, 384))
CLUSTERS = {"bert": "aws", "gpt": "dgx-ext"}
EVERY_S = {"bert": 1800.0, "gpt": 600.0}
JOBS, VALUE = 8, 20.0
SEEDS = range(2, 6)
RULES = LiveRules(pace=dataclasses.replace(Pace(), doubling=False))


def main() -> None:
    """Every queue on both clusters."""
    options = side_parser(__doc__ or "", sides=False).parse_args()
    rows, bars = [], []
    for name, gpu in CLUSTERS.items():
        profiles = {name: bert() if name == "bert" else gpt()}
        for cluster, scaled in ((f"{gpu}:16x4", True), (f"{gpu}:8x4", False)):
            seeds = SEEDS[:1] if options.quick else SEEDS
            without, known = (
                [run(name, profiles, cluster, scaled, seed, foresight) for seed in seeds] for foresight in (False, True)
            )
            where = f"{name}, {'cluster follows' if scaled else 'fixed cluster'}"
            time, hours = (ratio(known, without, key) for key in ("hours", "gpu_hours"))
            rows.append(
                {
                    "queue": where,
                    "hours without": mean(without, "hours"),
                    "hours": mean(known, "hours"),
                    "x": round(time, 3),
                    "by seed": " ".join(f"{b['hours'] / a['hours']:.2f}" for a, b in zip(without, known, strict=True)),
                    "GPU-hours x": round(hours, 3),
                    "changes without": mean(without, "changes"),
                    "changes": mean(known, "changes"),
                }
            )
            bars.append(
                bar(
                    f"what knowing the coming batch is worth, {where}: average completion",
                    value=round(time, 3),
                    limit=0.9,
                    at_least=False,
                )
            )
            bars.append(
                bar(
                    f"what knowing the coming batch is worth, {where}: GPU-hours",
                    value=round(hours, 3),
                    limit=1.02,
                    at_least=False,
                )
            )
    finish("what knowing the coming batch is worth", rows=rows, bars=bars)


def bert() -> Application:
    """Pollux's profile."""
    return load_profiles(DATA / "profiles", ("aws",))["bert"]


def gpt(profiles: Path = DATA / "profiles") -> Application:
    """Sia's profile, whose step times are known on whole nodes: as a fitted model has them."""
    found = copy.copy(load_profiles(profiles, ("dgx-ext",))["gpt_pmp"])
    with open(profiles / "gpt_pmp" / "placements-dgx-ext.csv", encoding="utf-8") as file:
        seen = [
            Observation(
                len(row["placement"]),
                sum(map(int, row["placement"])) // 2,
                int(row["local_bsz"]),
                0,
                float(row["step_time"]) + float(row["sync_time"]),
                float(row["step_time"]),
            )
            for row in csv.DictReader(file)
        ]
    found.step_times = {"dgx-ext": FittedTimes(fit(seen), (1, 2))}
    return found


def queue(name: str, seed: int) -> list[TraceJob]:
    """Jobs that arrive at random times."""
    draw, time_s, jobs = random.Random(seed), 0.0, []
    for number in range(JOBS):
        ramp = draw.choice([LATE, EARLY])
        jobs.append(
            TraceJob(name=f"{name}-{number}", time_s=time_s, application=name, num_replicas=1, batch_size=12, ramp=ramp)
        )
        time_s += draw.expovariate(1.0 / EVERY_S[name])
    return jobs


def run(
    name: str, profiles: dict[str, Application], cluster: str, scaled: bool, seed: int, foresight: bool
) -> dict[str, Any]:
    """One queue under ``goodput``."""
    scale = AutoscaledCluster(objective=CostPerProgress(value_usd_per_h=VALUE)) if scaled else None
    report = simulate(queue(name, seed), profiles, cluster, rules=RULES, autoscale=scale, foresight=foresight)
    return {
        "hours": report.avg_jct_s / 3600.0,
        "gpu_hours": sum(sum(job.gpu_hours.values()) for job in report.jobs),
        "changes": statistics.fmean(job.resizes for job in report.jobs),
    }


def mean(found: Sequence[dict[str, Any]], key: str) -> float:
    """Mean over the seeds."""
    return round(statistics.fmean(each[key] for each in found), 3)


def ratio(found: Sequence[dict[str, Any]], against: Sequence[dict[str, Any]], key: str) -> float:
    """Ratio of the means over the seeds."""
    return statistics.fmean(each[key] for each in found) / statistics.fmean(each[key] for each in against)


if __name__ == "__main__":
    main()
