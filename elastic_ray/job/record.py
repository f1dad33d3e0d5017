"""A job's history as its controller keeps it: phase, events, reports, checkpoints, outcome."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_ray.events import EventKind, JobEvent, JobOutcome, JobPhase
from elastic_ray.job.messages import WorkerReport
from elastic_ray.job.spec import JobSpec
from elastic_ray.retention import CheckpointBook
from elastic_ray.state_files import StateFile, delete_states, state_files
from elastic_ray.storage import RunStorage


class JobRecord:
    """See the module's text. Files are written by ``write_events`` and ``delete_checkpoints``, which may block.

    Attributes:
        note: what the allocator has to tell the job's user.
        told: what its workers had to, last.
        cost_usd: what the allocator reckons that the job has cost so far [USD]; None without prices.
        surplus: checkpoints of an earlier run of this name that are not to be kept.
    """

    def __init__(self, spec: JobSpec, storage: RunStorage) -> None:
        self._storage = storage
        self._book = CheckpointBook(
            num_to_keep=spec.num_to_keep,
            score_attribute=spec.checkpoint_score_attribute,
            score_order=spec.checkpoint_score_order,
        )
        self._reports: dict[int, WorkerReport] = {}
        self._unwritten: list[str] = []
        self._lock = threading.Lock()
        self._outcome: JobOutcome | None = None
        self._resume: Mapping[str, Any] | None = None
        self.phase = JobPhase.WAITING
        self.message = "waiting for resources"
        self.note = ""
        self.told = ""
        self.cost_usd: float | None = None
        self.events: list[JobEvent] = []
        self.metrics: Mapping[str, Any] = {}
        self.batch_reason = ""
        self.surplus: list[str] = []
        self._states: tuple[StateFile, ...] = ()
        self._states_kept = spec.states_kept
        self._since_checkpoint: set[str] = set()  # automatic ones; of as many steps, the later one is further
        self._start: str | None = None
        if spec.trial is not None:
            self._start = spec.trial.start_from
            self._resume = storage.load_progress(self._start) if self._start is not None else None
            return
        for stored in storage.stored_checkpoints():  # an earlier run of this name
            self.surplus += self._book.add(stored.path, stored.metrics)
            self._resume = stored.progress
        self._states = state_files(storage) if spec.states_kept else ()

    @property
    def restart_point(self) -> tuple[str | None, Mapping[str, Any] | None]:
        """Latest checkpoint and where it stands, None where it does not say; (None, None) before the first."""
        latest = self._book.latest
        path = latest[0] if latest is not None else self._start
        return (path, self._resume) if path is not None else (None, None)

    @property
    def states(self) -> tuple[StateFile, ...]:
        """Automatic checkpoints that are further than that, newest first."""
        steps = int((self.restart_point[1] or {}).get("steps", 0))
        newer = self._since_checkpoint
        return tuple(s for s in self._states if s.steps > steps or (s.steps == steps and s.path in newer))

    @property
    def resume_point(self) -> Mapping[str, Any] | None:
        """Where a restart would go on; None at the beginning."""
        states = self.states
        return states[0].resume_point if states else self.restart_point[1]

    def saved(self, state: StateFile) -> None:
        """An automatic checkpoint was written; its writer deletes the files of those that are not kept."""
        self._since_checkpoint.add(state.path)
        fewer = [each for each in self._states if each.steps < state.steps]
        self._states = (state, *fewer)[: self._states_kept]

    @property
    def workers_at_most(self) -> int:
        """Most workers that can go on from there, 0 for no limit.

        Each needs samples in its first step: two, where there are as many, for BatchNorm cannot do with one.
        """
        left = int((self.resume_point or {}).get("left", 0))
        return max(1, left // 2) if left else 0

    def starting(self) -> None:
        """Workers are being started."""
        if self.phase is JobPhase.WAITING:
            self.phase, self.message = JobPhase.STARTING, "workers are starting"

    def event(self, event: JobEvent) -> None:
        """Add an event."""
        self.events.append(event)
        self._unwritten.append(event.to_json())
        if event.kind is EventKind.STARTED:
            self.message = ""

    def write_events(self) -> None:
        """Write what is new to ``events.jsonl``."""
        with self._lock:
            lines, self._unwritten = self._unwritten, []
            for line in lines:
                self._storage.append_event(line)
            self._storage.flush()

    def report(self, report: WorkerReport) -> tuple[str, ...]:
        """Take rank 0's report; returns the checkpoints that are not kept any more."""
        self._reports[report.index] = report  # a restart repeats reports after its checkpoint: the later ones count
        self.metrics = self._reports[max(self._reports)].metrics
        if report.checkpoint is None:
            return ()
        self._resume = report.resume_point
        self._since_checkpoint.clear()
        return self._book.add(report.checkpoint, report.metrics)

    def delete_checkpoints(self, paths: Iterable[str]) -> None:
        """Delete checkpoints."""
        for path in paths:
            self._storage.delete_checkpoint(path)

    def delete_states(self) -> None:
        """Delete the automatic checkpoints: the job has finished."""
        self._states = ()
        delete_states(self._storage)

    def end(self, phase: JobPhase, *, error: BaseException | None, return_value: Any, message: str) -> None:
        """The job has ended."""
        self.phase, self.message = phase, message
        self._outcome = JobOutcome(
            phase=phase,
            error=error,
            metrics=self.metrics,
            history=tuple((report.metrics, report.checkpoint) for _, report in sorted(self._reports.items())),
            first_report=min(self._reports, default=1),
            checkpoints=self._book.kept,
            return_value=return_value,
        )

    def outcome(self) -> JobOutcome | None:
        """How the job ended; None before."""
        return self._outcome
