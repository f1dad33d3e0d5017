"""Metrics of a job, written every second while the job runs, and once when it ends (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from elastic_ray.events import TIME_PARTS, EventKind, JobEvent, JobPhase, JobStatus
from elastic_ray.job_spec import JobSpec
from placement.instruments import Guarded, Instrument, Sample, WriteSamples, counter, gauge, histogram, label_value

if TYPE_CHECKING:
    from elastic_ray.batch.planner import BatchPlanner

PERIOD_S = 1.0
_CAUSES = {
    EventKind.FAILURE: "workers_lost",
    EventKind.RESTART: "restart",
    EventKind.OUT_OF_MEMORY: "out_of_memory",
    EventKind.NOT_FINITE: "not_finite",
    EventKind.STORAGE: "storage",
    EventKind.RECOVERED: "controller_lost",
}
_REASONS = {
    EventKind.FAILURE: "failure",
    EventKind.RESTART: "restart",
    EventKind.PREEMPTED: "preempted",
    EventKind.PAUSED: "paused",
}
_OF = ("job", "tenant", "model")


def _gauge(name: str, description: str, *labels: str) -> Instrument:
    return gauge(f"elastic_job_{name}", description, *_OF, *labels)


GAUGES: Mapping[str, Instrument] = {
    "workers": _gauge("workers", "Workers that train now; 0 once the job has ended."),
    "target_workers": _gauge("target_workers", "Workers that the job is heading for; 0 once it has ended."),
    "progress": _gauge("progress_ratio", "Part of the declared epochs that is done, 0 to 1."),
    "productive_share": _gauge("productive_ratio", "Training time / time since submission, 0 to 1."),
    "cost_usd": _gauge("cost_usd", "What the job has cost so far [USD]."),
}
"""Gauges by field of ``JobStatus``."""

SPEED_GAUGES: Mapping[str, Instrument] = {
    "batch_size": _gauge("global_batch", "Samples of one optimizer step over all workers."),
    "throughput": _gauge("samples_per_second", "Measured throughput [samples/s]."),
    "tokens_per_s": _gauge("tokens_per_second", "The same in tokens, where the batch is declared in tokens."),
    "tokens_left": _gauge("tokens_left", "Tokens until the end, where the batch is declared in tokens."),
    "goodput": _gauge("goodput", "Throughput x statistical efficiency by the fitted model [samples/s]."),
    "efficiency": _gauge("statistical_efficiency", "Statistical efficiency of the present batch, at most 1."),
    "learning_rate_factor": _gauge("learning_rate_factor", "What the learning rates are multiplied by for the batch."),
    "memory_bound": _gauge("memory_bound", "Samples that a worker takes at once at most, since more do not fit."),
    "mfu": _gauge("mfu_ratio", "Model FLOPs utilisation, 0 to 1, where the GPU's peak is known."),
    "eta_s": _gauge("eta_seconds", "Time to the end at the present goodput [s]."),
}
"""The same of a job that trains."""

_UNKNOWN_IF_0 = ("batch_size", "throughput", "tokens_per_s")

NOISE_SCALE = _gauge("noise_scale", "Gradient noise scale [samples].")
GPU_MEMORY = _gauge("gpu_memory_bytes", "Most of a GPU's memory that a worker has used, or reserved.", "kind")
STEPS = _gauge("steps", "Optimizer steps committed by the run; falls where a restart goes back.")
TIME = _gauge("time_seconds", "Where the time since submission went [s].", "part")
RESIZES = counter("elastic_job_resizes_total", "Changes of the number of workers.", *_OF, "reason")
PAUSE = histogram(
    "elastic_job_pause_seconds",
    "Time without a step at a change of workers [s].",
    (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0),
    *_OF,
)
LOST_STEPS = counter("elastic_job_lost_steps_total", "Committed steps that restarts have undone.", *_OF)
FAILURES = counter("elastic_job_failures_total", "What went wrong.", *_OF, "cause")
INSTRUMENTS = (
    *GAUGES.values(),
    *SPEED_GAUGES.values(),
    *(NOISE_SCALE, GPU_MEMORY, STEPS, TIME, RESIZES, PAUSE, LOST_STEPS, FAILURES),
)


class JobMetrics:
    """Writer of metrics for one job (or one trial of a sweep), used by the job's controller."""

    def __init__(
        self,
        spec: JobSpec,
        speed: BatchPlanner,
        status: Callable[[], JobStatus],
        events: Callable[[], Sequence[JobEvent]],
        write: WriteSamples,
    ) -> None:
        self._spec, self._speed, self._status, self._events, self._write = spec, speed, status, events, write
        self._on = spec.elastic.metrics
        self._written_s = float("-inf")
        self._seen = 0
        self._ended = False
        self._guarded = Guarded(f"job {spec.job}")

    def recall(self, events: int) -> None:
        """Restore the number of events that an earlier controller has written, so that they are not written again."""
        self._seen = events

    def tick(self, now_s: float) -> None:
        """Write the metrics if they are due; called about ten times a second (``now_s`` in [s, monotonic])."""
        if self._on and now_s - self._written_s >= PERIOD_S:
            self._written_s = now_s
            self._guarded(lambda: self._poll(self._status()))

    def end(self) -> None:
        """Write the final metrics of the job, once."""
        if self._on and not self._ended:
            self._guarded(self._notify_end)
        self._ended = True

    def _notify_end(self) -> None:
        status = self._status()
        self._poll(status)
        if status.phase is JobPhase.FAILED:
            self._write(FAILURES.sample(1, *self._labels.values, "job_failed"))

    def _poll(self, status: JobStatus) -> None:
        """Write the current values of all gauges, and new events."""
        labels, events = self._labels, self._events()
        steps = self._speed.latest.total_steps if self._speed.latest is not None else 0
        new, self._seen = events[self._seen :], len(events)
        self._write(gauge_samples(status, self._speed, labels))
        self._write(event_samples(new, steps, labels))

    @property
    def _labels(self) -> JobLabels:
        """Labels of the job; the model label is the user's name for it, otherwise the class names from the loader."""
        loader, name = self._speed.loader, self._spec.model_fingerprint
        if name is None and loader is not None:
            name = "+".join(dict.fromkeys(model.kind for model in loader.models))
        return JobLabels(job=self._spec.job, tenant=self._spec.scheduling.tenant, model=name or "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobLabels:
    """Labels that all metrics of a job carry."""

    job: str
    tenant: str = ""  # of whom; empty without tenants
    model: str = ""  # as the user or its loader names it; empty while neither does

    @property
    def values(self) -> tuple[str, str, str]:
        """Label values, in the order that each metric (gauge, counter, histogram) declares its labels."""
        return label_value(self.job), label_value(self.tenant), label_value(self.model)


def gauge_samples(status: JobStatus, speed: BatchPlanner, labels: JobLabels) -> tuple[Sample, ...]:
    """Return the current values of all gauges that have a value; speed gauges have one only during training."""
    whose, found = labels.values, list[Sample]()
    for name, each in GAUGES.items():
        found += each.sample(getattr(status, name), *whose)
    for part in TIME_PARTS:
        found += TIME.sample(getattr(status, part), *whose, part.removesuffix("_s"))
    if speed.latest is None:
        return tuple(found)
    found += STEPS.sample(status.step, *whose)
    if status.phase is JobPhase.RUNNING and status.workers:
        for name, each in SPEED_GAUGES.items():
            value = getattr(status, name)
            found += each.sample(value or None if name in _UNKNOWN_IF_0 else value, *whose)
        found += NOISE_SCALE.sample(speed.noise_scale, *whose)
        for kind in ("used", "reserved"):
            found += GPU_MEMORY.sample(getattr(status, f"gpu_memory_{kind}_bytes"), *whose, kind)
    return tuple(found)


def event_samples(events: Iterable[JobEvent], steps: int, labels: JobLabels) -> tuple[Sample, ...]:
    """Return the samples that these events add to the job's counters and histograms."""
    whose, found = labels.values, list[Sample]()
    for event in events:
        reason = _reason(event)
        if reason is not None:
            found += RESIZES.sample(1, *whose, reason)
            if event.pause_s > 0:
                found += PAUSE.sample(event.pause_s, *whose)
        if (cause := _CAUSES.get(event.kind)) is not None:
            found += FAILURES.sample(1, *whose, cause)
        if event.kind is EventKind.RESTART:
            kept = event.detail.get("steps", 0)
            reached = event.detail.get("reached_steps", steps)
            if isinstance(kept, int) and isinstance(reached, int):
                found += LOST_STEPS.sample(max(reached - kept, 0), *whose)
                steps = kept
    return tuple(found)


def _reason(event: JobEvent) -> str | None:
    """Return why the number of workers changed, as a label value; None if it did not change."""
    if event.kind is EventKind.RESIZE:
        change = event.to_workers - event.from_workers
        return "grow" if change > 0 else "shrink" if change < 0 else "move"
    return _REASONS.get(event.kind)
