"""Mean completion time at what was rented: the objective ``budget``, values of an hour by hand, and BOA Constrictor.

A trace on up to 48 nodes of four T4, live rules, shared knowledge. Points and a line:

- ``ideal``: widths of BOA Constrictor (arXiv 2602.01404) by the closed form, each job alone on exactly its GPUs: no
  node starts, none is partly empty, no job is in another's way. The line is the frontier that no fixed widths pass.
- ``boa``: the same widths in the simulator, on nodes that are all there; what jobs held is counted, not what was
  rented.
- ``boa rented``, ``budget``, ``by hand``: nodes are rented, with their start-up times and their empty GPUs.

``--kinds`` runs some of them and ``--records FILE`` keeps what was run, so that a long run can be cut into pieces;
``--plot FILE.png`` draws all records.

Bars: at equal GPU-hours the budget objective takes at most as long as BOA does (linear between its points), rented
against rented; and as the ideal line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_allocation import DATA
from common import bar, finish, side_parser

from placement.autoscaling.objectives import Objective
from placement.autoscaling.objectives.by_size import BySize
from placement.autoscaling.objectives.cost_per_progress import Budget, CostPerProgress
from placement.policies.baselines.boa import BoaPolicy, JobClass, boa_widths
from placement.simulator import simulate
from placement.simulator.engine import job_classes
from placement.simulator.nodes.clusters import gpu_types, parse_cluster
from placement.simulator.nodes.provider import AutoscaledCluster
from placement.simulator.workloads.profiles import load_profiles
from placement.simulator.workloads.traces import read_trace
from placement.simulator.world.rules import make_rules

CLUSTER = "aws:48x4"
USD = 0.98  # price of a T4 [USD/h]
BOA_USD_PER_H = (160.0, 180.0, 200.0, 225.0, 260.0)  # on average while jobs arrive
BUDGET_USD_PER_H = (40.0, 50.0, 60.0, 80.0, 120.0)  # on average until the last job ends
VALUES_USD = (1.0, 2.0, 4.0, 8.0, 16.0)
KINDS = ("ideal", "boa", "boa rented", "budget", "by hand")


def main() -> None:
    """Run the kinds that were asked for, one line each, then print, check and draw all records."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--trace", default=str(DATA / "workloads" / "sia-philly" / "workload-1.csv"))
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--records", type=Path, help="JSON lines: what an earlier run found is read, new is added")
    parser.add_argument("--plot", type=Path, help="picture of all records")
    options = parser.parse_args()
    rows = []
    if options.records and options.records.exists():
        rows = [json.loads(line) for line in options.records.read_text().splitlines()]
    for row in _run(options.trace, options.kinds, quick=options.quick):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.records:
            with options.records.open("a") as file:
                file.write(json.dumps(row) + "\n")
    finish("budget", rows=rows, bars=_bars(rows))
    if options.plot:
        _draw(rows, options.plot)


def _run(trace: str, kinds: Sequence[str], *, quick: bool) -> Iterator[dict[str, Any]]:
    if "ideal" in kinds:
        yield from _ideal(trace)
    most = 1 if quick else None
    if "boa" in kinds:
        for usd in BOA_USD_PER_H[:most]:
            yield _simulated(trace, "boa", f"{usd:g} USD/h", policy=BoaPolicy(budget_usd_per_h=usd))
    if "boa rented" in kinds:
        classes = _classes(trace)
        for usd in BOA_USD_PER_H[:most]:
            policy = BoaPolicy(budget_usd_per_h=usd, usd=USD).told(classes, 0.0)
            yield _simulated(trace, "boa rented", f"{usd:g} USD/h", policy=policy, objective=BySize(policy=policy))
    if "budget" in kinds:
        for usd in BUDGET_USD_PER_H[:most]:
            yield _simulated(trace, "budget", f"{usd:g} USD/h", objective=Budget(usd_per_h=usd))
    if "by hand" in kinds:
        for usd in VALUES_USD[:most]:
            yield _simulated(
                trace, "by hand", f"an hour is {usd:g} USD", objective=CostPerProgress(value_usd_per_h=usd)
            )


def _classes(trace: str) -> dict[str, JobClass]:
    nodes = parse_cluster(CLUSTER)
    applications = load_profiles(DATA / "profiles", gpu_types(nodes))
    return job_classes(read_trace(trace, applications), applications, nodes, make_rules("live"))


def _ideal(trace: str) -> Iterator[dict[str, Any]]:
    classes = _classes(trace)
    jobs = len(Path(trace).read_text().splitlines()) - 1  # a line each
    arrivals = sum(each.per_h for each in classes.values())
    before = None
    for gpus in np.linspace(150.0, 320.0, 341).tolist():
        try:
            widths = boa_widths(classes, gpus)
        except ValueError:  # less than the cheapest widths need
            continue
        if widths == before:
            continue
        before = widths
        job_h = {name: each.seconds[widths[name]] / 3600.0 for name, each in classes.items()}
        parts = {name: each.per_h / arrivals for name, each in classes.items()}
        yield {
            "kind": "ideal",
            "what": " ".join(f"{name} {width}" for name, width in sorted(widths.items())),
            "average [h]": sum(parts[name] * job_h[name] for name in classes),
            "GPU-hours": jobs * sum(parts[name] * job_h[name] * widths[name] for name in classes),
        }


def _simulated(
    trace: str, kind: str, what: str, *, policy: BoaPolicy | None = None, objective: Objective | None = None
) -> dict[str, Any]:
    scale = None if objective is None else AutoscaledCluster(objective=objective)
    report = simulate(
        trace,
        DATA / "profiles",
        CLUSTER,
        rules="live",
        policy="goodput" if policy is None else policy,
        knowledge=True,
        autoscale=scale,
    )
    return {
        "kind": kind,
        "what": what,
        "average [h]": report.avg_jct_s / 3600,
        "GPU-hours": report.gpu_hours if scale is None else report.rented.usd / USD,
        "held [GPU-h]": report.gpu_hours,
        "makespan [h]": report.makespan_s / 3600,
        "changes a job": sum(job.resizes for job in report.jobs) / len(report.jobs),
    }


def _points(rows: Sequence[dict[str, Any]], kind: str) -> tuple[list[float], list[float]]:
    """GPU-hours, and average completion times [h], of a kind, the fewest GPU-hours first."""
    found = sorted((row["GPU-hours"], row["average [h]"]) for row in rows if row["kind"] == kind)
    return [x for x, _ in found], [y for _, y in found]


def _bars(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for kind in ("boa rented", "ideal"):
        hours, times = _points(rows, kind)
        for row in rows:
            if row["kind"] == "budget" and hours and hours[0] <= row["GPU-hours"] <= hours[-1]:
                value = row["average [h]"] / float(np.interp(row["GPU-hours"], hours, times))
                said = f"budget of {row['what']}: completion / {kind}"
                found.append(bar(said, value=value, limit=1.0, at_least=False))
    return found


def _draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.0, 4.0), constrained_layout=True)
    styles = {"ideal": "k-", "boa": "s:", "boa rented": "s--", "budget": "o-", "by hand": "^:"}
    names = {"ideal": "BOA, ideal", "boa": "BOA, held", "boa rented": "BOA, rented", "budget": "budget, rented"}
    simulated = [row for row in rows if row["kind"] != "ideal"] or rows
    for kind, style in styles.items():
        axes.plot(*_points(rows, kind), style, label=names.get(kind, "hours valued by hand, rented"))
    axes.set(xlabel="GPU-hours", ylabel="average completion time [h]")
    axes.set_xlim(
        *(factor * each(row["GPU-hours"] for row in simulated) for factor, each in ((0.98, min), (1.02, max)))
    )
    axes.set_ylim(0, 1.1 * max(row["average [h]"] for row in simulated))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
