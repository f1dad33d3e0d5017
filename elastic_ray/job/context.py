"""Shared parts of a job: given to each of its components, and the same for the job's whole life."""

from __future__ import annotations

import dataclasses

from elastic_ray.background import Background
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.job.allocator_client import AllocatorClient
from elastic_ray.job.report_intake import ReportIntake
from elastic_ray.job_spec import JobSpec
from elastic_ray.observe.metrics.job_metrics import JobMetrics
from elastic_ray.observe.trackers.run_trackers import RunTrackers
from elastic_ray.record.event_log import EventLog
from elastic_ray.record.record import JobRecord
from elastic_ray.record.writer import RecordWriter
from elastic_ray.worker_group.group import WorkerGroup


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """Parts of one job under its controller.

    Attributes:
        spec: as it was submitted.
        record: what is known of it.
        events: what happens to it.
        background: what runs beside the controller's loop, and may outlast the job.
        trackers: that its user looks at.
        metrics: that operators look at.
        allocator: hears how the job stands.
    """

    spec: JobSpec
    record: JobRecord
    events: EventLog
    writer: RecordWriter
    planner: BatchPlanner
    reports: ReportIntake
    group: WorkerGroup
    background: Background
    trackers: RunTrackers
    metrics: JobMetrics
    allocator: AllocatorClient
