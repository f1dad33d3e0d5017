"""From submission to the first training step with two workers, against Ray Train, and what follows in the first minute.

Bars: on a cluster where another job has run, a fifth of Ray Train's time in the same run; the second job grows in its
first seconds within 5 s, for the allocator has to see the room, and replaces a worker that is killed within 3 s, once
the process that growth took has been replaced in the pool.
"""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments, bar, finish, median, ratio, wait_until
from elastic_side import ElasticJob
from ray_train_baseline import RayTrainJob
from scenarios import START_TIMEOUT_S, Job, cluster, observe

from tests.local_cluster import clean_up

WORKERS = 2
POOL_TIMEOUT_S = 120.0
EVENT_TIMEOUT_S = 60.0


def first_step(kind: type[Job], folder: Path, name: str, *, workers: tuple[int, int]) -> tuple[Job, float]:
    """Submit a job; the job, and the time until its first committed step [s]."""
    begin_s = time.time()
    running = kind(folder / name, workers=workers)
    if not wait_until(lambda: bool(running.log.read()), START_TIMEOUT_S):
        running.check()
        raise TimeoutError(f"{running.name}: no step in {START_TIMEOUT_S:g} s")
    return running, running.log.read()[0].time_s - begin_s


def end(running: Job) -> None:
    """End a job and wait until it has gone."""
    if isinstance(running, ElasticJob):
        running.stop()
        running.handle.wait(60.0)
    else:
        assert isinstance(running, RayTrainJob)
        running.end()
    time.sleep(2.0)


def pool_is_filled(processes: int) -> bool:
    """Whether the cluster's pool has so many processes that have imported everything."""
    import ray

    from elastic_ray.warm_pool.pool import find_pool

    pool = find_pool()
    return pool is not None and sum(each.ready for each in ray.get(pool.processes.remote())) >= processes


class Other:
    """Holds room for a worker."""


def _occupy() -> Any:
    import ray

    other: Any = ray.remote(num_cpus=0, resources={"slot": 1})(Other)
    actor = other.remote()
    ray.get(actor.__ray_ready__.remote())
    return actor


def _grow(running: ElasticJob, other: Any) -> None:
    import ray

    ray.kill(other)
    running.resize(WORKERS + 1)


def _kill(running: ElasticJob) -> None:
    os.kill(running.pids()[WORKERS], signal.SIGKILL)


def measure(kind: type[Job]) -> list[dict[str, Any]]:
    """One system on a new cluster: a first job, a second one, and what becomes of that in its first seconds."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    rows: list[dict[str, Any]] = []

    def note(event: str, seconds: float | None) -> None:
        rows.append({"system": kind.name, "event": event, "seconds": seconds})
        print(f"  {kind.name}: {event}: {seconds:.2f} s" if seconds else f"  {kind.name}: {event}: never", flush=True)

    with cluster(nodes=1, slots=3):
        running, took_s = first_step(kind, folder, "first", workers=(WORKERS, WORKERS))
        note("first job", took_s)
        if isinstance(running, ElasticJob):
            wait_until(lambda: pool_is_filled(WORKERS + 1), POOL_TIMEOUT_S)
        end(running)
        if not isinstance(running, ElasticJob):
            running, took_s = first_step(kind, folder, "second", workers=(WORKERS, WORKERS))
            note("second job", took_s)
            end(running)
            return rows
        other = _occupy()
        running, took_s = first_step(kind, folder, "second", workers=(WORKERS, WORKERS + 1))
        note("second job", took_s)
        for event, act in (
            ("growth", functools.partial(_grow, running, other)),
            ("replacement", functools.partial(_kill, running)),
        ):
            begin_s = time.monotonic()
            wait_until(lambda: pool_is_filled(1), POOL_TIMEOUT_S)
            note(f"until a process is warm for {event}", time.monotonic() - begin_s)
            outcome = observe(running, act, event=event, world=WORKERS + 1, timeout_s=EVENT_TIMEOUT_S)
            note(event, outcome.pause.reached_s)
        end(running)
    return rows


def main() -> None:
    """Both sides in turns; medians are compared."""
    options = arguments(__doc__ or "")
    rows: list[dict[str, Any]] = []
    failed = True
    try:
        for _ in range(options.repeats):
            for side, kind in (("ray-train", RayTrainJob), ("elastic-ray", ElasticJob)):
                if options.side in ("both", side):
                    rows.extend(measure(kind))
        failed = False
    finally:
        clean_up(failed=failed)

    def of(kind: type[Job], event: str) -> float | None:
        found = [row["seconds"] for row in rows if (row["system"], row["event"]) == (kind.name, event)]
        return median(each for each in found if each is not None)

    theirs = of(RayTrainJob, "second job")
    bars = [
        bar("first job, times sooner", value=ratio(theirs, of(ElasticJob, "first job")), limit=1, at_least=True),
        bar("second job, times sooner", value=ratio(theirs, of(ElasticJob, "second job")), limit=5, at_least=True),
        bar("growth at once [s]", value=of(ElasticJob, "growth"), limit=5, at_least=False),
        bar("replacement at once [s]", value=of(ElasticJob, "replacement"), limit=3, at_least=False),
    ]
    finish("start", rows=rows, bars=bars)


if __name__ == "__main__":
    main()
