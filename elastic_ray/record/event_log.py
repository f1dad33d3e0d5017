"""Log of a job's events, which are logged, recorded, and saved for a restarted controller as they happen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from elastic_ray.events import EventKind, JobEvent
from elastic_ray.job_spec import JobSpec
from elastic_ray.membership.machine import JobMembership
from elastic_ray.record.record import JobRecord
from elastic_ray.record.verification import sealed

logger = logging.getLogger("elastic_ray.job")


class EventLog:
    """Log of a job's events."""

    def __init__(
        self, spec: JobSpec, record: JobRecord, machine: JobMembership, keep: Callable[[JobEvent], None]
    ) -> None:
        self._spec, self._record, self._machine, self._keep = spec, record, machine, keep

    def add(self, kind: EventKind, before: int, after: int, reason: str, **facts: Any) -> None:
        """Add an event; ``before`` and ``after`` are the job's numbers of workers, and ``facts`` further fields."""
        facts = {"generation": self._machine.generation} | facts
        if before != after and self._record.cost_usd is not None:
            facts["detail"] = {**facts.get("detail", {}), "cost_usd": self._record.cost_usd}
        event = JobEvent(kind=kind, time_s=time.time(), from_workers=before, to_workers=after, reason=reason, **facts)
        if "proof" in event.detail:
            event = sealed(event, self._spec.job)
        if kind is EventKind.PASS:  # one an epoch: for who verifies the run
            self._record.proven(event)
            return
        told = (self._spec.job, kind.value, before, after, event.pause_s, reason)
        level = logging.DEBUG if self._spec.shown else logging.INFO
        logger.log(level, "job %s: %s %d->%d workers, pause %.2f s (%s)", *told)
        self._record.event(event)
        self._keep(event)

    def emit(self, kind: EventKind, reason: str, **facts: Any) -> None:
        """Add an event that leaves the job's size unchanged; ``facts`` are further fields of the event."""
        workers = self._machine.world_size
        self.add(kind, workers, workers, reason, **facts)

    def warn(self, what: str) -> None:
        """Add a warning about a failure that does not stop the job."""
        self.emit(EventKind.WARNING, what)

    def storage(self, what: str) -> None:
        """Add an event about storage."""
        self.emit(EventKind.STORAGE, what)
