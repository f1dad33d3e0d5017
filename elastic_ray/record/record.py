"""History of a job, kept by its controller: phase, events, reports, checkpoints and outcome (pure)."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_ray.checkpoints.automatic import StateFile, StoredProgress
from elastic_ray.checkpoints.interval import CheckpointRetention
from elastic_ray.checkpoints.run_directory import StoredCheckpoint
from elastic_ray.events import EventKind, JobEvent, JobOutcome, JobPhase, Report
from elastic_ray.job_spec import JobSpec
from elastic_ray.record.report_queue import Backlog, BoundedLog
from elastic_ray.sealed import Raised, Sealed
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.worker.messages import WorkerReport


class JobRecord:
    """Record of a job, with backlogs of lines that the job's ``RecordWriter`` has yet to write."""

    def __init__(self, spec: JobSpec) -> None:
        self._retention = CheckpointRetention(
            num_to_keep=spec.num_to_keep,
            score_attribute=spec.checkpoint_score_attribute,
            score_order=spec.checkpoint_score_order,
        )
        self.reports: BoundedLog[Report] = BoundedLog()  # numbered from the first of this run
        self._outcome: JobOutcome | None = None
        self._resume: ResumePoint | None = None
        self.phase = JobPhase.WAITING
        self.message = "waiting for resources"
        self.note = ""  # what the allocator has to tell the job's user
        self.told = ""  # what its workers had to, last
        # what the allocator reckons that the job has cost so far [USD]; None without prices
        self.cost_usd: float | None = None
        # when it reckons that the job has workers [s from then]; None where that cannot be told
        self.start_s: float | None = None
        self.needs_node = False  # whether no node that there is could ever hold one of its workers
        self.events: list[JobEvent] = []
        self.unwritten_events = Backlog()  # lines of ``events.jsonl``
        self.unwritten_reports = Backlog()  # lines of ``reports.jsonl``
        self.metrics: Mapping[str, Any] = {}
        self.batch_reason = ""  # why it has changed last
        self._states: tuple[StateFile, ...] = ()
        self._states_kept, self._keeps_last = spec.states_kept, spec.elastic.keep_last_state
        self._since_checkpoint: set[str] = set()  # automatic ones; of as many steps, the later one is further
        self._is_trial = spec.trial is not None
        self._start = spec.trial.start_from if spec.trial is not None else None
        self._waits: dict[str, str] = {}
        self.gpu_memory: dict[str, tuple[int, int]] = {}  # by worker: used at most, and reserved
        self.looked = False  # whether it is known what storage has

    def found(self, stored: StoredProgress) -> tuple[str, ...]:
        """Apply the run's checkpoints found in storage; return the paths of checkpoints that are no longer kept.

        Storage overrides the state in memory: a message about a new checkpoint may have been lost, or a user may have
        deleted a checkpoint.
        """
        self.looked = True
        if self._is_trial:
            if self._retention.latest is None:
                self._resume = stored.start
            return ()
        known = dict(self._retention.kept)
        self._retention.clear()
        self._resume, surplus = None, list[str]()
        for checkpoint in stored.checkpoints:
            surplus += self._retention.add(checkpoint.path, known.get(checkpoint.path, checkpoint.metrics))
            self._resume = checkpoint.resume_point
        # A finished job has left none of the former, unless a controller died before it wrote which is the last.
        found = stored.states or (stored.result if self.phase is JobPhase.FINISHED else ())
        self._states = found if self._states_kept else ()
        return tuple(surplus)

    @property
    def restart_point(self) -> tuple[str | None, ResumePoint | None]:
        """Latest reported checkpoint and its resume point (None if unknown); (None, None) before any checkpoint."""
        latest = self._retention.latest
        path = latest[0] if latest is not None else self._start
        return (path, self._resume) if path is not None else (None, None)

    @property
    def states(self) -> tuple[StateFile, ...]:
        """Automatic checkpoints with more progress than the latest reported checkpoint, newest first."""
        point = self.restart_point[1]
        steps = point.steps if point is not None else 0
        newer = self._since_checkpoint
        return tuple(s for s in self._states if s.steps > steps or (s.steps == steps and s.path in newer))

    @property
    def newest_checkpoint(self) -> str:
        """Path of the checkpoint that a restart would continue from; empty before the first checkpoint."""
        states = self.states
        return states[0].path if states else self.restart_point[0] or ""

    @property
    def resume_point(self) -> ResumePoint | None:
        """Resume point for a restart; None if the job would start from scratch."""
        states = self.states
        return states[0].resume_point if states else self.restart_point[1]

    def saved(self, state: StateFile) -> None:
        """Record the automatic checkpoint ``state``; the process that wrote it deletes the checkpoints it displaces."""
        self._since_checkpoint.add(state.path)
        fewer = [each for each in self._states if each.steps < state.steps]
        self._states = (state, *fewer)[: self._states_kept]
        self._since_checkpoint &= {each.path for each in self._states}

    @property
    def last_state(self) -> StateFile | None:
        """Automatic checkpoint that is kept when the job finishes; None if none is kept."""
        return self._states[0] if self._states and self._keeps_last else None

    @property
    def workers_at_most(self) -> int:
        """Most workers that can continue from the resume point with two samples each, for BatchNorm; 0: no limit."""
        point = self.resume_point
        return max(1, point.samples_left // 2) if point is not None and point.samples_left else 0

    def starting(self) -> None:
        """Record that workers are being started."""
        if self.phase is JobPhase.WAITING:
            self.phase, self.message = JobPhase.STARTING, "workers are starting"

    def starts_again(self, *, waits_because: str | None) -> None:
        """Record that the job has no workers: new ones are starting, or it is waiting because of ``waits_because``."""
        self.phase = JobPhase.STARTING if waits_because is None else JobPhase.WAITING
        self.message = waits_because or ""

    def event(self, event: JobEvent) -> None:
        """Add an event for the job to the record."""
        self.events.append(event)
        self.unwritten_events.add(event.to_json())
        if event.kind is EventKind.STARTED:
            self.message = ""

    def proven(self, event: JobEvent) -> None:
        """Write an event to the run's file without keeping it in memory."""
        self.unwritten_events.add(event.to_json())

    def recall(self, phase: JobPhase, message: str, events: Iterable[JobEvent]) -> None:
        """Restore the phase, message and events saved by the previous controller; call :meth:`catch_up` next."""
        self.phase, self.message = phase, message
        self.events = list(events)

    def report(self, message: WorkerReport, workers: int = 0) -> tuple[str, ...]:
        """Store rank 0's report from a group of ``workers``; return paths of checkpoints that are no longer kept."""
        report = report_of(message, workers)
        self._put(report)
        if report.checkpoint is None:
            return ()
        self._resume = message.resume_point
        self._since_checkpoint.clear()
        return self._retention.add(report.checkpoint, report.metrics)

    def report_again(self, message: WorkerReport, workers: int) -> Report | None:
        """Store a report, from a group of ``workers``, that may already be known; return it if new, otherwise None."""
        if message.index in self.reports:
            return None
        report = report_of(message, workers)
        self._put(report)
        return report

    def _put(self, report: Report) -> None:
        self.reports.put(report.index, report)  # a restart repeats reports after its checkpoint: the later ones count
        self.unwritten_reports.add(report.to_json())
        if report.index >= self.reports.last:
            self.metrics = report.metrics

    def restored(self, checkpoint: StoredCheckpoint) -> Report:
        """Return a report rebuilt from its stored checkpoint, because the report itself never arrived."""
        point = checkpoint.resume_point
        report = Report(
            index=checkpoint.index,
            metrics=checkpoint.metrics,
            checkpoint=checkpoint.path,
            epochs_done=point.epoch if point is not None else 0,
            steps=point.steps if point is not None else 0,
        )
        self._put(report)
        return report

    def catch_up(self, lines: Iterable[str], first_report: int, reports: Iterable[Report]) -> None:
        """Continue the files of the previous controller, whose events are already in this record."""
        for line in lines:
            self.unwritten_events.add(line)
        for report in reports:
            if report.index in self.reports:
                continue  # heard again, or later
            self.reports.put(report.index, report)
            if report.index >= self.reports.last:
                self.metrics = report.metrics
        if first_report:
            self.reports.first = first_report

    def waits(self, who: str, what: str) -> None:
        """Record what the process ``who`` is waiting for from storage; an empty text ends the wait."""
        if what:
            self._waits[who] = what
        else:
            self._waits.pop(who, None)

    def clear_waiters(self) -> None:
        """Clear all waits, because the waiting processes may be gone; those still waiting report again soon."""
        self._waits.clear()

    @property
    def waiting(self) -> str:
        """Description of what the job is waiting for from storage; empty while storage responds."""
        return "; ".join(dict.fromkeys(self._waits.values()))

    def end(
        self, phase: JobPhase, *, error: BaseException | Raised | None, return_value: Sealed | None, message: str
    ) -> None:
        """Record how the job ended: its final phase, error, return value, and a message that explains the end."""
        self.phase, self.message = phase, message
        left = self.last_state if phase is JobPhase.FINISHED else next(iter(self._states), None)
        self._outcome = JobOutcome(
            phase=phase,
            error=error,
            metrics=self.metrics,
            reports=self.reports.values(),
            first_report=self.reports.first or 1,
            checkpoints=self._retention.kept,
            states=posixpath.dirname(left.path) if left is not None else "",
            return_value=return_value,
        )

    def outcome(self) -> JobOutcome | None:
        """Return the job's outcome; None until the job has ended."""
        return self._outcome


def report_of(message: WorkerReport, workers: int) -> Report:
    """Return a report in the form shown to users; ``workers`` is the job's size when the report was made."""
    return Report(
        index=message.index,
        metrics=message.metrics,
        checkpoint=message.checkpoint,
        workers=workers,
        epochs_done=message.resume_point.epoch,
        steps=message.resume_point.steps,
    )
