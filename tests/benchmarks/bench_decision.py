"""CPU time of one decision of ``goodput``, from views to nodes, on full clusters of 4-GPU nodes.

Three times each: the first decision over jobs that all wait (nothing is known from an earlier one), the next one
after every job's gradient noise has changed (a round of training later), and one with the same inputs, which must
change nothing. Bars: 20 ms for 160 jobs on 64 GPUs, 0.3 s for 2000 on 2048, 3 s for 10 000 on 10 000.

Then a burst: 400 jobs arrive within 50 ms while 60 run, on 2048 GPUs. Counted is all that the allocator's core does
until the last of them has its place. Bar: 2 s, no job dropped.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import bar, finish, median, side_parser

from placement.allocator.core import AllocatorCore
from placement.allocator.events import Allocate, Event, JobHeartbeat, NodesChanged, TimePassed
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, Progress
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.step_time import ThroughputModel
from placement.knowledge.knowledge import Knowledge
from placement.planning.plan import make_plan
from placement.policies import GoodputPolicy
from placement.simulator.nodes.clusters import parse_cluster
from placement.simulator.threads import one_thread

CASES = (
    (160, 16, 0.02),
    (500, 125, None),
    (1000, 256, None),
    (2000, 512, 0.3),
    (5000, 1250, None),
    (10_000, 2500, 3.0),
)
"""Jobs, nodes of 4 GPUs, and the bar [s] where there is one."""


def main() -> None:
    """Every case in turn; medians over the repetitions."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each case")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the times; needs matplotlib")
    options = parser.parse_args()
    rows, bars = [], []
    with one_thread():
        for jobs, nodes, limit in CASES[: 1 if options.quick else None]:
            row = measure(jobs, nodes, 1 if options.quick else options.repeats)
            rows.append(row)
            worst = max(row["first [s]"], row["changed [s]"])
            if limit is not None:
                claim = f"one decision, {jobs} jobs on {4 * nodes} GPUs [s]"
                bars.append(bar(claim, value=worst, limit=limit, at_least=False))
            bars.append(bar(f"same inputs, {jobs} jobs: changes", value=row["changes"], limit=0, at_least=False))
        bursts = [burst(seed) for seed in range(1 if options.quick else options.repeats)]
    seconds, dropped = median([each[0] for each in bursts]), sum(each[1] for each in bursts)
    bars.append(bar("400 jobs arrive while 60 run, 2048 GPUs [s]", value=seconds, limit=2.0, at_least=False))
    bars.append(bar("400 jobs arrive: jobs dropped or without a place", value=dropped, limit=0, at_least=False))
    if options.plot:
        draw(rows, options.plot)
    finish("decision", rows=rows, bars=bars)


def measure(jobs: int, nodes: int, repeats: int) -> dict[str, Any]:
    """Medians of the CPU time of the three decisions."""
    cluster = parse_cluster(f"aws:{nodes}x4")
    first, changed, same, changes = [], [], [], 0
    for seed in range(repeats):
        views = make_views(jobs, seed)
        placed, seconds = decide(views, cluster)
        first.append(seconds)
        trained = [train(view) for view in placed]
        placed, seconds = decide(trained, cluster)
        changed.append(seconds)
        again, seconds = decide(placed, cluster)
        same.append(seconds)
        changes += sum(a.allocation != b.allocation for a, b in zip(again, placed, strict=True))
    return {
        "jobs": jobs,
        "GPUs": 4 * nodes,
        "first [s]": median(first),
        "changed [s]": median(changed),
        "same [s]": median(same),
        "changes": changes,
    }


def burst(seed: int, arrivals: int = 400, running: int = 60) -> tuple[float, int]:
    """CPU time until all that arrive at once have a place [s], and the jobs that have none in the end."""
    core = AllocatorCore(GoodputPolicy(), knowledge=Knowledge())
    views = {view.job: view for view in make_views(running + arrivals, seed)}
    core.handle(NodesChanged(cluster=parse_cluster("aws:512x4")), 0.0)

    def tell(event: Event, now_s: float) -> None:
        for instruction in core.handle(event, now_s):
            if isinstance(instruction, Allocate):
                before = views[instruction.job]
                views[instruction.job] = dataclasses.replace(before, allocation=dict(instruction.nodes))

    def come(jobs: Sequence[str], begin_s: float) -> None:
        for number, job in enumerate(jobs):
            tell(JobHeartbeat(view=views[job]), begin_s + 0.05 * number / len(jobs))
        tell(TimePassed(), core.due_s or begin_s)

    names = list(views)
    come(names[:running], 1.0)
    for job in names[:running]:
        tell(JobHeartbeat(view=views[job]), 3.0)
    start = time.process_time()
    come(names[running:], 4.0)
    seconds = time.process_time() - start
    return seconds, len(names) - sum(bool(state.target) for state in core.snapshot().jobs.values())


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Times over the number of jobs, both logarithmic, and a line of slope 1 through the last point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    jobs = [row["jobs"] for row in rows]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for key in ("first [s]", "changed [s]", "same [s]"):
        axes.loglog(jobs, [row[key] for row in rows], marker="o", label=key.removesuffix(" [s]"))
    axes.loglog(jobs, [rows[-1]["first [s]"] * n / jobs[-1] for n in jobs], "k:", label="linear")
    axes.set(xlabel="jobs (as many GPUs, at most)", ylabel="CPU time of a decision [s]")
    axes.legend()
    figure.savefig(path, dpi=120)


def decide(views: Sequence[JobView], cluster: Cluster) -> tuple[list[JobView], float]:
    """The views with the decision carried out, and its CPU time [s]."""
    start = time.process_time()
    plan = make_plan(GoodputPolicy(), views, cluster, 1000.0)
    seconds = time.process_time() - start
    return [dataclasses.replace(view, allocation=plan.allocation.get(view.job, {})) for view in views], seconds


def make_views(jobs: int, seed: int) -> list[JobView]:
    """Jobs with models of their own, of all lengths."""
    rng = np.random.default_rng(seed)
    return [_view(f"job-{seed}-{i}", rng) for i in range(jobs)]


def train(view: JobView) -> JobView:
    """The same job a little later: more noise, so that nothing remembered about its goodput is of use."""
    assert view.goodput is not None
    noise = dataclasses.replace(view.goodput.noise, var=view.goodput.noise.var * 1.1)
    return dataclasses.replace(view, goodput=GoodputModel(view.goodput.throughput_model, noise, 128))


def _view(name: str, rng: np.random.Generator) -> JobView:
    a = rng.lognormal(-4, 0.7, 6)
    throughput = ThroughputModel(a[0], a[1] / 30, 2 * a[2], a[3] / 10, a[4] / 2, a[5] / 20, 1 + 2 * rng.random())
    return JobView(
        job=name,
        bundle={"GPU": 1.0},
        max_workers=64,
        submitted_s=float(rng.uniform(0, 900)),
        most_workers=64,
        goodput=GoodputModel(throughput, NoiseScale(sqr=1.0, var=float(10 ** rng.uniform(0, 3))), 128),
        init_batch_size=128,
        max_batch_size=8192,
        atomic_bsz_range=(16, 512),
        accumulation=True,
        resize_cost_s=30.0,
        progress=Progress(done=100.0, epoch_ends=(100.0,), epochs=float(10 ** rng.uniform(0.5, 3))),
    )


if __name__ == "__main__":
    main()
