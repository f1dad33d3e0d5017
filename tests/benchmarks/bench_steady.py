"""Changes of size that noise causes: three jobs on a busy machine for five minutes, under the live allocator.

Three jobs of ``bench_jobs`` on eight slots, each of one to eight workers, none of which ends. Nothing changes but what
they measure, on a machine with fewer cores than workers. Counted are all changes of a job's size from the moment when
all three train. Bar: 1.5 changes a job and minute. ``tests/placement/test_steady_sizes.py`` has scripted noise.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

from bench_jobs import SLOTS, elastic_loop
from common import BUNDLE, bar, finish, side_parser
from scenarios import cluster

from tests.local_cluster import clean_up

JOBS = ("a", "b", "c")
START_TIMEOUT_S = 240.0


def main() -> None:
    """Run three jobs, count changes."""
    options = side_parser(__doc__ or "", sides=False).parse_args()
    seconds = 30.0 if options.quick else 300.0
    failed = True
    try:
        changes, load = _changes(seconds)
        failed = False
    finally:
        clean_up(failed=failed)
    rows = [
        {"job": job, "sizes": " ".join(map(str, sizes)), "changes a minute": 60.0 * (len(sizes) - 1) / seconds}
        for job, sizes in changes.items()
    ]
    rate = statistics.fmean(float(row["changes a minute"]) for row in rows)
    bars = [bar("three jobs on a busy machine: changes a job and minute", value=rate, limit=1.5, at_least=False)]
    finish(f"steady sizes, load {load:.1f}", rows=rows, bars=bars)


def _changes(seconds: float) -> tuple[dict[str, list[int]], float]:
    """Return the sizes of each job in order, from the moment on when all train, and the machine's load."""
    import ray.train

    import elastic_ray
    from elastic_ray.events import EventKind

    with cluster(nodes=1, slots=SLOTS), tempfile.TemporaryDirectory(prefix="bench-") as folder:
        handles = {
            job: elastic_ray.ElasticTrainer(
                elastic_loop,
                train_loop_config={"epochs": 10_000},
                scaling_config=ray.train.ScalingConfig(num_workers=(1, SLOTS), resources_per_worker=BUNDLE),
                run_config=ray.train.RunConfig(name=job, storage_path=folder),
            ).submit()
            for job in JOBS
        }
        end_s = time.monotonic() + START_TIMEOUT_S
        while any(not handle.status().step for handle in handles.values()):
            if time.monotonic() > end_s:
                raise TimeoutError(f"a job has trained no step after {START_TIMEOUT_S:g} s")
            time.sleep(0.5)  # a benchmark's poll
        seen = {job: len(handle.events()) for job, handle in handles.items()}
        sizes = {job: [handle.status().workers] for job, handle in handles.items()}
        time.sleep(seconds)  # what is measured
        load = os.getloadavg()[0]
        for job, handle in handles.items():
            events = handle.events()[seen[job] :]
            sizes[job] += [event.to_workers for event in events if event.kind == EventKind.RESIZE]
            handle.stop(now=True)
        for handle in handles.values():
            handle.wait(60.0)
        return sizes, load


if __name__ == "__main__":
    main()
