"""SHELL: shutdown of a job: records and writes its outcome, and releases its workers."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable

from elastic_ray.background import Background
from elastic_ray.events import JobPhase, JobStatus
from elastic_ray.job.context import JobContext
from elastic_ray.job_spec import JobSpec
from elastic_ray.membership.messages import Cancel, StopJob
from elastic_ray.record.ended import EndedJobNote
from elastic_ray.sealed import Raised, Sealed
from placement.ray_cluster import notes

_DEADLINE_S = 10.0


class Notifier:
    """Sender of job events as JSON to the URL of ``ElasticConfig(webhook)``.

    A call that fails or takes too long only adds an event of kind ``warning``. The URL may contain a secret and is
    never shown. Trials send nothing, because their end concerns only the sweep.
    """

    def __init__(self, spec: JobSpec, warn: Callable[[str], None]) -> None:
        self._spec, self._warn = spec, warn
        self._url = spec.elastic.webhook if spec.trial is None else None
        self._background = Background()
        self._waiting_since: float | None = None
        self._told = False

    def tick(self, phase: JobPhase, message: str, now_s: float) -> None:
        """Report, once per wait, that the job has waited too long for resources, as of ``now_s`` [s, monotonic]."""
        if phase is not JobPhase.WAITING:
            self._waiting_since, self._told = None, False
            return
        self._waiting_since = now_s if self._waiting_since is None else self._waiting_since
        waited_s = now_s - self._waiting_since
        if not self._told and waited_s >= self._spec.elastic.webhook_waits_s:
            self._told = True
            self._background.start(self.notify("waiting", f"it has waited for {waited_s / 60:.0f} min: {message}"))

    async def notify(self, what: str, reason: str) -> None:
        """Send event ``what`` with its reason to the webhook, if any, and wait for the answer, up to a time limit."""
        if not self._url:
            return
        job = self._spec.job
        said = {"job": job, "event": what, "reason": reason, "path": self._spec.storage_path}
        said["text"] = f"job {job}: {what}" + (f", {reason}" if reason else "")
        try:
            await asyncio.wait_for(asyncio.to_thread(_post, self._url, json.dumps(said).encode()), _DEADLINE_S)
        except Exception as error:  # whatever it is: a job does not depend on it
            self._warn(f"the webhook was not told that the job is {what}: {_without_address(error)}")


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
        answer.read(1)


def _without_address(error: Exception) -> str:
    """Return a description of an error that cannot contain the webhook's URL."""
    if isinstance(error, urllib.error.HTTPError):
        return f"it answered {error.code}"
    if isinstance(error, TimeoutError):
        return f"it has not answered within {_DEADLINE_S:g} s"
    reason = getattr(error, "reason", None)
    return str(reason) if isinstance(reason, OSError) else type(error).__name__


logger = logging.getLogger("elastic_ray.job")

_NOTE_S = 2.0


class JobShutdown:
    """Shutdown of a job: records its outcome, writes the records and releases its workers."""

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

    def record(self, phase: JobPhase, error: BaseException | Raised | None, reason: str, *, complete: bool) -> None:
        """Record how the job ended; with ``complete=False``, only its phase and reason, until :meth:`record_again`."""
        self._error = error
        if complete:
            self._record.end(phase, error=error, return_value=self.return_value, message=reason)
        else:
            self._record.phase, self._record.message = phase, reason
        self._metrics.end()

    def record_again(self) -> None:
        """Record and write the outcome that :meth:`record` left open."""
        phase, message, error = self._record.phase, self._record.message, self._error
        if error is None and phase is JobPhase.FAILED:
            error = RuntimeError(message)
        self._record.end(phase, error=error, return_value=self.return_value, message=message)
        self.write()

    def write(self) -> None:
        """Write the remaining records, and delete all automatic checkpoints of a finished job except the last."""
        if self._record.phase is JobPhase.FINISHED and self._spec.states_kept:
            self._writer.finish_states()
        if self._record.outcome() is not None:
            self._written = self._background.start(self._finish())

    async def _finish(self) -> None:
        """Finish the records: first notices, then storage, then trackers, which read the stored files."""
        await self._remember()
        await self._notifier.notify(self._record.phase.value, self._record.message)
        await self._writer.finish()
        await self._trackers.finish(self._record.phase, self._error)

    async def _remember(self) -> None:
        """Store a note on how the job ended, which can be read for an hour."""
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
        """Release the workers: to the sweep for another trial, or to the cluster."""
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
        await self._group.actors.vacate()
        self._allocator.ended()
