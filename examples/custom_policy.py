"""A policy of one's own: two small jobs on a local cluster of four slots, shared out by the function below.

    python examples/custom_policy.py              (about three quarters of a minute on two cores)
    python examples/custom_policy.py --smoke      (some seconds: until both jobs have trained)

The same function replays a trace in the simulator, beside the policies that come with it:

    python -m placement.simulator --policy examples/custom_policy.py:least_left_first,goodput \
        --trace TRACE.csv --profiles DIR --cluster aws:16x4 --rules live
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in workers

from placement import Cluster, JobView, get_or_create_allocator

SMOKE = "--smoke" in sys.argv[1:]


def least_left_first(jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> dict[str, int]:
    """Everybody's minimum; what is left goes to the job that has the fewest epochs to go, then to the next one.

    Answers with a number of workers for every job, 0 to let it wait. What a job tells of itself is described in
    ``placement.JobView``; a number that breaks a rule is refused, and jobs keep what they have.
    """
    room = sum(node.slots(jobs[0].bundle) for node in cluster.nodes if not node.draining)
    sizes = {job.job: 0 for job in jobs}
    for growing in (False, True):
        for job in sorted(jobs, key=epochs_left):
            wanted = job.useful_workers if growing else job.min_workers
            more = min(wanted - sizes[job.job], room)
            if sizes[job.job] + more >= job.min_workers:
                sizes[job.job] += more
                room -= more
    return sizes


def epochs_left(job: JobView) -> float:
    """As declared with ``remaining_epochs_until``, less those finished; a job that has not begun comes first."""
    return (job.progress.epochs or float("inf")) - len(job.progress.epoch_ends) if job.progress else 0.0


def train(config: dict[str, Any]) -> None:
    """A little regression, with a pause in each step that stands in for a larger net."""
    import torch

    import elastic_ray as er

    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    model: Any = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=64)
    for _epoch in er.remaining_epochs_until(config["epochs"]):
        totals = er.Accumulator()
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            totals["loss"] += loss.item() * len(x)
            time.sleep(0.00125 * len(x))
        er.report({"loss": totals["loss"] / len(inputs)})


def main() -> None:
    """Submit a long job and, once it has all slots, a short one; print how their sizes move until it has them again."""
    import ray
    import ray.train

    import elastic_ray as er

    ray.init(address="local", num_cpus=2 if SMOKE else 4, include_dashboard=False, log_to_driver=False)
    get_or_create_allocator(least_left_first)  # before the first job; it holds for all jobs of the cluster
    folder = tempfile.mkdtemp()

    def submit(name: str, epochs: int) -> er.JobHandle:
        return er.ElasticTrainer(
            train,
            train_loop_config={"epochs": epochs},
            scaling_config=ray.train.ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 1}),
            run_config=ray.train.RunConfig(name=name, storage_path=folder),
        ).submit()

    begin_s, shown, all_slots = time.monotonic(), "", 1 if SMOKE else 4
    jobs = {"long": submit("long", epochs=10_000)}
    while not all(job.done() for job in jobs.values()):
        statuses = {name: job.status() for name, job in jobs.items()}
        if statuses["long"].workers >= all_slots and "short" not in jobs:
            jobs["short"] = submit("short", epochs=2 if SMOKE else 12)
        if "short" in jobs and jobs["short"].done() and statuses["long"].workers >= all_slots:
            jobs["long"].stop()  # it has all slots again: enough has been seen
        sizes = ", ".join(f"{name} {status.workers}" for name, status in statuses.items())
        if sizes != shown:
            print(f"{time.monotonic() - begin_s:5.1f} s  workers: {sizes}", flush=True)
            shown = sizes
        time.sleep(0.1)
    for name, job in jobs.items():
        print(f"{name}: loss {job.result().metrics['loss']:.2g} after {job.status().epoch} epochs")
        for event in job.events():
            if event.from_workers != event.to_workers:
                print(f"    {event.from_workers} -> {event.to_workers} workers: {event.reason}")
    ray.shutdown()


if __name__ == "__main__":
    main()
