"""SHELL: start of a job from its stored state, initially and after all workers have been lost."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from elastic_ray.events import EventKind, JobPhase
from elastic_ray.job.context import JobContext
from elastic_ray.membership.signals import Allocated
from elastic_ray.record.writer import unreadable

if TYPE_CHECKING:
    from elastic_ray.job.supervisor import JobSupervisor

logger = logging.getLogger("elastic_ray.job")

_LOOK_AGAIN_S = 10.0


class JobStarter:
    """Starter of a job from its stored state, initially and after all workers have been lost."""

    def __init__(self, job: JobSupervisor, parts: JobContext) -> None:
        self._job, self._spec, self._record, self._writer = job, parts.spec, parts.record, parts.writer
        self._events, self._reports, self._group = parts.events, parts.reports, parts.group
        self._planner = parts.planner
        self._background, self._trackers = parts.background, parts.trackers
        self.looking = False  # whether all workers were lost, and storage is being looked at
        self._opened = False
        self._first_report: int | None = None
        self._caught_up = False
        self._begun_after = 0
        self.later: Allocated | None = None  # the allocator's decision to apply once the job restarts

    def recall(self, first_report: int) -> None:
        """Restore the run's first report number from the previous controller's records; 0 if unknown."""
        self._first_report = first_report

    @property
    def knows_reports(self) -> bool:
        """True if this controller has read all reports that the job's earlier controllers received, if any."""
        return self._first_report is None or self._caught_up

    async def open(self) -> None:
        """Find the stored state of an earlier run with the job's name, and prepare for workers.

        If storage cannot be read, the job fails, because starting from scratch would lose earlier training. A job whose
        workers are still training continues, because it needs no stored state until it restarts.
        """
        if self._opened:
            return
        self._opened = True
        try:
            await self._poll(self._spec.elastic.storage_timeout_s)
            if self._first_report is not None:
                await self._reports.catch_up(self._first_report)
        except OSError as error:
            if self._group.machine.workers:
                logger.warning("job %s: what is stored of it cannot be read: %s", self._spec.job, error)
            else:
                self._job.finish(JobPhase.FAILED, error=unreadable(self._spec, error))
        self._caught_up = True
        if self._record.phase.ended:
            if self._record.outcome() is None:
                self._job.shutdown.record_again()
            return
        point = self._record.resume_point
        self._trackers.start(point)
        self._begun_after = point.reports if point is not None else 0
        self._reports.queue.start_after(self._first_report - 1 if self._first_report else self._begun_after)
        if not self._group.machine.workers:
            self._group.machine.reset(first_most=self._record.workers_at_most)

    def start_again(self, reason: str) -> None:
        """Restart from stored state with new workers, because all workers were lost or cannot continue."""
        if not self.looking and not self._record.phase.ended:
            self.looking = True
            self._background.start(self._start_again(reason))

    async def _start_again(self, reason: str) -> None:
        """Restart from the last saved state; any later training is lost."""
        timeout_s = self._spec.elastic.storage_timeout_s
        knows = self._record.looked or self._record.resume_point is not None
        try:
            await self._poll(min(_LOOK_AGAIN_S, timeout_s) if knows else timeout_s)
        except Exception as error:  # whatever it is, the job must not wait for ever
            if not knows:  # as after the controller's own restart: to start anew would lose what was trained
                self._job.finish(JobPhase.FAILED, error=unreadable(self._spec, error))
            logger.warning("job %s: it starts from what its controller knows: %s", self._spec.job, error)
        self.looking = False
        if self._record.phase.ended:
            return
        point = self._record.resume_point
        start = f"from step {point.steps}" if point is not None else "anew"
        detail: dict[str, float] = {"steps": point.steps, "reports": point.reports} if point is not None else {}
        latest, history = self._planner.latest, self._group.history
        if latest is not None:
            detail["reached_steps"] = latest.total_steps
        detail |= history.start_detail(time.monotonic())
        history.start_ended()
        before = self._group.machine.world_size
        self._events.add(EventKind.RESTART, before, 0, f"{reason}; it starts {start}", detail=detail)
        self._job.restart_group()
        if (later := self.later) is not None:
            self.later = None
            self._job.allocate(later.nodes, later.reason)

    async def _poll(self, timeout_s: float) -> None:
        """Read the run's stored state. Raises OSError if it cannot be read within ``timeout_s``."""
        stored = await self._writer.poll(timeout_s)
        self._writer.delete(self._record.found(stored))
        last = stored.checkpoints[-1] if stored.checkpoints else None
        if self.looking and last is not None and last.index > max(self._record.reports.last, self._begun_after):
            self._reports.restore(last)
