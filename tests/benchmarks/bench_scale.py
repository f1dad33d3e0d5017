"""Many jobs, many submissions, one wide job, very many reports: memory and CPU of what is central, over time.

Central is what serves one job or all of them beside their workers: the job's controller, the allocator, and whatever
other actor is there that is no worker. Four parts, in turns or some of them (`--parts jobs,cycles,wide,reports`):

- jobs: 30 jobs at once, of one small worker each; as many as fit, where a worker has up to 0.4 GB;
- cycles: 200 jobs that are submitted and stopped, four at a time; every tenth trains first;
- wide: one job of 16 workers;
- reports: one job that calls `report` 100,000 times.

Each is watched once it is under way: private memory (USS) and CPU time of each process, twice a second. Bar: flat,
which is the median of the last third no more than 3 MB above that of the first (of the middle third for what grows to
its working size first: cycles and reports begin with an empty history), and no more CPU than 1.5 times as much.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
from common import bar, finish, side_parser
from scenarios import cluster

from tests.local_cluster import clean_up

PARTS = ("jobs", "cycles", "wide", "reports")
WORKERS = ("Worker", "NoticeWatcher")  # classes of processes, as their titles say
OF_RAY = ("IDLE", "SPILL", "RESTORE", "DELETE", "DashboardAgent", "RuntimeEnvAgent")
GROWTH_MB = 3.0
CPU_RATIO = 1.5
IDLE_CORES = 0.01  # less CPU than this is none
START_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is done.

    Attributes:
        jobs: at once.
        cycles: submissions.
        wide: workers of the wide job.
        reports: of one job.
        watch_s: how long what only runs is watched [s].
        limit_s: when cycles and reports end at the latest [s].
        report_pause_s: between two reports [s]. With 0 they come faster than a controller takes them in.
    """

    jobs: int = 30
    cycles: int = 200
    wide: int = 16
    reports: int = 100_000
    watch_s: float = 120.0
    limit_s: float = 900.0
    report_pause_s: float = 0.0025


QUICK = Size(jobs=4, cycles=12, wide=4, reports=6000, watch_s=15.0, limit_s=60.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A process at one moment: how far the part is (seconds, cycles or reports), its memory and its CPU time so far."""

    at: float
    uss_mb: float
    cpu_s: float
    time_s: float


# -- watching ------------------------------------------------------------------------------------------------


class Watch:
    """Looks at the central processes twice a second, in a thread.

    Args:
        at: how far the part is.
    """

    def __init__(self, at: Callable[[], float]) -> None:
        self._at = at
        self._over = threading.Event()
        self._samples: dict[tuple[str, int], list[Sample]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.5):
            for process, name in central():
                with contextlib.suppress(psutil.Error):
                    cpu, uss_mb = process.cpu_times(), process.memory_full_info().uss / 1e6
                    sample = Sample(at=self._at(), uss_mb=uss_mb, cpu_s=cpu.user + cpu.system, time_s=time.monotonic())
                    self._samples.setdefault((name, process.pid), []).append(sample)

    def by_name(self) -> dict[str, list[list[Sample]]]:
        """Series of the processes that were there for most of the time, by actor class."""
        lasting: dict[str, list[list[Sample]]] = {}
        most = max((len(samples) for samples in self._samples.values()), default=0)
        for (name, _), samples in self._samples.items():
            if len(samples) >= max(6, 0.7 * most):
                lasting.setdefault(name, []).append(samples)
        return lasting


def central() -> Iterator[tuple[psutil.Process, str]]:
    """This process (the driver), and the actors below it that are no workers, by class."""
    yield psutil.Process(), "driver"
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            kind = title.rpartition(":")[2].partition(".")[0].strip()  # ray::Class.method, or ray::name:Class.method
            if title.startswith("ray::") and not kind.startswith((*WORKERS, *OF_RAY)):
                yield process, kind


def rows_of(part: str, watch: Watch, unit: str, per: float, *, settled: bool) -> list[dict[str, Any]]:
    """A line for each class of process: sizes, growth and slopes, of the worst of its processes; and its CPU."""
    rows = []
    for name, series in sorted(watch.by_name().items()):
        growths = [growth_mb(samples, settled=settled) for samples in series]
        worst = series[growths.index(max(growths))]
        loads = [(load(third(samples, 0)), load(third(samples, 2))) for samples in series]
        rows.append(
            {
                "part": part,
                "process": name,
                "number": len(series),
                "memory [MB]": statistics.median(samples[-1].uss_mb for samples in series),
                "most [MB]": max(sample.uss_mb for samples in series for sample in samples),
                "growth [MB]": max(growths),
                f"slope [MB per {per:g} {unit}]": slope(worst) * per,
                "cores, first third": sum(first for first, _ in loads),
                "cores, last third": sum(last for _, last in loads),
            }
        )
    return rows


def third(samples: Sequence[Sample], number: int) -> Sequence[Sample]:
    """The first (0), second or last of three equal parts."""
    return samples[number * len(samples) // 3 : (number + 1) * len(samples) // 3]


def growth_mb(samples: Sequence[Sample], *, settled: bool) -> float:
    """Median of the last third above that of the first, or, not ``settled`` in the beginning, the second."""
    before, after = (
        statistics.median(each.uss_mb for each in third(samples, number)) for number in (0 if settled else 1, 2)
    )
    return after - before


def slope(samples: Sequence[Sample]) -> float:
    """MB for each unit of progress, by least squares over the last two thirds."""
    late = samples[len(samples) // 3 :]
    at, uss = [each.at for each in late], [each.uss_mb for each in late]
    return statistics.linear_regression(at, uss).slope if len(set(at)) > 1 else 0.0


def load(samples: Sequence[Sample]) -> float:
    """Cores in use, on average."""
    return (samples[-1].cpu_s - samples[0].cpu_s) / max(samples[-1].time_s - samples[0].time_s, 1e-9)


def bars_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Flat memory of each, and CPU of all that only run."""
    bars = []
    for row in rows:
        if row["process"] == "driver":
            continue  # told, but it keeps what it has asked for
        what = f"{row['part']}: {row['process']}"
        bars.append(bar(f"{what}: growth [MB]", value=row["growth [MB]"], limit=GROWTH_MB, at_least=False))
        first, last = (max(row[f"cores, {which} third"], IDLE_CORES) for which in ("first", "last"))
        bars.append(bar(f"{what}: CPU, last third / first", value=last / first, limit=CPU_RATIO, at_least=False))
    return bars


# -- the jobs ------------------------------------------------------------------------------------------------


def train(config: dict[str, Any]) -> None:
    """Steps of ``pause_s`` [s] until ``epochs`` of eight are over, with ``reports`` reports in the first one."""
    import torch

    import elastic_ray as er

    torch.set_num_threads(1)
    model: Any = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(128, 4), torch.randn(128, 1))
    for _ in er.remaining_epochs_until(config["epochs"]):
        for x, y in er.AdaptiveDataLoader(data, batch_size=16):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            time.sleep(config["pause_s"])
        for number in range(config["reports"]):
            er.report({"loss": 1.0 / (number + 1), "number": number})
            time.sleep(config["report_pause_s"])


def submit(folder: str, name: str, *, workers: int = 1, **config: Any) -> Any:
    """A job of these workers."""
    import ray.train

    import elastic_ray as er

    return er.ElasticTrainer(
        train,
        train_loop_config={"epochs": 1_000_000, "pause_s": 0.2, "reports": 0, "report_pause_s": 0.0, **config},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"slot": 1}),
        run_config=ray.train.RunConfig(name=name, storage_path=folder),
    ).submit()


def wait_for_steps(jobs: Sequence[Any], steps: int = 5) -> None:
    """Until each has trained so far.

    Raises:
        TimeoutError: one of them does not.
    """
    deadline = time.monotonic() + START_S
    for job in jobs:
        while job.status().step < steps:
            if time.monotonic() > deadline or job.done():
                raise TimeoutError(f"it does not train: {job.status()}")
            time.sleep(0.2)


def end(jobs: Sequence[Any]) -> None:
    """Stop them and wait for it."""
    for job in jobs:
        job.stop(now=True)
    for job in jobs:
        job.result(timeout=120)


# -- the parts -----------------------------------------------------------------------------------------------


def many_jobs(size: Size, folder: str) -> list[dict[str, Any]]:
    """Jobs at once."""
    begin_s = time.monotonic()
    jobs = [submit(folder, f"job{number}") for number in range(size.jobs)]
    wait_for_steps(jobs)
    print(f"  {size.jobs} jobs train after {time.monotonic() - begin_s:.0f} s; {used_gb():.1f} GB in use", flush=True)
    rows = watched("jobs", size)
    end(jobs)
    return rows


def wide_job(size: Size, folder: str) -> list[dict[str, Any]]:
    """One job of many workers."""
    job = submit(folder, "wide", workers=size.wide)
    wait_for_steps([job])
    rows = watched("wide", size)
    end([job])
    return rows


def watched(part: str, size: Size) -> list[dict[str, Any]]:
    """What runs is watched for a while."""
    begin_s = time.monotonic()
    with Watch(lambda: time.monotonic() - begin_s) as watch:
        time.sleep(size.watch_s)
    return rows_of(part, watch, "s", 3600.0, settled=True)


def cycles(size: Size, folder: str) -> list[dict[str, Any]]:
    """Jobs that are submitted and stopped."""
    begin_s, done = time.monotonic(), 0
    with Watch(lambda: float(done)) as watch:
        while done < size.cycles and time.monotonic() - begin_s < size.limit_s:
            jobs = [submit(folder, f"cycle{done + number}") for number in range(4)]
            if done % 40 == 0:
                wait_for_steps(jobs)
            end(jobs)
            done += len(jobs)
    print(f"  {done} cycles in {time.monotonic() - begin_s:.0f} s", flush=True)
    return rows_of("cycles", watch, "cycles", 1000.0, settled=False)


def reports(size: Size, folder: str) -> list[dict[str, Any]]:
    """One job that reports again and again."""
    job = submit(folder, "reports", epochs=1, reports=size.reports, report_pause_s=size.report_pause_s)
    wait_for_steps([job])
    begin_s, told = time.monotonic(), 0

    def at() -> float:
        nonlocal told
        with contextlib.suppress(TimeoutError):  # a controller that is busy with them
            told = max(told, int(job.status().metrics.get("number", 0)))
        return float(told)

    with Watch(at) as watch:
        while not job.wait(1.0) and time.monotonic() - begin_s < size.limit_s:
            pass
    print(f"  {told} reports in {time.monotonic() - begin_s:.0f} s", flush=True)
    end([] if job.done() else [job])
    return rows_of("reports", watch, "reports", 10_000.0, settled=False)


def used_gb() -> float:
    """Memory in use on this machine [GB]."""
    return float(psutil.virtual_memory().used / 1e9)


RUN = {"jobs": many_jobs, "cycles": cycles, "wide": wide_job, "reports": reports}


def main() -> None:
    """The parts in turns, each on a cluster of its own."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--parts", default=",".join(PARTS), help="which of them, with commas")
    for field in dataclasses.fields(Size):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=None)
    options = parser.parse_args()
    parts = options.parts.split(",")
    if wrong := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts must be of {', '.join(PARTS)}, but got {', '.join(wrong)}")
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Size)}
    base = QUICK if options.quick else Size()
    size = dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})
    failed = True
    try:
        for part in parts:
            print(f"{part}: {size}", flush=True)
            folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
            with folder, cluster(nodes=1, slots=max(size.jobs, size.wide, 4)):
                rows = RUN[part](size, folder.name)
            finish(f"scale: {part}", rows=rows, bars=bars_of(rows))
        failed = False
    finally:
        clean_up(failed=failed)


if __name__ == "__main__":
    main()
