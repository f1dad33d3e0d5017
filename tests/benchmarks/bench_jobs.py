"""Four jobs that come and go on one cluster of eight slots: average completion time, against Ray Train.

The same four jobs, of one and a half to four minutes on two workers, arrive every 30 s. Under Ray Train each has the
usual two workers, so that nobody ever waits and half of the cluster or more idles while fewer are there; or all eight,
first come, first served; or one to eight in Ray Train's elastic mode. Under elastic_ray each may have one to eight and
the allocator decides, with nothing known of the jobs beforehand. Completion time counts from submission to result, cold
starts of controllers, workers and allocator included. Bars: average 1.3 x shorter than with two workers each, and no
longer than the best of the three.

What a worker computes is a stand-in: a step is a real forward, backward, all-reduce (1.1 MB) and update of a small
model, and
`time.sleep` of 4 ms for each sample of the local batch, as if the slot held an accelerator; slots are logical. Two
cores cannot speed real computation up eightfold, and every process that starts takes 5 s of a core here, which is why
the jobs are no shorter (`--quick`: two short ones, in which starts are most of the time). The global batch is 64 on
both sides, whatever the number of workers, and adaptive batches are off: all that is gained is gained by sizes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from common import BUNDLE, bar, finish, median, ratio, side_parser
from scenarios import cluster

from tests.local_cluster import clean_up

SLOTS = 8
FIXED_WORKERS = 2
BATCH = 64
SAMPLE_S = 0.004
STEPS_PER_EPOCH = 20
TIMEOUT_S = 900.0
RAY_TRAIN: dict[str, int | tuple[int, int]] = {
    "Ray Train, 2 workers each": FIXED_WORKERS,
    "Ray Train, 8 workers, first come first served": SLOTS,
    "Ray Train, elastic 1 to 8": (1, SLOTS),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A job: when it arrives [s], and how many epochs of 20 steps it trains; one takes 2.6 s on two workers."""

    name: str
    arrival_s: float
    epochs: int

    @property
    def alone_s(self) -> float:
        """Its stand-in for computation on two workers [s]."""
        return self.epochs * STEPS_PER_EPOCH * BATCH * SAMPLE_S / FIXED_WORKERS


JOBS = (
    JobPlan(name="a", arrival_s=0, epochs=96),
    JobPlan(name="b", arrival_s=30, epochs=36),
    JobPlan(name="c", arrival_s=60, epochs=60),
    JobPlan(name="d", arrival_s=90, epochs=48),
)
QUICK_JOBS = (JobPlan(name="a", arrival_s=0, epochs=8), JobPlan(name="b", arrival_s=5, epochs=4))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """How long a job took under one of the systems [s], and the sizes that it had, in order."""

    system: str
    job: str
    arrival_s: float
    time_s: float
    sizes: tuple[int, ...]

    def row(self) -> dict[str, Any]:
        """A line of the printed table."""
        return {
            "system": self.system,
            "job": self.job,
            "arrival [s]": self.arrival_s,
            "completion time [s]": self.time_s,
            "sizes": " ".join(map(str, self.sizes)),
        }


# -- the jobs ------------------------------------------------------------------------------------------------


def model_and_data() -> tuple[Any, Any]:
    """A classifier of random rows; 1280 of them are an epoch."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(BATCH * STEPS_PER_EPOCH, 32), torch.randint(10, (BATCH * STEPS_PER_EPOCH,))
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    )
    return model, torch.utils.data.TensorDataset(x, y)


def elastic_loop(config: dict[str, Any]) -> None:
    """Our side."""
    import torch

    import elastic_ray as er

    model, data = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(data, batch_size=BATCH)
    for epoch in er.remaining_epochs_until(config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            time.sleep(len(x) * SAMPLE_S)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        er.report({"epoch": epoch})


def ray_train_loop(config: dict[str, Any]) -> None:
    """The same loop as Ray Train's guide has it."""
    import ray.train
    import ray.train.torch
    import torch

    model, data = model_and_data()
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    local = BATCH // ray.train.get_context().get_world_size()
    loader = ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=local, shuffle=True))
    for epoch in range(config["epochs"]):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for x, y in loader:
            optimizer.zero_grad()
            time.sleep(len(x) * SAMPLE_S)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        ray.train.report({"epoch": epoch})


class _Driver:
    """Calls ``fit``, which blocks, in a process of its own that has imported all it needs beforehand."""

    def prepare(self) -> None:
        import ray.train.torch  # noqa: F401

    def fit(self, plan: JobPlan, storage: str, workers: int | tuple[int, int]) -> None:
        import ray.train
        import ray.train.torch

        ray.train.torch.TorchTrainer(
            ray_train_loop,
            train_loop_config={"epochs": plan.epochs},
            scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker=BUNDLE),
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            run_config=ray.train.RunConfig(name=plan.name, storage_path=storage),
        ).fit()


# -- both sides ----------------------------------------------------------------------------------------------


def run_ray_train(jobs: Sequence[JobPlan], system: str, workers: int | tuple[int, int]) -> list[Completion]:
    """Each job at so many workers; their drivers are up and wait before the first one arrives."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with cluster(nodes=1, slots=SLOTS), _folder() as folder:
        head = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
        driver = ray.remote(num_cpus=0)(_Driver).options(scheduling_strategy=head)
        drivers = {plan.name: driver.remote() for plan in jobs}
        ray.get([d.prepare.remote() for d in drivers.values()])  # type: ignore[attr-defined]

        def complete(plan: JobPlan) -> tuple[int, ...]:
            ray.get(drivers[plan.name].fit.remote(plan, folder, workers), timeout=TIMEOUT_S)  # type: ignore[attr-defined]
            return (workers,) if isinstance(workers, int) else workers

        return _on_arrival(system, jobs, complete)


def run_elastic(jobs: Sequence[JobPlan]) -> list[Completion]:
    """Each job between one worker and all slots."""
    import ray.train

    import elastic_ray
    from elastic_ray.events import EventKind

    with cluster(nodes=1, slots=SLOTS), _folder() as folder:

        def complete(plan: JobPlan) -> tuple[int, ...]:
            handle = elastic_ray.ElasticTrainer(
                elastic_loop,
                train_loop_config={"epochs": plan.epochs},
                scaling_config=ray.train.ScalingConfig(num_workers=(1, SLOTS), resources_per_worker=BUNDLE),
                run_config=ray.train.RunConfig(name=plan.name, storage_path=folder),
            ).submit()
            handle.result(timeout=TIMEOUT_S)
            wanted = (EventKind.STARTED, EventKind.RESIZE)
            return tuple(event.to_workers for event in handle.events() if event.kind in wanted)

        return _on_arrival("elastic-ray", jobs, complete)


def _on_arrival(
    system: str, jobs: Sequence[JobPlan], complete: Callable[[JobPlan], tuple[int, ...]]
) -> list[Completion]:
    """Submit every job when it arrives, wait for all."""
    zero_s = time.monotonic()

    def run(plan: JobPlan) -> Completion:
        time.sleep(max(0.0, zero_s + plan.arrival_s - time.monotonic()))
        begin_s = time.monotonic()
        sizes = complete(plan)
        took_s = time.monotonic() - begin_s
        print(f"  {system}: job {plan.name} after {took_s:.1f} s, sizes {sizes}", flush=True)
        return Completion(system=system, job=plan.name, arrival_s=plan.arrival_s, time_s=took_s, sizes=sizes)

    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)


def _in_turns(jobs: Sequence[JobPlan], *, wanted: str, repeats: int) -> list[Completion]:
    sides: list[tuple[str, Callable[[Sequence[JobPlan]], list[Completion]]]] = [
        ("ray-train", functools.partial(run_ray_train, system=system, workers=workers))
        for system, workers in RAY_TRAIN.items()
    ]
    sides.append(("elastic-ray", run_elastic))
    completions: list[Completion] = []
    failed = True
    try:
        for number in range(repeats):
            for side, measure in sides:
                if wanted in ("both", side):
                    print(f"repetition {number + 1} of {repeats}: {side}", flush=True)
                    completions += measure(jobs)
        failed = False
    finally:
        clean_up(failed=failed)
    return completions


def main() -> None:
    """Both sides in turns; the averages over all jobs are compared, the median of repetitions for each job."""
    options = side_parser(__doc__ or "").parse_args()
    jobs = QUICK_JOBS if options.quick else JOBS
    print(f"stand-in for computation: {SAMPLE_S * 1000:g} ms of sleep per sample; {SLOTS} logical slots")
    for plan in jobs:
        print(f"  job {plan.name}: arrives at {plan.arrival_s:g} s, {plan.alone_s:.0f} s of steps on two workers")
    outcomes = _in_turns(jobs, wanted=options.side, repeats=options.repeats or 1)
    averages = {system: _average(outcomes, jobs, system) for system in (*RAY_TRAIN, "elastic-ray")}
    ours, limits = averages["elastic-ray"], dict.fromkeys(RAY_TRAIN, 1.0) | {next(iter(RAY_TRAIN)): 1.3}
    bars = [
        bar(
            f"completion time, times shorter than {system}",
            value=ratio(averages[system], ours),
            limit=limit,
            at_least=True,
        )
        for system, limit in limits.items()
    ]
    rows = [outcome.row() for outcome in outcomes]
    summary = [{"system": system, "average completion time [s]": average} for system, average in averages.items()]
    finish("jobs: every job", rows=rows, bars=[])
    finish("jobs", rows=summary, bars=bars)


def _average(outcomes: Sequence[Completion], jobs: Sequence[JobPlan], system: str) -> float | None:
    times = [median(o.time_s for o in outcomes if (o.system, o.job) == (system, plan.name)) for plan in jobs]
    known = [time_s for time_s in times if time_s is not None]
    return statistics.mean(known) if known else None


if __name__ == "__main__":
    main()
