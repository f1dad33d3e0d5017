"""When a job's metrics are written: every second while it lives, and at its end (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from elastic_ray.events import JobEvent, JobStatus
from elastic_ray.job_spec import JobSpec
from elastic_ray.observe.metrics.samples import JobLabels, end_samples, event_samples, gauge_samples
from placement.instruments import Guarded, WriteSamples

if TYPE_CHECKING:
    from elastic_ray.batch.planner import BatchPlanner

PERIOD_S = 1.0


class JobMetrics:
    """Of one job, or one trial of a sweep, in its controller.

    Args:
        spec: the job.
        speed: what is known of it.
        status: tells how it stands; asked once a second.
        events: of it so far; only the new ones are looked at.
        write: takes samples.
    """

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
        """A controller before this one has written so many events."""
        self._seen = events

    def tick(self, now_s: float) -> None:
        """Some ten times a second while the job lives [s, monotonic]."""
        if self._on and now_s - self._written_s >= PERIOD_S:
            self._written_s = now_s
            self._guarded(lambda: self._look(self._status()))

    def end(self) -> None:
        """The job has ended: it has no workers, and nothing is written any more."""
        if self._on and not self._ended:
            self._guarded(self._tell_end)
        self._ended = True

    def _tell_end(self) -> None:
        status = self._status()
        self._look(status)
        self._write(end_samples(status.phase, self._labels))

    def _look(self, status: JobStatus) -> None:
        """Write what is so now, and what is new."""
        labels, events = self._labels, self._events()
        steps = self._speed.latest.total_steps if self._speed.latest is not None else 0
        new, self._seen = events[self._seen :], len(events)
        self._write(gauge_samples(status, self._speed, labels))
        self._write(event_samples(new, steps, labels))

    @property
    def _labels(self) -> JobLabels:
        """The loader names the model once it is known; before, and where it names none, the user does."""
        loader, name = self._speed.loader, self._spec.model_fingerprint
        if name is None and loader is not None:
            name = "+".join(dict.fromkeys(model.kind for model in loader.models))
        return JobLabels(job=self._spec.job, tenant=self._spec.scheduling.tenant, model=name or "")
