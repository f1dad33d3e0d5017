"""What a job's metrics are at one moment, and what its events add to them (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from elastic_ray.batch.reports import StepReport
from elastic_ray.events import EventKind, JobEvent, JobPhase, JobStatus
from elastic_ray.observe.metrics import instruments as of
from elastic_ray.record.outlook import TimeSpent
from placement.instruments import Sample, label_value

if TYPE_CHECKING:
    from elastic_ray.batch.planner import BatchPlanner

_PARTS = tuple(field.name for field in dataclasses.fields(TimeSpent))
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
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobLabels:
    """Whose metrics they are.

    Attributes:
        job: name of the job.
        tenant: of whom; empty without tenants.
        model: as the user or its loader names it; empty while neither does.
    """

    job: str
    tenant: str = ""
    model: str = ""

    @property
    def values(self) -> tuple[str, str, str]:
        """As label values, in the order of the instruments."""
        return label_value(self.job), label_value(self.tenant), label_value(self.model)


def gauge_samples(status: JobStatus, speed: BatchPlanner, labels: JobLabels) -> tuple[Sample, ...]:
    """The present value of every gauge that has one; an ended job has no speed any more."""
    whose = labels.values
    spent = [(part.removesuffix("_s"), getattr(status, part, None)) for part in _PARTS]
    found = [
        *of.WORKERS.sample(status.workers, *whose),
        *of.TARGET_WORKERS.sample(status.target_workers, *whose),
        *of.PROGRESS.sample(status.progress, *whose),
        *of.PRODUCTIVE.sample(status.productive_share, *whose),
        *of.COST.sample(status.cost_usd, *whose),
        *(sample for part, value in spent for sample in of.TIME.sample(value, *whose, part)),
    ]
    if (report := speed.latest) is not None:
        found += of.STEPS.sample(report.total_steps, *whose)
        if status.phase is JobPhase.RUNNING and status.workers:
            found += _speed_samples(status, speed, report, whose)
    return tuple(found)


def _speed_samples(
    status: JobStatus, speed: BatchPlanner, report: StepReport, whose: tuple[str, ...]
) -> Iterable[Sample]:
    """Of a job that trains."""
    return (
        *of.GLOBAL_BATCH.sample(report.batch_size or None, *whose),
        *of.SAMPLES_PER_SECOND.sample(status.throughput or None, *whose),
        *of.GOODPUT.sample(status.goodput, *whose),
        *of.EFFICIENCY.sample(speed.efficiency, *whose),
        *of.NOISE_SCALE.sample(speed.noise_scale, *whose),
        *of.LEARNING_RATE_FACTOR.sample(report.learning_rate_factor, *whose),
        *of.ETA.sample(status.eta_s, *whose),
    )


def event_samples(events: Iterable[JobEvent], steps: int, labels: JobLabels) -> tuple[Sample, ...]:
    """What these events add to counters and histograms.

    Args:
        events: that are new.
        steps: committed before a restart among them, where that does not tell itself.
        labels: of the job.
    """
    whose, found = labels.values, list[Sample]()
    for event in events:
        reason = _reason(event)
        if reason is not None:
            found += of.RESIZES.sample(1, *whose, reason)
            if event.pause_s > 0:
                found += of.PAUSE.sample(event.pause_s, *whose)
        if (cause := _CAUSES.get(event.kind)) is not None:
            found += of.FAILURES.sample(1, *whose, cause)
        if event.kind is EventKind.RESTART:
            kept = event.detail.get("steps", 0)
            reached = event.detail.get("reached_steps", steps)
            if isinstance(kept, int) and isinstance(reached, int):
                found += of.LOST_STEPS.sample(max(reached - kept, 0), *whose)
                steps = kept
    return tuple(found)


def end_samples(phase: JobPhase, labels: JobLabels) -> tuple[Sample, ...]:
    """What the job's end adds to them."""
    return of.FAILURES.sample(1, *labels.values, "job_failed") if phase is JobPhase.FAILED else ()


def _reason(event: JobEvent) -> str | None:
    """One of a few words for why the workers changed; None where they did not."""
    if event.kind is EventKind.RESIZE:
        change = event.to_workers - event.from_workers
        return "grow" if change > 0 else "shrink" if change < 0 else "move"
    return _REASONS.get(event.kind)
