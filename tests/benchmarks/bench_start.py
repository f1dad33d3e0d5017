"""From submission to the first training step with two workers, against Ray Train, and what follows in the first minute.

Two orders of events. Jobs follow each other, as in a script or a shell's loop: each ``fit()`` ends, and the next begins
at once, 8 or 20 s later. And a job that begins once the pool is full, then grows and loses a worker.

Bars: a job that follows 8 s after the one before makes its first step within 0.25 x Ray Train's time in the same run,
the cluster's first one within 0.4 x; the first 20 s train at 0.8 of the later speed at least. With a full pool a fifth
of Ray Train's time; such a job grows in its first seconds within 5 s, for the allocator has to see the room, and
replaces a worker that is killed within 3 s, once the process that growth took has been replaced in the pool.
"""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import common
from common import StepLog, bar, finish, median, ratio, side_parser, wait_until
from elastic_side import ElasticJob
from ray_train_baseline import RayTrainJob
from scenarios import START_TIMEOUT_S, Job, cluster, observe

from tests.local_cluster import clean_up

WORKERS = 2
GAPS_S = (None, 8.0, 8.0, 0.0, 20.0)  # between the end of one job and the beginning of the next; None: the first
FIRST_S, TRAINS_S = 20.0, 45.0
_EIGHT = "8 s after the one before"
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


def _model() -> Any:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(common.FEATURES, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))


def _elastic_loop(config: dict[str, Any]) -> None:
    import torch

    import elastic_ray as er

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    parallel = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(common.Rows(), batch_size=common.GLOBAL_BATCH, drop_last=True)
    log, last, step = StepLog(Path(config["log"])), Path(config["last"]), 0
    for _ in er.remaining_epochs_until(1_000_000):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(parallel(x), y).backward()
            optimizer.step()
            step += 1
            if er.get_context().get_world_rank() == 0:
                log.append(world=WORKERS, step=step)
            if last.exists() and step >= int(last.read_text()):
                return


def _ray_train_loop(config: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch
    import torch

    model = _model()
    parallel = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = torch.utils.data.DataLoader(common.Rows(), batch_size=common.GLOBAL_BATCH // WORKERS, drop_last=True)
    log, last, step = StepLog(Path(config["log"])), Path(config["last"]), 0
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(parallel(x), y).backward()
            optimizer.step()
            step += 1
            if ray.train.get_context().get_world_rank() == 0:
                log.append(world=WORKERS, step=step)
            if last.exists() and step >= int(last.read_text()):
                return


def _fit(kind: type[Job], folder: Path, trains_s: float) -> StepLog:
    """``fit()`` of a job that ends some seconds after its first step; the log of its steps."""
    import ray.train
    import ray.train.torch

    import elastic_ray

    folder.mkdir(parents=True)
    log, last = StepLog(folder / "steps"), folder / "last"

    def end() -> None:
        wait_until(lambda: bool(log.read()), START_TIMEOUT_S)
        time.sleep(trains_s)
        writing = last.with_suffix(".new")
        writing.write_text(str(log.read()[-1].step + 100))  # ahead of every rank
        writing.rename(last)

    elastic = kind is ElasticJob
    trainer: Any = elastic_ray.ElasticTrainer if elastic else ray.train.torch.TorchTrainer
    backend = {} if elastic else {"torch_config": ray.train.torch.TorchConfig(backend="gloo")}
    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    trainer(
        _elastic_loop if elastic else _ray_train_loop,
        train_loop_config={"log": str(log.path), "last": str(last)},
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS, resources_per_worker=common.BUNDLE),
        run_config=ray.train.RunConfig(name=folder.name, storage_path=str(folder)),
        **backend,
    ).fit()
    return log


def _import_as_scripts_do() -> None:
    """Before ``fit()``, from where time counts; else the first job would pay for what no other one does."""
    import ray.train.torch

    from elastic_ray.driver import trainer

    assert ray.train.torch and trainer


def follow(kind: type[Job]) -> list[dict[str, Any]]:
    """Jobs that follow each other on a new cluster of four CPUs: time to the first step, early and late speed."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    rows: list[dict[str, Any]] = []
    _import_as_scripts_do()
    with cluster(nodes=1, slots=4):
        for number, gap_s in enumerate(GAPS_S):
            time.sleep(gap_s or 0.0)
            begin_s = time.time()
            # Of Ray Train's only the start is compared: its jobs may be short.
            trains_s = TRAINS_S if kind is ElasticJob and number in (0, 1) else 8.0
            steps = _fit(kind, folder / f"follows-{number}", trains_s).read()
            first_s = steps[0].time_s
            event = "first of all" if gap_s is None else f"{gap_s:g} s after the one before"
            rows.append({"system": kind.name, "event": event, "seconds": first_s - begin_s})
            print(f"  {kind.name}: {event}: {first_s - begin_s:.2f} s", flush=True)
            if trains_s == TRAINS_S:
                early = sum(each.time_s < first_s + FIRST_S for each in steps) / FIRST_S
                late = sum(each.time_s >= first_s + FIRST_S for each in steps) / (steps[-1].time_s - first_s - FIRST_S)
                rows.append({"system": kind.name, "event": f"{event}: early speed", "seconds": early / late})
                print(f"  {kind.name}: {event}: steps/s of the first {FIRST_S:g} s / later {early / late:.2f}")
    return rows


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
    parser = side_parser(__doc__ or "")
    parser.add_argument(
        "--order", choices=("both", "follow", "full-pool"), default="both", help="which order of events"
    )
    options = parser.parse_args()
    options.repeats = options.repeats or (1 if options.quick else 3)
    orders = [each for name, each in (("follow", follow), ("full-pool", measure)) if options.order in ("both", name)]
    rows: list[dict[str, Any]] = []
    failed = True
    try:
        for _ in range(options.repeats):
            for side, kind in (("ray-train", RayTrainJob), ("elastic-ray", ElasticJob)):
                if options.side in ("both", side):
                    for order in orders:
                        rows.extend(order(kind))
        failed = False
    finally:
        clean_up(failed=failed)

    def of(kind: type[Job], event: str) -> float | None:
        found = [row["seconds"] for row in rows if (row["system"], row["event"]) == (kind.name, event)]
        return median(each for each in found if each is not None)

    theirs = of(RayTrainJob, "second job")

    def part(event: str) -> float | None:
        """Our time as a part of Ray Train's for a job that follows after 8 s, which is none of its slower ones."""
        base, ours = of(RayTrainJob, _EIGHT), of(ElasticJob, event)
        return ours / base if ours is not None and base is not None else None

    early = [of(ElasticJob, f"{event}: early speed") for event in ("first of all", _EIGHT)]
    slowest = min((each for each in early if each is not None), default=None)
    bars = [
        bar("8 s after the one before, part of Ray Train's", value=part(_EIGHT), limit=0.25, at_least=False),
        bar("cluster's first, part of Ray Train's", value=part("first of all"), limit=0.4, at_least=False),
        bar("speed of the first 20 s, part of the later", value=slowest, limit=0.8, at_least=True),
        bar(
            "first step of the cluster's first job of two workers, times sooner than Ray Train's",
            value=ratio(theirs, of(ElasticJob, "first job")),
            limit=1,
            at_least=True,
        ),
        bar(
            "first step of the cluster's second job of two workers, times sooner than Ray Train's",
            value=ratio(theirs, of(ElasticJob, "second job")),
            limit=5,
            at_least=True,
        ),
        bar("growth in a job's first seconds [s]", value=of(ElasticJob, "growth"), limit=5, at_least=False),
        bar("replacement in a job's first seconds [s]", value=of(ElasticJob, "replacement"), limit=3, at_least=False),
    ]
    finish("start", rows=rows, bars=bars)


if __name__ == "__main__":
    main()
