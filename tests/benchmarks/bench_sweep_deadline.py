"""A sweep with a deadline against the same sweep without one, in the simulator: GPU-hours and whether it ends in time.

32 trials of ResNet-18 on CIFAR-10 (`cifar10` of the profiles), eight at a time on 16 GPUs, under successive halving
with rungs at 4, 12 and 36 epochs and eta = 3; which trials pass a rung is drawn once. Three ways:

- "goodput": the allocator's policy alone, which gives every GPU to whom it helps most;
- "planned": the same policy under `tuning.Sweep(deadline_s=...)`, by `SweepPlanner` as it runs live, which knows of the
  trials what the allocator knows: models fitted to what they measure, with 5 % noise;
- "static": each trial has as many GPUs as the cheapest fixed number that ends in time, on a cluster of eight times as
  many that is paid for until the end: RubberBand's baseline.

GPUs of "goodput" and "planned" are paid for while a trial has them. The deadline is a multiple of what "goodput" takes.
Bars: each deadline is met, with no more GPU-hours than "goodput", and with at most half of those of "static" in the
median, as RubberBand claims.
"""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import bar, finish, side_parser

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.cluster.packing import FreeResources
from placement.policies import FixedPolicy, Policy, Target, make_policy
from placement.simulator import SimulationReport, simulate
from placement.simulator.nodes.disturbances import Disturbances
from placement.simulator.workloads.traces import Lengths, TraceJob
from tuning import Promise, Sweep
from tuning.rung_sizes import SweepPlanner
from tuning.trials import TrialRecord

DATA = Path(os.environ.get("ELASTIC_RAY_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
CLUSTER, AT_A_TIME, TRIALS = "aws:4x4", 8, 32
PROMISE = Promise(metric="accuracy", mode="max", max_t=36, grace_period=4, reduction_factor=3)
FACTORS = (1.1, 1.5, 2.0, 3.0)


@dataclasses.dataclass(slots=True, kw_only=True)
class SweepPolicy:
    """Only the first trials that are not done exist for a policy; with a planner, they are held at its sizes."""

    inner: Policy
    planner: SweepPlanner | None = None
    records: dict[str, TrialRecord] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """See ``Policy``."""
        return self.inner.name

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """See ``Policy``."""
        order = sorted(jobs, key=lambda view: view.arrival)
        waiting = {view.job: Target(workers=0, reason="not proposed yet") for view in order[AT_A_TIME:]}
        chosen = order[:AT_A_TIME]
        if self.planner is not None:
            chosen = self._held(self.planner, chosen, cluster, now_s)
        return {**waiting, **self.inner.decide(chosen, cluster, now_s)}

    def _held(self, planner: SweepPlanner, views: list[JobView], cluster: Cluster, now_s: float) -> list[JobView]:
        there = {view.job for view in views}
        for job, known in self.records.items():
            if job not in there and known.running:  # it was cut at a rung, or has come to the last one
                values = (0.0,) * PROMISE.next_rung(max(len(known.values) - 1, 0))
                self.records[job] = dataclasses.replace(known, values=values, running=False)
        for view in views:
            progress = view.progress
            made = len(progress.epoch_ends) * progress.stride if progress is not None else 0
            self.records[view.job] = TrialRecord(trial=view.job, values=(0.0,) * made)
        room = FreeResources(cluster)
        found = planner.sizes(self.records, views, {view.job: room.slots(view).tolist() for view in views}, now_s)
        return [dataclasses.replace(view, held_at=found.get(view.job)) for view in views]


def lengths(trials: int) -> Lengths:
    """How far each trial comes: one in eta passes a rung."""
    order = [f"trial-{i:03d}" for i in range(trials)]
    random.Random(7).shuffle(order)
    epochs, expected = dict.fromkeys(order, PROMISE.rungs[0]), float(trials)
    for rung in PROMISE.rungs[1:]:
        expected /= PROMISE.reduction_factor
        epochs |= dict.fromkeys(order[: max(1, round(expected))], rung)
    return Lengths(epochs=epochs, declared=False)


def run(policy: Policy, trials: int, cluster: str = CLUSTER, planner: SweepPlanner | None = None) -> SimulationReport:
    """One sweep."""
    jobs = [
        TraceJob(name=f"trial-{i:03d}", time_s=0.0, application="cifar10", num_replicas=1, batch_size=128)
        for i in range(trials)
    ]
    return simulate(
        jobs,
        DATA / "profiles",
        cluster,
        rules="live",
        policy=SweepPolicy(inner=policy, planner=planner),
        requested=False,
        knowledge=True,
        lengths=lengths(trials),
        disturbances=Disturbances(noise=0.05),
    )


def main() -> None:
    """Every way, for deadlines of several lengths."""
    trials = 12 if side_parser(__doc__ or "", sides=False).parse_args().quick else TRIALS
    alone = run(make_policy("goodput"), trials)
    static = {gpus: run(FixedPolicy(workers=gpus), trials, f"aws:{2 * gpus}x4") for gpus in (1, 2, 4)}
    rows = [_row("goodput", "", alone.makespan_s, _gpu_hours(alone))]
    bars, over_static = [], []
    for factor in FACTORS:
        deadline_s = factor * alone.makespan_s
        planner = SweepPlanner(Sweep(deadline_s=deadline_s), PROMISE, trials, 0.0)
        planned = run(make_policy("goodput"), trials, planner=planner)
        rows.append(_row("planned", f"{factor:g} x", planned.makespan_s, _gpu_hours(planned)))
        bars.append(bar(f"deadline {factor:g} x", value=planned.makespan_s / deadline_s, limit=1.0, at_least=False))
        ours = _gpu_hours(planned) / _gpu_hours(alone)
        bars.append(bar(f"GPU-hours over those of goodput, {factor:g} x", value=ours, limit=1.0, at_least=False))
        paid = {
            AT_A_TIME * gpus * report.makespan_s / 3600: report
            for gpus, report in static.items()
            if report.makespan_s <= deadline_s
        }
        if paid:
            cheapest = min(paid)
            rows.append(_row("static", f"{factor:g} x", paid[cheapest].makespan_s, cheapest))
            over_static.append(_gpu_hours(planned) / cheapest)
    if over_static:
        median = statistics.median(over_static)
        bars.append(bar("GPU-hours over the cheapest static cluster", value=median, limit=0.5, at_least=False))
    finish("sweep_deadline", rows=rows, bars=bars)


def _gpu_hours(report: SimulationReport) -> float:
    return sum(sum(job.gpu_hours.values()) for job in report.jobs)


def _row(system: str, deadline: str, seconds: float, gpu_hours: float) -> dict[str, Any]:
    return {"system": system, "deadline": deadline, "takes [h]": seconds / 3600, "GPU-hours": gpu_hours}


if __name__ == "__main__":
    main()
