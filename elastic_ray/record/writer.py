"""SHELL: a job controller's access to storage, in separate threads so that the controller never waits for it."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable

from elastic_ray.background import Background
from elastic_ray.checkpoints.automatic import StoredProgress, delete_states, find_stored, keep_last
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.events import Report
from elastic_ray.job_spec import JobSpec
from elastic_ray.record.record import JobRecord
from elastic_ray.record.report_queue import MOST, Backlog
from placement.storage.storage_calls import Call, StorageCalls, StorageTimeoutError
from placement.text import count

logger = logging.getLogger("elastic_ray.job")

_REPORTS_EVERY_S = 1.0
_REWRITTEN_EVERY_S = 10.0  # where some thousand of them are written anew each time
_AGAIN_S = 1.0
_LONGEST_AGAIN_S = 30.0
_LAST_WORDS_S = 5.0
_LAST_WORDS_AWAY_S = 1.0
_BLOCK = 1000
ALIVE_EVERY_S = 20.0
_THREADS = 5  # one each may hang: writing events, reports and the time, looking for checkpoints, reading reports


class _BacklogWriter:
    """Writer for one backlog, one call at a time; a hanging call is awaited, because it may still write its lines."""

    def __init__(self, what: str, backlog: Backlog, append: Callable[[tuple[str, ...]], None]) -> None:
        self.what, self.backlog = what, backlog
        self._append = append
        self._not_before_s = 0.0
        self._again_s = _AGAIN_S
        self.task: asyncio.Task[None] | None = None
        self.problem = ""

    @property
    def idle(self) -> bool:
        return self.task is None or self.task.done()

    def due(self, now_s: float) -> bool:
        return bool(self.backlog) and self.idle and now_s >= self._not_before_s

    def start(self, background: Background, calls: StorageCalls, *, pause_s: float = 0.0) -> None:
        """Write the waiting lines; the next write starts at least ``pause_s`` [s] after this one ends."""
        self.task = background.start(self._write(calls, pause_s))

    async def _write(self, calls: StorageCalls, pause_s: float) -> None:
        """Write the waiting lines; each failure doubles the wait before the next attempt."""
        lines = self.backlog.take()
        try:
            await asyncio.wrap_future(calls.start(self.what, lambda: self._append(lines)).answer)
        except Exception as error:
            self.backlog.failed()
            if not self.problem:
                logger.warning("%s to %s failed, and is tried again: %s", self.what, calls.where, error)
            self.problem = f"{self.what} to {calls.where} fails and is tried again: {error}"
            self._not_before_s = time.monotonic() + self._again_s
            self._again_s = min(2 * self._again_s, _LONGEST_AGAIN_S)
        else:
            self.backlog.written()
            self.problem, self._again_s = "", _AGAIN_S
            self._not_before_s = time.monotonic() + pause_s


class RecordWriter:
    """Writer of a record's backlogs, which also reads stored state and deletes checkpoints."""

    def __init__(self, spec: JobSpec, record: JobRecord, background: Background, tell: Callable[[str], None]) -> None:
        self._spec, self._record, self._background, self._tell = spec, record, background, tell
        private = spec.elastic.private_files
        self._storage = RunStorage(spec.storage_path, spec.storage_filesystem, private=private)
        self._calls = StorageCalls(self._storage.where, threads=_THREADS)
        self._deleting = StorageCalls(self._storage.where, threads=1)  # of many, none takes the others' threads
        self._events = _BacklogWriter("writing events", record.unwritten_events, self._storage.events.append)
        self._reports = _BacklogWriter("writing reports", record.unwritten_reports, self._storage.reports.append)
        self._deletions: set[asyncio.Task[None]] = set()
        self._told: set[str] = set()
        self._block: dict[int, Report] = {}
        self._alive: Call | None = None
        self._alive_due_s = 0.0

    def tick(self, now_s: float) -> None:
        """Write lines that are due at ``now_s`` [s, monotonic], and record which storage calls are unanswered."""
        reports_every_s = _REPORTS_EVERY_S if self._storage.local else _REWRITTEN_EVERY_S
        for writer, pause_s in ((self._events, 0.0), (self._reports, reports_every_s)):
            if writer.due(now_s):
                writer.start(self._background, self._calls, pause_s=pause_s)
            if writer.idle and not writer.problem and (dropped := writer.backlog.pop_dropped()):
                self._tell(
                    f"{count(dropped, 'line')} too many to keep while storage was away: {writer.what} left them out"
                )
        # Trials have no submission of their own, and there may be hundreds.
        if (
            self._spec.trial is None
            and now_s >= self._alive_due_s
            and (self._alive is None or self._alive.answer.done())
        ):
            self._alive_due_s = now_s + ALIVE_EVERY_S
            self._alive = self._calls.start("writing that the job lives", self._storage.write_alive)
        waiting = self._calls.waiting() or self._deleting.waiting()
        self._record.waits("controller", waiting or self._events.problem or self._reports.problem)

    async def finish(self) -> None:
        """Write remaining lines and finish deletions within seconds, because the user is waiting for the job to end."""
        writers = (self._events, self._reports)
        away = self._calls.waiting() or any(writer.problem for writer in writers)
        until_s = time.monotonic() + (_LAST_WORDS_AWAY_S if away else _LAST_WORDS_S)
        while any(writer.backlog for writer in writers) and time.monotonic() < until_s:
            for writer in writers:
                if writer.backlog and writer.idle:
                    writer.start(self._background, self._calls)
            pending = [writer.task for writer in writers if writer.task is not None and not writer.task.done()]
            if pending:
                await asyncio.wait(pending, timeout=max(0.0, until_s - time.monotonic()))
            if any(writer.problem for writer in writers):
                await asyncio.sleep(0.2)
        if self._deletions:
            await asyncio.wait(self._deletions, timeout=max(0.0, until_s - time.monotonic()))
        for writer in writers:
            if writer.backlog:
                why = writer.problem or self._calls.waiting() or "there was no time"
                logger.warning("job %s: %d lines were not written: %s", self._spec.job, len(writer.backlog), why)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the checkpoints at these paths."""
        for path in paths:
            self._do(f"deleting {path}", functools.partial(self._storage.delete_checkpoint, path))

    def finish_states(self) -> None:
        """Delete an ended job's automatic checkpoints, except the last one if the job's settings keep it."""
        last = self._record.last_state
        if last is None:
            self._do("deleting automatic checkpoints", lambda: delete_states(self._storage))
        else:
            self._do("deleting automatic checkpoints", lambda: keep_last(self._storage, last))

    def _do(self, what: str, function: Callable[[], object]) -> None:
        task = self._background.start(self._try(what, function))
        self._deletions.add(task)
        task.add_done_callback(self._deletions.discard)

    async def _try(self, what: str, function: Callable[[], object]) -> None:
        try:
            await self._deleting.run(what, function, timeout_s=self._spec.elastic.storage_timeout_s)
        except Exception as error:  # what is left costs room and nothing else
            logger.warning("job %s: %s failed: %s", self._spec.job, what, error)

    async def poll(self, timeout_s: float) -> StoredProgress:
        """Read the run's stored state, retrying after failures."""
        until_s, pause_s = time.monotonic() + timeout_s, 0.2
        trial = self._spec.trial
        while True:
            try:
                stored = await self._calls.run_long(
                    "reading what is stored of the run",
                    lambda go_on: find_stored(
                        self._storage,
                        start_from=trial.start_from if trial is not None else None,
                        is_trial=trial is not None,
                        with_states=bool(self._spec.states_kept),
                        verify=self._spec.elastic.verify_checkpoints,
                        heard=go_on,
                    ),
                    timeout_s=timeout_s,
                )
                break
            except (StorageTimeoutError, PermissionError):
                raise
            except Exception as error:  # of file systems that others wrote, not only an OSError
                if time.monotonic() + pause_s > until_s:
                    raise OSError(f"{type(error).__name__}: {error}") from error
                what = f"what is stored in {self._storage.where} cannot be read, trying again: {error}"
                self._record.waits("start", what)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
        self._record.waits("start", "")
        for problem in stored.passed_over:
            if problem not in self._told:
                self._told.add(problem)
                self._tell(problem)
        return stored

    async def report(self, number: int, last: int) -> Report | None:
        """Return the first report from ``number`` to ``last`` in the run's file; None if none can be read."""
        if number not in self._block:
            try:
                self._block = await self._calls.run(
                    "reading reports",
                    lambda: self._storage.read_reports(number, min(number + _BLOCK - 1, last)),
                    timeout_s=self._spec.elastic.storage_timeout_s,
                )
            except Exception as error:
                logger.warning("job %s: report %d cannot be read: %s", self._spec.job, number, error)
                return None
        return next((report for index, report in self._block.items() if index >= number), None)

    async def catch_up(self, first_report: int) -> tuple[Report, ...]:
        """Continue a dead controller's files, and append recorded events that these files lack.

        Returns the latest reports, which are also added to the record.
        """

        def read() -> tuple[set[str], tuple[Report, ...]]:
            return set(self._storage.events.read()), self._storage.last_reports(first_report, MOST)

        # Those that wait, or are being written now, are this controller's own.
        told = [line for event in self._record.events if (line := event.to_json()) not in self._record.unwritten_events]
        timeout_s = self._spec.elastic.storage_timeout_s
        lines, reports = await self._calls.run("reading events and reports", read, timeout_s=timeout_s)
        self._record.catch_up([line for line in told if line not in lines], first_report, reports)
        return reports


def unreadable(spec: JobSpec, error: Exception) -> RuntimeError:
    """Return the error for a job that cannot start because its stored state cannot be read."""
    if isinstance(error, PermissionError):
        return RuntimeError(
            f"the controller of job {spec.job!r} may not read {spec.storage_path}: {error}. Files of a run are their "
            "user's own; where the driver and Ray's processes belong to different users, set "
            "ElasticConfig(private_files=False), and give the storage to a group of both"
        )
    return RuntimeError(
        f"what an earlier run may have stored in {spec.storage_path} cannot be read, so that it is not known where job "
        f"{spec.job!r} is to continue: {error}. Submit it again when its storage answers, with more patience "
        f"(ElasticConfig(storage_timeout_s={spec.elastic.storage_timeout_s:g}) now), or under another RunConfig(name)"
    )
