"""Monitoring of one run's steps: the requests for measurements, and their results (pure)."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_ray.monitoring.gradient_measures import StepMeasures
from elastic_ray.monitoring.measures import FIELDS, WorkerMeasures, busiest, mib, packed, traffic_fields, unpacked
from elastic_ray.monitoring.monitor import Monitor

_MEMORY_S = 1.0  # between two looks at the memory of host and device
_SENDING_S = 0.5  # between two looks at the connections: their clock ticks some hundred times a second
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class Monitoring:
    """Monitoring of one run, with the requested measurements and the measures of its models.

    Args:
        traffic: Function that returns the bytes passed to the current group's collectives, keyed by operation; empty
            without a group.
        sending_s: Function that returns the time that the current group's connections have spent sending [s].
    """

    def __init__(self, traffic: Callable[[], Mapping[str, int]] = dict, sending_s: Callable[[], float] = float) -> None:
        self.meter = StepMeter(traffic=traffic, sending_s=sending_s)  # times, memory and bytes of this rank's steps
        self._request = Monitor()
        self._models: list[Callable[[], StepMeasures]] = []
        # the latest metric of that name that the loop has reported on rank 0, after the report's number
        self.loss: tuple[int, float] | None = None

    @property
    def request(self) -> Monitor:
        """Measurements requested so far."""
        return self._request

    def ask(self, monitor: Monitor) -> None:
        """Request the measurements in ``monitor`` from the next group on; call this on all ranks.

        Requests made before the first epoch therefore apply from the first step.
        """
        self._request = self._request.joined(monitor)
        if monitor.workers:
            self.meter.ask()

    def record_report(self, metrics: Mapping[str, object], number: int) -> None:
        """Record the number ``metrics["loss"]`` from the run's report ``number``; ignore a report without a loss."""
        loss = metrics.get("loss")
        if isinstance(loss, (int, float)) and not isinstance(loss, bool):
            self.loss = number, float(loss)

    def add_model(self, measures: Callable[[], StepMeasures]) -> None:
        """Add a wrapped model; ``measures`` is a function that returns the model's current measures."""
        self._models.append(measures)

    def measures(self, model: int = 0) -> StepMeasures:
        """Return the measures of model number ``model``; before that model is wrapped, only the workers' measures."""
        if model < len(self._models):
            return self._models[model]()
        return StepMeasures(workers=self.meter.workers)


# No clock but the monotonic one is read here. It measures nothing, and nothing rides, until someone asks.
class StepMeter:
    """Meter of this worker's steps; its values are all-reduced with the group's control values.

    Args:
        traffic: Function that returns the bytes passed to the current group's collectives, keyed by operation; empty
            without a group.
        sending_s: Function that returns the time that the group's connections have spent sending since it was formed
            [s].
    """

    resting: None = None

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        traffic: Callable[[], Mapping[str, int]] = dict,
        sending_s: Callable[[], float] = float,
    ) -> None:
        self._clock, self._traffic = clock, traffic
        self._sending = _Looks(clock, sending_s)
        self._faults = 0
        self._used, self._used_at_s = 0.0, -math.inf
        self.on = False  # whether it measures
        # of all ranks, as of the latest step that was reduced; the same on every rank. Empty before the first.
        self.workers: tuple[WorkerMeasures, ...] = ()
        self._concluded: tuple[WorkerMeasures, ...] = ()  # by this worker's position, where units are joined
        self._gather: Callable[[Sequence[float]], Sequence[Sequence[float]]] | None = None
        self._of = 1  # steps that are committed together
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._data_s = self._sync_s = self._step_s = 0.0
        self._ready_s: float | None = None
        self._committed_s: float | None = None
        self._waited_s = 0.0  # for reductions, in the step in progress
        self._waits_since_s: float | None = None
        self._own = WorkerMeasures()
        self._counted: Mapping[str, int] = {}  # bytes, when the step before ended
        self._sizes: Mapping[str, float] = {}  # of the step before

    def join_units(self, gather: Callable[[Sequence[float]], Sequence[Sequence[float]]]) -> None:
        """Report, for each unit (workers that act as one rank), only the measures of its busiest worker from now on."""
        self._gather = gather

    def ask(self) -> None:
        """Enable measuring; call this on all ranks before the first epoch."""
        self.on = True

    def start_step(self, *, goes_on: bool = False) -> None:
        """Start timing a training step, before its first micro-batch is fetched.

        Args:
            goes_on: True if the step is committed with the previous one, so that only their mean is reported.
        """
        if goes_on:
            self._of += 1
        elif self.on:
            self._of = 1
            self._began_s, self._ready_s, self._data_s = self._clock(), None, 0.0

    def leave_out(self) -> None:
        """Exclude the current step from averages, because another worker executes it instead of this one."""
        self._of = max(1, self._of - 1)

    def waited_for_data(self, seconds: float) -> None:
        """Add ``seconds`` to the time spent waiting for data in the current step."""
        self._data_s += seconds

    def end_step(self) -> None:
        """Stop timing the current step, which has been committed (counted as done by all ranks)."""
        if not self.on:
            return
        if self._gather is not None:
            rows = self._gather([value for each in self._concluded for value in packed(each, 0, 1)])
            self.workers = busiest([unpacked(row, len(self._concluded)) for row in rows])
        now_s = self._clock()
        self._step_s = (now_s - self._ended_s) / self._of if self._ended_s is not None else 0.0
        self._sync_s, self._waited_s = self._waited_s / self._of, 0.0
        counted = dict(self._traffic())
        if now_s - self._used_at_s >= _MEMORY_S:
            self._used, self._used_at_s = memory_used(), now_s
        before, self._faults = self._faults, major_faults()
        self._sizes = {
            "host_mib": mib(host_bytes()),
            "device_mib": mib(device_bytes()),
            "memory_used": self._used,
            "major_faults": float(self._faults - before),
            "sending_s": self._sending.end_step(),
            **traffic_fields(self._counted, counted),
        }
        self._counted = counted
        self._ended_s, self._began_s = now_s, None
        self._committed_s = self._ready_s if self._ready_s is not None else self._committed_s

    def start(self) -> None:
        """Start measuring in a new group; the time since the last step in the old group does not count as a step."""
        self.workers = self._concluded = ()
        self._began_s = self._ended_s = self._ready_s = self._waits_since_s = None
        self._sync_s = self._step_s = self._waited_s = 0.0
        self._sizes = {}
        if self.on:
            self._counted, self._faults = dict(self._traffic()), major_faults()
            self._sending.start()

    def size(self, world_size: int) -> int:
        """Return the number of control values (all-reduced in each step) that this meter adds for this group size."""
        return len(FIELDS) * world_size if self.on else 0

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        """Return control values with this worker's measures at its rank; call it once its gradients are complete."""
        if not self.on:
            return ()
        self._waits_since_s = now_s = self._clock()
        if self._ready_s is None and self._began_s is not None:
            self._ready_s = now_s
            self._own = WorkerMeasures(
                compute_s=max(0.0, self._ready_s - self._began_s - self._data_s) / self._of,
                data_s=self._data_s / self._of,
                sync_s=self._sync_s,
                step_s=self._step_s,
                passed_s=self._ready_s - self._committed_s if self._committed_s is not None else 0.0,
                **self._sizes,
            )
        return packed(self._own, rank, world_size)

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """Read all ranks' measures from ``sums``, the control values summed over all ranks."""
        if not self.on:
            return
        if self._waits_since_s is not None:
            self._waited_s += self._clock() - self._waits_since_s
            self._waits_since_s = None
        self._concluded = unpacked(sums, world_size)
        if self._gather is None:
            self.workers = self._concluded


class _Looks:
    """Average per step of a growing total that is read only every few steps."""

    def __init__(self, clock: Callable[[], float], total_s: Callable[[], float]) -> None:
        self._clock, self._total_s = clock, total_s
        self._at_s = self._seen_s = self._by_step = 0.0
        self._steps = 0

    def start(self) -> None:
        """Restart with the current total as the baseline."""
        self._at_s, self._seen_s, self._by_step, self._steps = self._clock(), self._total_s(), 0.0, 0

    def end_step(self) -> float:
        """End a step and return the average increase per step, as of the last reading."""
        self._steps += 1
        now_s = self._clock()
        if now_s - self._at_s >= _SENDING_S:
            total_s = self._total_s()
            self._by_step = max(0.0, total_s - self._seen_s) / self._steps
            self._at_s, self._seen_s, self._steps = now_s, total_s, 0
        return self._by_step


def host_bytes() -> int:
    """Return the resident set size of this process [bytes], or its peak if ``/proc`` does not exist."""
    try:
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    try:
        return int(os.read(descriptor, 256).split()[1]) * _PAGE_BYTES
    finally:
        os.close(descriptor)


def device_bytes() -> int:
    """Return the memory reserved by torch's allocator on the current CUDA device [bytes]; 0 if none is used."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved())


def major_faults() -> int:
    """Return the number of pages that this process has read from disk so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def memory_used() -> float:
    """Return the largest used fraction (0 to 1) of the host's, container's (cgroup) and GPU's memory."""
    return max(_host_used(_PROC), _group_used(_PROC, _CGROUPS), _device_used())


def _host_used(proc: Path) -> float:
    """Return the used fraction of the host's memory; 0 if the kernel does not report it."""
    lines = _text(proc / "meminfo").splitlines()
    told = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    total, available = told.get("MemTotal", 0), told.get("MemAvailable")
    return 1.0 - available / total if total > 0 and available is not None else 0.0


def _group_used(proc: Path, groups: Path) -> float:
    """Return the used fraction of the control group's memory limit, less inactive cached files; 0 without limit."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        if not line.startswith("0::"):
            continue
        folder = groups / line[3:].lstrip("/")
        limit, current = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
        if limit.isdigit() and current.isdigit() and int(limit) > 0:
            stats = dict(row.split(" ", 1) for row in _text(folder / "memory.stat").splitlines() if " " in row)
            return max(0.0, min(1.0, (int(current) - int(stats.get("inactive_file", 0))) / int(limit)))
    return 0.0


def _device_used() -> float:
    """Return the fraction of the current CUDA device's memory used by any process; 0 if this process uses none."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return 1.0 - float(free) / float(total)


def _text(path: Path) -> str:
    """Return the text of a kernel file; empty if it does not exist."""
    try:
        return path.read_text()
    except OSError:
        return ""
