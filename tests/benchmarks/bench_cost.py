"""Cost of one large job on a cluster that follows it, in the simulator: our objectives against Or et al.'s rules.

The job has up to 16 nodes of 4 T4 on demand, each 180 s from asking to being usable and paid for from then on. The
baseline is Or, Zhang and Freedman's throughput rule (MLSys 2020) as Pollux compared with it: sizes and batches by
throughput alone. The same rule on goodput curves, which is a better one than was published, runs beside it. Ours are
``cost_per_progress`` with several values of an hour and ``utility_band``.

Bar, for each job: of the values of an hour that finish within 1.05 x the baseline's time the cheapest, at most 0.75 x
its cost. ``imagenet`` is the job of Pollux's own comparison (0.75 x the cost at 1.06 x the time).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from bench_allocation import DATA
from common import bar, finish, side_parser

from placement.autoscaling.objectives import Objective, make_objective
from placement.autoscaling.objectives.cost_per_progress import CostPerProgress
from placement.simulator import SimulationReport, simulate
from placement.simulator.nodes.provider import AutoscaledCluster
from placement.simulator.workloads.traces import TraceJob

JOBS = ("imagenet", "yolov3", "deepspeech2", "cifar10")
VALUES = (5.0, 20.0, 50.0, 100.0)
CLUSTER = "aws:16x4"
BASELINE = "throughput rule"
MOST_TIME = 1.05


def main() -> None:
    """Every job under every rule, then the bars."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    options = parser.parse_args()
    rows, bars = [], []
    for job in options.jobs[-1:] if options.quick else options.jobs:
        own = [_row(job, name, objective, statistical) for name, objective, statistical in _rules(options)]
        rows += own
        bars += _bars(job, own)
    finish("cost of one large job", rows=rows, bars=bars)


def _rules(options: argparse.Namespace) -> list[tuple[str, Objective, bool]]:
    """(name, objective, whether the job knows of statistical efficiency)."""
    values = VALUES[1:2] if options.quick else VALUES
    return [
        (BASELINE, make_objective("throughput_efficiency"), False),
        ("throughput rule on goodput", make_objective("throughput_efficiency"), True),
        ("utility band", make_objective("utility_band"), True),
        *(
            (f"cost per progress, {v:g} USD/h", CostPerProgress(value_usd_per_h=v, hysteresis=0.01), True)
            for v in values
        ),
    ]


def _row(job: str, name: str, objective: Objective, statistical: bool) -> dict[str, Any]:
    start = time.process_time()
    report = run(job, objective, statistical=statistical)
    return {
        "job": job,
        "rule": name,
        "time [h]": report.avg_jct_s / 3600,
        "cost [USD]": report.rented.usd,
        "changes": report.jobs[0].resizes,
        "CPU [s]": time.process_time() - start,
    }


def run(job: str, objective: Objective, *, statistical: bool) -> SimulationReport:
    """One job alone on a cluster that follows it."""
    alone = TraceJob(name=job, time_s=0.0, application=job, num_replicas=1, batch_size=1)
    return simulate(
        [alone],
        DATA / "profiles",
        CLUSTER,
        rules="live",
        autoscale=AutoscaledCluster(objective=objective),
        statistical=statistical,
    )


def _bars(job: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cheapest of ours that is in time, or the fastest if none is: its time and its cost."""
    base = next(row for row in rows if row["rule"] == BASELINE)
    for row in rows:
        row["x time"], row["x cost"] = row["time [h]"] / base["time [h]"], row["cost [USD]"] / base["cost [USD]"]
    ours = [row for row in rows if row["rule"].startswith("cost per progress")]
    in_time = [row for row in ours if row["x time"] <= MOST_TIME]
    best = min(in_time, key=lambda row: row["x cost"]) if in_time else min(ours, key=lambda row: row["x time"])
    return [
        bar(f"{job}: time / Or et al.'s", value=best["x time"], limit=MOST_TIME, at_least=False),
        bar(f"{job}: cost / Or et al.'s", value=best["x cost"], limit=0.75, at_least=False),
    ]


if __name__ == "__main__":
    main()
