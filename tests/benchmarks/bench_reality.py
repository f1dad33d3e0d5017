"""The simulator against reality: twelve jobs on a local Ray cluster, recorded, decided anew and simulated.

The same twelve jobs of three kinds, of one to seven minutes on one worker, arrive one after the other on two nodes of
three slots, under one policy after the other. The allocator records what it is told (``AllocatorConfig(record=...)``).
Then, for each policy:

- replay: the recorded events, told to a new core, lead to the same decisions, to the letter;
- completion: the simulator, given the profiles that the jobs of the *first* run fitted, and how long starts and pauses
  took there, predicts the average completion time of every run within 10 %, and puts the policies in the same order;
- ends: what `elastic-ray simulate --live` says at some moments after the last arrival, and what then came. The error is
  relative to the time that a job had left; bar 15 % for the median.

What a worker computes is a stand-in: a step is a real forward, backward, all-reduce and update of a tiny model, and a
sleep that is a known function of nodes, workers and batch. Two cores so do for many workers. Recordings are kept under
`--keep`, and `--from` compares them again without a cluster.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import BUNDLE, bar, finish
from scenarios import cluster

from placement.allocator.config import AllocatorConfig
from placement.allocator.core import AllocatorCore
from placement.allocator.recording import Life, read_recording, replay
from placement.policies import Policy, make_policy
from placement.policies.baselines.fixed import FixedPolicy
from placement.simulator import simulate
from placement.simulator.results.outlook import outlook
from placement.simulator.workloads.recorded import RecordedWorkload, recorded_workload
from placement.simulator.workloads.traces import Lengths
from placement.simulator.world.rules import LIVE_PACE, LiveRules
from tests.local_cluster import clean_up

NODES, SLOTS = 2, 3
BATCH = 32
STEPS_PER_EPOCH = 10
TIMEOUT_S = 1800.0
ASKED_EVERY_S = 20.0
LEFT_S = 15.0  # of jobs that are nearer to their end nobody asks when it will be
POLICIES: Mapping[str, Policy] = {
    "goodput": make_policy("goodput"),
    "fair_share": make_policy("fair_share"),
    "static": FixedPolicy(workers=1),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of job: its stand-in for computation.

    A step takes ``fixed_s`` + ``sample_s`` x local batch, and where there are several workers ``local_s`` on one node,
    ``remote_s`` on two, and ``each_s`` for every worker beyond the second.
    """

    name: str
    fixed_s: float
    sample_s: float
    local_s: float
    remote_s: float
    each_s: float

    def step_s(self, nodes: int, workers: int, local_batch: int) -> float:
        """The time that a step is to take [s]."""
        sync_s = 0.0 if workers == 1 else (self.remote_s if nodes > 1 else self.local_s)
        return self.fixed_s + self.sample_s * local_batch + sync_s + self.each_s * max(workers - 2, 0)


KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="small", fixed_s=0.05, sample_s=0.02, local_s=0.04, remote_s=0.10, each_s=0.01),
        Kind(name="medium", fixed_s=0.05, sample_s=0.03, local_s=0.06, remote_s=0.20, each_s=0.01),
        Kind(name="large", fixed_s=0.10, sample_s=0.04, local_s=0.10, remote_s=0.30, each_s=0.02),
    )
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A job: its kind, when it is submitted [s], and how many epochs of ten steps it trains."""

    name: str
    kind: Kind
    arrival_s: float
    epochs: int

    @property
    def alone_s(self) -> float:
        """Its steps on one worker [s]."""
        return self.epochs * STEPS_PER_EPOCH * self.kind.step_s(1, 1, BATCH)


_ORDER = (
    *("large", "small", "medium", "small", "large", "medium"),
    *("small", "medium", "small", "large", "medium", "small"),
)
_EPOCHS = {"small": (10, 14), "medium": (14, 20), "large": (22, 32)}


def plans(every_s: float, part: float, count: int) -> tuple[JobPlan, ...]:
    """The first ``count`` of the twelve jobs, one every ``every_s``, with this part of their epochs."""
    return tuple(
        JobPlan(
            name=f"{kind}-{i}",
            kind=KINDS[kind],
            arrival_s=i * every_s,
            epochs=max(2, round(part * _EPOCHS[kind][i % 2])),
        )
        for i, kind in enumerate(_ORDER[:count])
    )


# -- the real runs -------------------------------------------------------------------------------------------


def train_loop(config: dict[str, Any]) -> None:
    """A plain loop that waits as long as its stand-in says."""
    import torch

    import elastic_ray as er

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind = Kind(**config["kind"])
    x, y = torch.randn(BATCH * STEPS_PER_EPOCH, 8), torch.randint(4, (BATCH * STEPS_PER_EPOCH,))
    module = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(module, optimizer)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(x, y), batch_size=BATCH)
    for _ in er.remaining_epochs_until(config["epochs"]):
        for rows, labels in loader:
            optimizer.zero_grad()
            context = er.get_context()
            workers = context.get_world_size()
            nodes = 1 if context.get_local_world_size() == workers else NODES
            time.sleep(kind.step_s(nodes, workers, len(rows)))
            torch.nn.functional.cross_entropy(model(rows), labels).backward()
            optimizer.step()


def run(policy: str, jobs: Sequence[JobPlan], folder: Path) -> None:
    """Train them for real under a policy; leaves ``events.jsonl`` and ``jobs.json`` in the folder."""
    import ray.train

    import elastic_ray
    from placement.allocator.actor import get_or_create_allocator

    folder.mkdir(parents=True, exist_ok=True)
    record = (folder / "events.jsonl").resolve()
    record.unlink(missing_ok=True)
    with (
        cluster(nodes=NODES, slots=SLOTS),
        tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as storage,
    ):
        config = AllocatorConfig(record=str(record), metrics=False)
        allocator = get_or_create_allocator(POLICIES[policy], config=config)
        ray.get(allocator.snapshot.remote(), timeout=180)
        zero_s = time.monotonic()

        def complete(plan: JobPlan) -> list[str]:
            time.sleep(max(0.0, zero_s + plan.arrival_s - time.monotonic()))
            handle = elastic_ray.ElasticTrainer(
                train_loop,
                train_loop_config={"epochs": plan.epochs, "kind": dataclasses.asdict(plan.kind)},
                scaling_config=ray.train.ScalingConfig(num_workers=(1, NODES * SLOTS), resources_per_worker=BUNDLE),
                run_config=ray.train.RunConfig(name=plan.name, storage_path=storage),
                elastic_config=elastic_ray.ElasticConfig(tensorboard=False, metrics=False),
                model_fingerprint=plan.kind.name,
            ).submit()
            handle.result(timeout=TIMEOUT_S)
            print(f"  {policy}: {plan.name} after {time.monotonic() - zero_s - plan.arrival_s:.1f} s", flush=True)
            return [event.to_json() for event in handle.events()]

        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            events = dict(zip((plan.name for plan in jobs), pool.map(complete, jobs), strict=True))
    (folder / "jobs.json").write_text(json.dumps(events))


# -- what came of them ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reality:
    """One run.

    Attributes:
        policy: its name here.
        life: what its allocator was told and decided.
        workload: what ran.
        first_s: mean time from the launch of workers to training, of jobs that have no others [s].
        start_s: mean time from a grant of more workers until they had joined [s].
        pause_s: mean pause of a change of size [s].
    """

    policy: str
    life: Life
    workload: RecordedWorkload
    first_s: float
    start_s: float
    pause_s: float

    @property
    def completion_s(self) -> float:
        """Mean time from a job's first heartbeat to its end [s]."""
        return statistics.fmean((job.end_s or 0.0) - job.arrival_s for job in self.workload.jobs)


def read(policy: str, folder: Path) -> Reality:
    """A run from its folder."""
    from elastic_ray.events import EventKind, JobEvent

    with (folder / "events.jsonl").open() as file:
        life = read_recording(file)[-1]
    told = json.loads((folder / "jobs.json").read_text())
    events = {job: [JobEvent.from_json(line) for line in lines] for job, lines in told.items()}
    workload = recorded_workload(life)
    firsts = [float(e.detail["start_s"]) for es in events.values() for e in es if "start_s" in e.detail]
    resizes = [(job, e) for job, es in events.items() for e in es if e.kind is EventKind.RESIZE]
    grows = []
    for job, event in resizes:
        causes = [r.time_s for r in life.decided if r.job == job and r.time_s <= event.time_s]
        if event.to_workers > event.from_workers and causes:
            grows.append(event.time_s - causes[-1])
    return Reality(
        policy=policy,
        life=life,
        workload=workload,
        first_s=statistics.fmean(firsts),
        start_s=statistics.fmean(grows) if grows else 5.0,
        pause_s=statistics.fmean(event.pause_s for _, event in resizes) if resizes else 0.1,
    )


def predicted(seen: Reality, policy: str) -> float:
    """Mean completion time under a policy [s], by the profiles of a run."""
    rules = LiveRules(
        pause=seen.pause_s,
        start=seen.start_s,
        first=seen.first_s,
        slow_sia=False,
        most_workers=seen.workload.most_workers,
        pace=LIVE_PACE,
    )
    report = simulate(
        seen.workload.trace,
        seen.workload.applications,
        seen.workload.cluster,
        rules=rules,
        policy=POLICIES[policy],
        knowledge=True,
        lengths=Lengths(epochs=seen.workload.epochs),
    )
    return report.avg_jct_s


def differences(life: Life) -> int:
    """Decisions of a replay that are not those that were recorded."""
    again = replay(life)
    unlike = sum(repr(a) != repr(b) for a, b in zip(again, life.decided, strict=False))
    return unlike + abs(len(again) - len(life.decided))


def errors_of_ends(real: Reality) -> tuple[list[float], int]:
    """Relative errors of ends as the live command says them, of all jobs and moments after the last arrival.

    Returns:
        The errors, and how many ends it could not tell.
    """
    started_s = real.workload.started_s
    ends = {job.job: started_s + job.end_s for job in real.workload.jobs if job.end_s is not None}
    asked_s = started_s + max(job.granted_s or job.arrival_s for job in real.workload.jobs) + 5.0
    errors: list[float] = []
    unknown = 0

    def ask(core: AllocatorCore, now_s: float) -> None:
        nonlocal asked_s, unknown
        if now_s < asked_s or not core.jobs:
            return
        asked_s = now_s + ASKED_EVERY_S
        for row in outlook(core.views(now_s), core.snapshot().cluster, POLICIES[real.policy], now_s, stay=True):
            left_s = ends[row.job] - now_s
            if left_s > LEFT_S and row.ends_s is None:
                unknown += 1  # it has no model yet, or is the first of its kind in its first epoch: "?" is printed
            elif left_s > LEFT_S:
                error = abs((row.ends_s or 0.0) - left_s) / left_s
                errors.append(error)
                if os.environ.get("VERBOSE"):
                    print(f"    {now_s - started_s:6.1f} {row.job:10} said {row.ends_s} came {left_s:.1f} {error:.0%}")

    replay(real.life, watch=ask)
    return errors, unknown


# -- the script ----------------------------------------------------------------------------------------------


def main() -> None:
    """Run, or read what was kept; compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three short jobs under one policy: shows that it runs")
    parser.add_argument("--policies", default=",".join(POLICIES), help="of these; the first run's profiles predict all")
    parser.add_argument("--every", type=float, default=25.0, help="seconds between two arrivals")
    parser.add_argument("--part", type=float, default=1.0, help="of the jobs' epochs; at 1 a run takes ten minutes")
    parser.add_argument("--keep", help="folder to keep the recordings in")
    parser.add_argument("--from", dest="source", help="folder of recordings that were kept; nothing runs")
    options = parser.parse_args()
    policies = ["goodput"] if options.quick else options.policies.split(",")
    jobs = plans(5.0, 0.25, 3) if options.quick else plans(options.every, options.part, len(_ORDER))
    with tempfile.TemporaryDirectory(prefix="bench-reality-") as own:
        folder = Path(options.source or options.keep or own)
        if not options.source:
            failed = True
            try:
                for policy in policies:
                    print(
                        f"{policy}: {len(jobs)} jobs, {sum(job.alone_s for job in jobs):.0f} s of steps on one worker"
                    )
                    run(policy, jobs, folder / policy)
                failed = False
            finally:
                clean_up(failed=failed)
        compare([read(policy, folder / policy) for policy in policies])


def compare(runs: Sequence[Reality]) -> None:
    """Print the table and the bars."""
    rows = []
    for real in runs:
        said_s, (errors, unknown) = predicted(runs[0], real.policy), errors_of_ends(real)
        rows.append(
            {
                "policy": real.policy,
                "events": len(real.life.events),
                "decisions": len(real.life.decided),
                "replayed otherwise": differences(real.life),
                "completion [s]": real.completion_s,
                "simulated [s]": said_s,
                "simulated / real": said_s / real.completion_s,
                "ends told": len(errors),
                "not told": unknown,
                "median error": statistics.median(errors) if errors else None,
                "largest error": max(errors, default=None),
                "first / start / pause [s]": f"{real.first_s:.1f} / {real.start_s:.1f} / {real.pause_s:.2f}",
            }
        )
    unlike = sum(row["replayed otherwise"] for row in rows)
    worst = max(abs(row["simulated / real"] - 1.0) for row in rows)
    orders = [
        [row["policy"] for row in sorted(rows, key=lambda row: row[key])]  # type: ignore[return-value]
        for key in ("completion [s]", "simulated [s]")
    ]
    median_error = max((row["median error"] for row in rows if row["median error"] is not None), default=None)
    finish(
        "reality",
        rows=rows,
        bars=[
            bar("decisions replayed otherwise", value=float(unlike), limit=0, at_least=False),
            bar("error of average completion, worst policy", value=worst, limit=0.10, at_least=False),
            bar("policies out of order", value=float(orders[0] != orders[1]), limit=0, at_least=False),
            bar("error of ends, median, worst policy", value=median_error, limit=0.15, at_least=False),
        ],
    )


if __name__ == "__main__":
    main()
