"""Context of a job: the parts that its components share for the job's entire lifetime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from elastic_ray.background import Background
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.checkpoints.run_directory import StoredCheckpoint
from elastic_ray.events import Report
from elastic_ray.job.allocator_client import AllocatorClient
from elastic_ray.job_spec import JobSpec
from elastic_ray.observe.metrics.job_metrics import JobMetrics
from elastic_ray.observe.trackers.run_trackers import RunTrackers
from elastic_ray.record.event_log import EventLog
from elastic_ray.record.record import JobRecord, report_of
from elastic_ray.record.report_queue import ReportQueue
from elastic_ray.record.writer import RecordWriter
from elastic_ray.worker.messages import WorkerReport
from elastic_ray.worker_group.group import WorkerGroup


class ReportIntake:
    """Receiver of a job's reports.

    Args:
        tell: Function that reports a storage problem, as a sentence, to the job's user.
        trackers: Trackers, which receive every report, some more than once.
    """

    def __init__(
        self, spec: JobSpec, record: JobRecord, writer: RecordWriter, tell: Callable[[str], None], trackers: RunTrackers
    ) -> None:
        self._trial = spec.trial
        self._record, self._writer, self._tell, self._trackers = record, writer, tell, trackers
        self.queue = ReportQueue(ahead=spec.trial.reports_ahead if spec.trial is not None else None)

    async def receive(self, message: WorkerReport, workers: int) -> None:
        """Handle a report from a job with ``workers`` workers; return when the reporter may continue."""
        if message.again:
            # Of an earlier controller, or of a rank 0 that was lost; any checkpoint of it has been found in storage.
            if (report := self._record.report_again(message, workers)) is not None:
                self._enqueue(report)
            return
        self._writer.delete(self._record.report(message, workers))
        if message.problem:
            self._tell(message.problem)
        trial = self._trial
        if message.checkpoint_ref is not None and trial is not None and trial.sweep is not None:
            trial.sweep.hold.remote(trial.controller, message.checkpoint, (message.checkpoint_ref,))
        self._enqueue(report_of(message, workers))
        await self.queue.wait_for_reader(message.index)

    def restore(self, checkpoint: StoredCheckpoint) -> None:
        """Handle a checkpoint that rank 0 stored, but could not report before it was lost."""
        self._enqueue(self._record.restored(checkpoint))

    def _enqueue(self, report: Report) -> None:
        self.queue.put(report)
        self._trackers.report(report)

    async def next(self, after: int | None, wait_s: float) -> Report | None:
        """Wait for the next report after number ``after`` (None: the last delivered); None after ``wait_s`` [s]."""
        wanted = self.queue.wanted(after)
        if self.queue.gone(wanted):
            report = await self._writer.report(wanted, self.queue.oldest - 1)
            return report or await self.queue.next(self.queue.oldest - 1, wait_s)
        return await self.queue.next(after, wait_s)

    async def catch_up(self, first_report: int) -> None:
        """Handle the previous controller's stored reports from number ``first_report``, the run's first (0: unknown).

        Raises OSError if the stored reports cannot be read.
        """
        for report in await self._writer.catch_up(first_report):
            self._enqueue(report)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """Components of one job that the parts of its controller share."""

    spec: JobSpec  # as it was submitted
    record: JobRecord  # what is known of it
    events: EventLog  # what happens to it
    writer: RecordWriter
    planner: BatchPlanner
    reports: ReportIntake
    group: WorkerGroup
    background: Background  # what runs beside the controller's loop, and may outlast the job
    trackers: RunTrackers  # that its user looks at
    metrics: JobMetrics  # that operators look at
    allocator: AllocatorClient  # hears how the job stands
