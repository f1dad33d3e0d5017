"""SHELL: end of a job: its outcome is recorded and written, its workers are released."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

from elastic_ray.events import JobPhase, JobStatus
from elastic_ray.job.context import JobContext
from elastic_ray.job.notifier import Notifier
from elastic_ray.membership.messages import Cancel, StopJob
from elastic_ray.record.ended import EndedJobNote
from elastic_ray.sealed import Raised, Sealed
from placement.ray_cluster import notes

logger = logging.getLogger("elastic_ray.job")

_NOTE_S = 2.0


class JobShutdown:
    """Shutdown of a job, step by step.

    Args:
        parts: of the job; the end is reported to the allocator.
        status: the job as others see it.
        notifier: tells people of the end.
    """

    def __init__(self, parts: JobContext, status: Callable[[], JobStatus], notifier: Notifier) -> None:
        self._status, self._notifier = status, notifier
        self._spec, self._record, self._writer = parts.spec, parts.record, parts.writer
        self._group, self._background, self._allocator = parts.group, parts.background, parts.allocator
        self._trackers, self._metrics = parts.trackers, parts.metrics
        self._error: BaseException | Raised | None = None
        self._written: asyncio.Task[None] | None = None
        self.return_value: Sealed | None = None  # what rank 0's train function has returned
        # the task that makes processes ready for another trial; None for a job whose processes end with it
        self.vacated: asyncio.Task[None] | None = None

    def returned(self, value: Sealed | None) -> None:
        """Rank 0's train function has returned this, or another rank's before rank 0's has."""
        self.return_value = value

    def record(self, phase: JobPhase, error: BaseException | Raised | None, reason: str, *, complete: bool) -> None:
        """Record the job's end; the outcome waits until everything that belongs to it is known (``complete``)."""
        self._error = error
        if complete:
            self._record.end(phase, error=error, return_value=self.return_value, message=reason)
        else:
            self._record.ending(phase, reason)
        self._metrics.end()

    def record_again(self) -> None:
        """Complete what :meth:`record` has left open."""
        phase, message, error = self._record.phase, self._record.message, self._error
        if error is None and phase is JobPhase.FAILED:
            error = RuntimeError(message)
        self._record.end(phase, error=error, return_value=self.return_value, message=message)
        self.write()

    def write(self) -> None:
        """Write what is left, and keep but the last automatic checkpoint of a job that has finished."""
        if self._record.phase is JobPhase.FINISHED and self._spec.states_kept:
            self._writer.finish_states()
        if self._record.outcome() is not None:
            self._written = self._background.start(self._finish())

    async def _finish(self) -> None:
        """Finish the records: notices, then storage, then trackers, which read what is written."""
        await self._remember()
        await self._notifier.tell(self._record.phase.value, self._record.message)
        await self._writer.finish()
        await self._trackers.finish(self._record.phase, self._error)

    async def _remember(self) -> None:
        """Record how the job has ended, for those that ask within the hour."""
        outcome, events = self._record.outcome(), self._record.events
        if outcome is None or not events:
            return
        ended_s = events[-1].time_s
        try:
            note = EndedJobNote.of(self._spec, self._status(), ended_s, self._error, outcome.metrics).to_json()
            keep = functools.partial(notes.keep_ended, self._spec.job, ended_s, note)
            await asyncio.wait_for(asyncio.to_thread(keep), _NOTE_S)
        except Exception as error:  # a job ends whether its end is remembered or not
            logger.warning("job %s: how it has ended is not remembered: %s", self._spec.job, error)

    async def written(self) -> None:
        """Wait until the job has ended and its records are flushed (best effort)."""
        if self._written is not None:
            await asyncio.wait([self._written])

    def give_back(self) -> None:
        """Give the workers back: to the sweep, for another trial, or to the cluster."""
        trial = self._spec.trial
        if trial is not None and trial.keep_s and self._record.phase is not JobPhase.FAILED:
            self.vacated = self._background.start(self._vacate())
        else:
            self._group.actors.disband()
            self._allocator.ended()

    async def _vacate(self) -> None:
        self._group.post_to_members(StopJob())
        if (current := self._group.machine.current) is not None:
            # Rank 0 leaves the report that it waits in; without this the others would wait for it in their next step.
            self._group.post_to_members(Cancel(generation=current.generation))
        await self._group.vacate()
        self._allocator.ended()
