"""Listings of the command line: immutable rows built from the cluster's answers, and their cells as text (pure)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_ray.driver.display import status_fields
from elastic_ray.events import JobPhase, JobStatus, named_parts, number_in, numbers_in
from placement.arguments import meant
from placement.cluster.cluster import GPU_TYPE_LABEL, MARKET_LABEL, by_node, schedulable
from placement.cluster.node_record import NodeHistory
from placement.text import ago, count, printable

if TYPE_CHECKING:
    from elastic_ray.job_spec import JobSpec
    from elastic_ray.record.ended import EndedJobNote
    from placement.allocator.snapshot import CoreSnapshot, DecisionRecord, JobState


SHORT_ID = 8
"""Characters of a node's id that are shown."""

JOB_COLUMNS = (
    *("JOB", "PHASE", "WORKERS", "OF", "BATCH", "SAMPLES/S", "EPOCH", "STEP", "DONE", "ETA", "METRIC", "AGE"),
    "WHY",
)
NODE_COLUMNS = ("NODE", "ADDRESS", "STATE", "TYPE", "MARKET", "GPU", "CPU", "FAILED", "JOBS")
DECISION_COLUMNS = ("WHEN", "TRIGGER", "JOB", "WORKERS", "REASON")


def comes_from(own: str, submission: str) -> bool:
    """True if the submission id ``own`` is ``submission`` itself, or ``submission`` plus a number such as ``.2``."""
    return re.fullmatch(rf"{re.escape(submission)}(\.\d+)?", own) is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswers:
    """Status and specification of one job, as reported by its controller; None for an answer that arrived too late."""

    actor: str  # the controller's name, ``job:`` included
    status: JobStatus | None = None  # None if it did not answer in time
    spec: JobSpec | None = None

    def comes_from(self, submission: str) -> bool:
        """True if the job was started by a submission with this id or name."""
        return comes_from("" if self.spec is None else self.spec.submission, submission)

    @property
    def job(self) -> str:
        """Name of the job; if the controller does not answer, derived from the actor's name, which may differ."""
        return self.status.job if self.status is not None else self.actor.removeprefix("job:")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Script that Ray runs on behalf of ``elastic-ray submit``."""

    submission: str
    status: str  # ``PENDING``, ``RUNNING``, ``STOPPED``, ``SUCCEEDED`` or ``FAILED``
    name: str = ""  # of the script's first job, unless the script names it itself
    message: str = ""  # Ray's, of one line
    entrypoint: str = ""
    started_s: float | None = None  # [s since the epoch], None before
    ended_s: float | None = None

    @property
    def ended(self) -> bool:
        """True if the script has ended."""
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")

    @property
    def phase(self) -> str:
        """Phase of the script, in the same terms as for jobs; ``script`` means that it is running."""
        words = {"PENDING": "submitted", "RUNNING": "script", "SUCCEEDED": "finished"}
        return words.get(self.status, self.status.lower())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobRow(JobStatus):
    """Row for one job, or for a script without a job; its fields are the same as in ``--json``.

    Attributes:
        phase: A value of ``JobPhase``; ``silent`` if the controller does not answer. For a script, ``submitted``,
            ``script`` (running), or how it ended. For a row that summarises a sweep, ``sweep``.
        held_at: Size set by ``elastic-ray resize``; None leaves the size to the allocator.
        nodes: Workers planned by the allocator, keyed by node id.
        submission: Id of the Ray submission that started the job; empty if it was started otherwise.
    """

    phase: str  # type: ignore[assignment]  # also what a script is
    min_workers: int | None = None
    max_workers: int | None = None
    held_at: int | None = None
    reason: str = ""
    nodes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tenant: str = ""
    user: str = ""
    priority: int = 0
    submitted_s: float | None = None
    ended_s: float | None = None
    submission: str = ""
    storage_path: str = ""

    @property
    def is_script(self) -> bool:
        """True if the row stands for a script without a job."""
        return bool(self.submission) and not self.storage_path

    @property
    def failed(self) -> bool:
        """True if the job failed."""
        return self.phase == JobPhase.FAILED.value


def ended_row(ended: EndedJobNote) -> JobRow:
    """Return the table row for a job that has ended."""
    row = with_status(JobRow(job=ended.status.job, phase=ended.status.phase.value), ended.status)
    return dataclasses.replace(
        row,
        message=ended.cause,
        tenant=ended.tenant,
        user=ended.user,
        submitted_s=ended.ended_s - ended.duration_s,
        ended_s=ended.ended_s,
        submission=ended.submission,
        storage_path=ended.storage_path,
    )


def with_status(row: JobRow, status: JobStatus) -> JobRow:
    """Return a copy of the row with the fields of a newer status."""
    told = {field.name: getattr(status, field.name) for field in dataclasses.fields(JobStatus)}
    return dataclasses.replace(row, **(told | {"job": row.job, "phase": status.phase.value}))


def job_rows(
    answers: Sequence[JobAnswers],
    snapshot: CoreSnapshot | None,
    submissions: Sequence[Submission] = (),
    ended: Sequence[EndedJobNote] = (),
) -> tuple[JobRow, ...]:
    """Return a row for each job known to a controller or the allocator and each script without a job, oldest first."""
    states = dict(snapshot.jobs) if snapshot is not None else {}
    rows = [_job_row(each, states.pop(each.job, None)) for each in answers]
    # A controller that does not answer has been heard of a moment ago, or is a trial's, whose name is not the job's.
    rows += [_job_row(JobAnswers(actor=f"job:{job}"), state) for job, state in states.items()]
    begun = {row.submission for row in rows}
    silent = {row.job for row in rows if row.phase == "silent"}  # its controller has not said where it comes from
    rows += [
        _script_row(each) for each in submissions if each.submission not in begun and each.name not in silent - {""}
    ]
    present = sorted(rows, key=lambda row: (row.submitted_s or 0.0, row.job))
    names = {row.job for row in rows}
    return (*present, *(ended_row(each) for each in ended if each.status.job not in names))


def _job_row(answers: JobAnswers, state: JobState | None) -> JobRow:
    """Return a job's row, built from its controller's answers and the allocator's state."""
    status, spec = answers.status, answers.spec
    view = state.view if state is not None else None
    row = JobRow(
        job=answers.job,
        phase="silent",
        message="" if answers.status is not None else "its controller is starting, or does not answer",
        min_workers=spec.min_workers if spec is not None else None,
        max_workers=spec.max_workers if spec is not None else None,
        submission=spec.submission if spec is not None else "",
        user=spec.user if spec is not None else "",
        storage_path=spec.storage_path if spec is not None else "",
    )
    if status is not None:
        row = with_status(row, status)
    if state is not None and view is not None:
        row = dataclasses.replace(
            row,
            workers=row.workers if status is not None else view.workers,
            min_workers=view.min_workers,
            max_workers=view.max_workers,
            held_at=view.held_at,
            reason=str(state.reason),
            nodes=dict(state.target),
            tenant=view.tenant,
            priority=view.priority,
            submitted_s=view.submitted_s,
        )
    return row


def _script_row(script: Submission) -> JobRow:
    """Return the row of a script without a job."""
    return JobRow(
        job=script.name or script.submission,
        phase=script.phase,
        message=script.message,
        submitted_s=script.started_s,
        ended_s=script.ended_s,
        submission=script.submission,
    )


def metric_cell(row: JobRow, metric: str = "") -> str:
    """Return a job's ``metric`` as text; by default, the job's own metric with its name. Empty if not reported."""
    name = metric or row.shown_metric
    value = number_in(row.metrics, name)
    return "" if value is None else f"{value:.4g}" if metric else f"{printable(name)} {value:.4g}"


def with_metric(columns: Sequence[str], metric: str) -> tuple[str, ...]:
    """Return the column names, with METRIC replaced by the name ``metric`` unless that is empty."""
    return tuple(metric if each == "METRIC" and metric else each for each in columns)


def no_metric(rows: Sequence[JobRow], metric: str) -> str:
    """Return a message if some rows have metrics but none has a number for ``metric``; otherwise an empty text."""
    told = [row for row in rows if row.metrics]
    if not metric or not told or any(number_in(row.metrics, metric) is not None for row in told):
        return ""
    for row in told:
        if metric in row.metrics:
            return f"metric {metric!r} of job {row.job} is {row.metrics[metric]!r:.60}, which is no number"
    names = sorted({name for row in told for name in numbers_in(row.metrics)})
    return f"no job reports a metric {metric!r}{meant(metric, names) if names else ''}"


def job_cells(row: JobRow, now_s: float, metric: str = "") -> tuple[str, ...]:
    """Return the texts of a job's table row, in the order of ``JOB_COLUMNS``."""
    low, high = row.min_workers, row.max_workers
    limits = "" if low is None else f"{low}" if low == high else f"{low}:{high}"
    fields = {"workers": str(row.workers) if row.workers else ""}
    with contextlib.suppress(ValueError):  # not a job's phase: a script, or a silent controller
        phase = JobPhase(row.phase)
        fields = fields if row.is_script else status_fields(dataclasses.replace(row, phase=phase))
    why = row.message or row.note or row.reason
    return (
        row.job,
        row.phase,
        fields["workers"],
        limits + (" held" if row.held_at is not None else ""),
        fields.get("batch", ""),
        fields.get("samples/s", ""),
        fields.get("epoch", ""),
        fields.get("step", ""),
        fields.get("done", ""),
        fields.get("ETA", ""),
        metric_cell(row, metric),
        _age(row, now_s),
        " ".join(why.split()),
    )


def _age(row: JobRow, now_s: float) -> str:
    """Return the time since a job was submitted, or since it ended."""
    if row.ended_s is not None:
        return f"{ago(now_s - row.ended_s)} ago"
    return "" if row.submitted_s is None else ago(now_s - row.submitted_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """Row for one living node; its fields are the same as in ``--json``."""

    node_id: str  # Ray's hex id
    address: str  # its IP address
    total: Mapping[str, float]
    # what elastic jobs may use of them altogether; None while there is no allocator to say
    free: Mapping[str, float] | None
    draining: bool  # whether it is about to go
    gpu_type: str
    market: str  # ``spot`` or ``on-demand``, where a label says so
    jobs: Mapping[str, int]  # planned workers by job
    labels: Mapping[str, str]
    failures: NodeHistory | None = None  # what is known of workers that failed there; None for nothing


def node_rows(nodes: Sequence[Mapping[str, Any]], snapshot: CoreSnapshot | None) -> tuple[NodeRow, ...]:
    """Return rows for Ray's living nodes, with the allocator's view of each, sorted by address."""
    cluster = snapshot.cluster.by_id() if snapshot is not None else {}
    failed = {each.node: each for each in snapshot.node_failures} if snapshot is not None else {}
    placed = {job: by_node(each.target) for job, each in snapshot.jobs.items()} if snapshot is not None else {}
    rows = []
    for node in nodes:
        if not node["Alive"]:
            continue
        node_id, labels = str(node["NodeID"]), dict(node.get("Labels") or {})
        seen = cluster.get(node_id)
        rows.append(
            NodeRow(
                node_id=node_id,
                address=str(node.get("NodeManagerAddress", "")),
                total=schedulable(node["Resources"]),
                free=None if seen is None else schedulable(seen.free),
                draining=seen is not None and seen.draining,
                gpu_type=labels.get(GPU_TYPE_LABEL, ""),
                market=labels.get(MARKET_LABEL, ""),
                jobs={job: math.ceil(at[node_id]) for job, at in sorted(placed.items()) if node_id in at},
                labels=labels,
                failures=failed.get(node_id),
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.address, row.node_id)))


def node_cells(row: NodeRow) -> tuple[str, ...]:
    """Return the texts of a node's table row, in the order of ``NODE_COLUMNS``."""
    return (
        row.node_id[:SHORT_ID],
        row.address,
        "draining" if row.draining else "alive",
        row.gpu_type or "-",
        row.market or "-",
        _share(row, "GPU"),
        _share(row, "CPU"),
        "-" if row.failures is None else f"{row.failures.failures}",
        " ".join(f"{job}:{workers}" for job, workers in row.jobs.items()) or "-",
    )


def _share(row: NodeRow, name: str) -> str:
    """Return text such as ``3/4``: elastic jobs may use three of four."""
    total = row.total.get(name, 0.0)
    if not total:
        return "-"
    return f"{total:g}" if row.free is None else f"{row.free.get(name, 0.0):g}/{total:g}"


def decision_cells(record: DecisionRecord, now_s: float) -> tuple[str, ...]:
    """Return the texts of the table row for an allocator decision, in the order of ``DECISION_COLUMNS``."""
    change = f"{record.from_workers} -> {record.to_workers}" if record.job else ""
    when = f"{ago(now_s - record.time_s)} ago"
    why = str(record.reason) if record.job else " ".join(record.reason.explained.split())
    return (when, record.trigger, record.job or "-", change, why)


def decisions(snapshot: CoreSnapshot, job: str | None, last: int) -> tuple[DecisionRecord, ...]:
    """Return the allocator's last ``last`` decisions, oldest first; with ``job``, only those about this job."""
    log = [record for record in snapshot.log if job is None or record.job == job]
    return tuple(log[len(log) - min(last, len(log)) :])


def outlook_lines(row: JobRow) -> tuple[str, ...]:
    """Return the lines printed after a job's status line: progress, time, waits, GPUs; unknown facts are left out."""
    lines = (_waits(row), _left(row), _time(row), _gpus(row), _pause(row))
    return tuple(line for line in lines if line)


def _waits(row: JobRow) -> str:
    """Return text such as ``waits for 2 slots (GPU 1) on T4; about 3m05s until they are there``."""
    if not row.waits_for:
        return ""
    known = row.start_s is not None and math.isfinite(row.start_s)
    return f"waits for {row.waits_for}" + (f"; about {ago(row.start_s or 0.0)} until they are there" if known else "")


def _left(row: JobRow) -> str:
    """Return text such as ``42% done; 3m05s left (2m10s to 4m00s), 12345 samples, 500 steps``."""
    left = [until_end(row)] if until_end(row) else []
    left += [count(row.samples_left, "sample")] if row.samples_left is not None else []
    left += [count(row.tokens_left, "token")] if row.tokens_left is not None else []
    left += [count(row.steps_left, "step")] if row.steps_left is not None else []
    done = f"{percent(row.progress)} done" if percent(row.progress) else ""
    return "; ".join(part for part in (done, "left: " + ", ".join(left) if left else "") if part)


def until_end(row: JobRow) -> str:
    """Return the time until the job ends as text such as ``3m05s (2m10s to 4m00s)``; empty if it is unknown."""
    if row.eta_s is None or not math.isfinite(row.eta_s):
        return ""
    low_s, high_s = row.eta_low_s, row.eta_high_s
    known = low_s is not None and high_s is not None and math.isfinite(low_s) and math.isfinite(high_s)
    return ago(row.eta_s) + (f" ({ago(low_s or 0.0)} to {ago(high_s or 0.0)})" if known else "")


def percent(share: float | None) -> str:
    """Return a share (0 to 1) as text such as ``42%``; empty if it is unknown or not finite."""
    return f"{share:.0%}" if share is not None and math.isfinite(share) else ""


def _time(row: JobRow) -> str:
    """Return text such as ``10m00s since its submission: training 80%, starting 5%, waiting 15%``."""
    parts = named_parts(row)
    whole_s = sum(parts.values())
    if not (whole_s > 0 and math.isfinite(whole_s)):
        return ""
    shares = (f"{name} {seconds / whole_s:.0%}" for name, seconds in parts.items() if seconds > 0)
    return f"{ago(whole_s)} since its submission: " + ", ".join(shares)


def _gpus(row: JobRow) -> str:
    """Return text such as ``GPUs: 31.2 GiB used, 40.0 reserved; nccl; 512 samples/s each; MFU 38%``."""
    parts = []
    if row.gpu_memory_used_bytes is not None and row.gpu_memory_reserved_bytes is not None:
        used, reserved = (each / (1 << 30) for each in (row.gpu_memory_used_bytes, row.gpu_memory_reserved_bytes))
        parts.append(f"{used:.1f} GiB used, {reserved:.1f} reserved")
        parts += [row.backend] if row.backend else []
        speed, unit = (row.tokens_per_s, "tokens") if row.tokens_per_s else (row.throughput, "samples")
        parts += [f"{speed / row.workers:.4g} {unit}/s each"] if row.workers and speed else []
        parts.append(f"MFU {percent(row.mfu) or 'unknown'}")
    bound = f"{row.memory_bound} samples at once at most" if row.memory_bound is not None else ""
    return "; ".join(part for part in ("GPUs: " + "; ".join(parts) if parts else "", bound) if part)


def _pause(row: JobRow) -> str:
    """Return text such as ``last pause 0.18 s: vote 0.01, group 0.05, state 0.12; first step after it 0.30 s``."""
    pause = row.last_pause
    if pause is None:
        return ""
    first = f"; first step after it {pause.first_step_s:.2f} s" if pause.first_step_s is not None else ""
    parts = f"vote {pause.vote_s:.2f}, group {pause.group_s:.2f}, state {pause.state_s:.2f}"
    return f"last pause {pause.pause_s:.2f} s: {parts}{first}"
