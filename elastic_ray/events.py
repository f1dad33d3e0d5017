"""Facts that a job reports about itself: frozen values that cross process borders and end in logs and tests."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elastic_ray.json_numbers import dump, load

if TYPE_CHECKING:
    from elastic_ray.sealed import Raised, Sealed


class EventKind(str, enum.Enum):
    """Kind of an event of a job; the string is the one in the JSON log.

    Examples:
        >>> from elastic_ray.events import EventKind
        >>> EventKind("failure") is EventKind.FAILURE
        True
    """

    STARTED = "started"
    RESIZE = "resize"
    FAILURE = "failure"
    RESTART = "restart"
    PREEMPTED = "preempted"
    PAUSED = "paused"
    RESUMED = "resumed"
    CANCELLED = "cancelled"
    BATCH = "batch"
    BATCH_KEPT = "batch_kept"
    BRANCH = "branch"
    STRATEGY = "strategy"
    STRAGGLER = "straggler"
    OUT_OF_MEMORY = "out_of_memory"
    CHECKPOINT = "checkpoint"
    RECOVERED = "recovered"
    STORAGE = "storage"
    NOT_FINITE = "not_finite"
    CAUGHT_UP = "caught_up"
    POLICY = "policy"
    PASS = "pass"
    WARNING = "warning"
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialFacts:
    """Facts of a job that is a trial of a sweep."""

    sweep: str  # its name, as ``elastic-ray stop`` takes it
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metric: str = ""  # what the sweep compares trials by; empty where that is not known
    mode: str = "min"  # "max" if a larger metric is better, "min" otherwise
    # reports after which the sweep may cut it, ascending, the last one its end; empty where unknown
    rungs: tuple[int, ...] = ()

    @classmethod
    def read(cls, told: Any) -> TrialFacts | None:
        """Read the facts of a trial from a file's value; None if it is unreadable."""
        try:
            found = cls(**{**told, "rungs": tuple(int(rung) for rung in told["rungs"])})
        except (TypeError, ValueError, KeyError):
            return None
        texts = all(isinstance(each, str) for each in (found.sweep, found.metric, found.mode))
        return found if texts and isinstance(found.parameters, Mapping) else None


def number_in(metrics: Any, name: str) -> float | None:
    """Return a reported metric, nested as in ``"eval/loss"``; None where there is none, or it is no finite number."""
    with contextlib.suppress(TypeError, ValueError, KeyError, RuntimeError, OverflowError):
        if name in metrics:
            found = float(metrics[name])
        else:
            for part in name.split("/"):
                metrics = metrics[part]
            found = float(metrics)
        return found if math.isfinite(found) else None
    return None


MOST_METRICS = 32
"""Metrics of one job that are kept and shown over time."""


def numbers_in(metrics: Any, prefix: str = "", depth: int = 3) -> dict[str, float]:
    """Finite numbers among metrics by name, the loss first; those of a mapping in them as ``"outer/inner"``.

    Args:
        metrics: as reported; what is no number is left out, and so are those beyond ``MOST_METRICS``.
        depth: how many mappings within each other are looked into.
    """
    found: dict[str, float] = {}
    if not isinstance(metrics, Mapping) or depth == 0:
        return found
    for name in sorted(metrics, key=lambda name: name != "loss"):
        value = metrics[name]
        if isinstance(value, Mapping):
            found |= numbers_in(value, f"{prefix}{name}/", depth - 1)
        elif not isinstance(value, str | bytes | bool) and (number := number_in(metrics, name)) is not None:
            found[f"{prefix}{name}"] = number
    return dict(list(found.items())[:MOST_METRICS])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Pause of a rank's training by a change of its group, by what it waited for [s, >= 0].

    Attributes:
        vote_s: from the last committed step until the ranks had agreed on the change, or its failure was noticed; the
            step that failed is part of it.
        group_s: until the new group stood.
        state_s: until all of its ranks were identical, and ready for the first step.
        first_step_s: of the first step after that, which is no part of the pause; None while it is not known.
    """

    vote_s: float = 0.0
    group_s: float = 0.0
    state_s: float = 0.0
    first_step_s: float | None = None

    @property
    def pause_s(self) -> float:
        """Length of the whole pause [s]."""
        return self.vote_s + self.group_s + self.state_s

    @property
    def detail(self) -> dict[str, float]:
        """Parts of the pause for an event's ``detail``."""
        return {"vote_s": self.vote_s, "group_s": self.group_s, "state_s": self.state_s}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """Event: one change in a job's life.

    Attributes:
        kind: what happened.
        time_s: seconds since the epoch, on the controller's clock.
        from_workers: world size before the event.
        to_workers: world size after it.
        reason: the decision's reason, a sentence.
        pause_s: seconds between the last step of the old generation and the readiness for the first of the
            new one; the longest over the ranks that stayed. 0 where nothing paused.
        generation: the generation that the event led to.
        detail: further numbers of the event (batch sizes, node, rank...), JSON-serialisable. Of a change of size and of
            a failure ``vote_s``, ``group_s`` and ``state_s``, which sum to ``pause_s``; of a start ``start_s``, the
            time since its processes were started; of a restart ``steps``, where it starts, and ``reached_steps``.

    Examples:
        >>> from elastic_ray.events import EventKind, JobEvent
        >>> event = JobEvent(kind=EventKind.RESIZE, time_s=0.0, from_workers=1, to_workers=4, reason="")
        >>> event.to_workers - event.from_workers
        3
    """

    kind: EventKind
    time_s: float
    from_workers: int
    to_workers: int
    reason: str
    pause_s: float = 0.0
    generation: int = 0
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """Return the event as one line of JSON, the format of ``events.jsonl``."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return dump({**values, "kind": self.kind.value, "detail": dict(self.detail)}, sort_keys=True, other=str)

    @classmethod
    def from_json(cls, line: str) -> JobEvent:
        """Invert :meth:`to_json`.

        Raises:
            ValueError: if the line is no JSON object of these fields.
        """
        values = _object(line, "an event")
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in values.items() if name in known}
        wrong = sorted(name for name, value in values.items() if not _is_plain(name, value))
        if wrong:
            raise ValueError(f"an event's {wrong[0]} cannot be {values[wrong[0]]!r:.80}")
        try:
            return cls(**{**values, "kind": EventKind(values.get("kind"))})
        except TypeError as error:
            raise ValueError(f"an event lacks fields: {error}") from None


_COUNTS = ("from_workers", "to_workers", "generation")
_SECONDS = ("time_s", "pause_s")
_LARGEST = 1e15


def _object(line: str, what: str) -> dict[str, Any]:
    """The JSON object on a line of a run's files, which anybody may have written. Raises ValueError: there is none."""
    try:
        values = load(line)
    except RecursionError:
        raise ValueError(f"{what} must be a JSON object, but is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"{what} must be a JSON object, but got {line!r:.200}")
    return values


def _is_plain(name: str, value: Any) -> bool:
    """True if a field of an event can have this value."""
    if name in _COUNTS:
        return _is_count(value)
    if name in _SECONDS:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and abs(value) < _LARGEST
    return isinstance(value, dict if name == "detail" else str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


class JobPhase(str, enum.Enum):
    """Phase of a job between submission and end.

    Examples:
        >>> from elastic_ray.events import JobPhase
        >>> JobPhase("running") is JobPhase.RUNNING
        True
    """

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def ended(self) -> bool:
        """True if the job will never train again."""
        return self in (JobPhase.FINISHED, JobPhase.FAILED, JobPhase.STOPPED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """Status of a job at one moment.

    Attributes:
        job: name of the job.
        phase: where the job is in its life.
        workers: world size of the generation that trains now (0 before the first).
        target_workers: world size the job is heading for.
        generation: number of the present generation.
        epoch: epoch in progress, from 0.
        epochs: declared number of epochs, if the loop declared it.
        step: optimizer steps committed so far.
        batch_size: global batch size M [samples].
        throughput: [samples/s], measured.
        goodput: throughput x statistical efficiency [samples/s], None before the model is fitted.
        efficiency: statistical efficiency of the present batch M, (M0 + B) / (M + B) with M0 the initial batch and B
            the gradient noise scale, at most 1; None likewise.
        metrics: the latest metrics of rank 0, as reported.
        message: what the job waits for, or why it ended; empty when it simply runs.
        cost_usd: what it has cost so far [USD], by the prices of the allocator's autoscaling; None without.
        note: what to know meanwhile: a deadline or budget that cannot be met, with the best that can be had; workers
            that find no node; storage that does not answer, and what for; gradients that are not finite, and what a
            worker warns of; workers that are slow.
        waits_for: what it cannot continue without: slots (of which type), a placement group, a node of the autoscaler,
            the start of processes, storage; empty when it simply runs.
        start_s: of a job that waits for slots, when jobs that run now will have left enough of them, by their ETAs and
            if none comes in between [s from now]; None where that cannot be told.
        progress: 0 to 1; None without a declared length (epochs; of a trial also the most that its sweep gives one).
        samples_left: samples until its end; None where the length, or how many samples it takes, is unknown.
        steps_left: the same in steps of the present batch.
        tokens_per_s: throughput in tokens, where the loader's batch is declared in tokens; else None.
        tokens_left: ``samples_left`` in tokens, likewise.
        eta_s: time to its end at the present goodput [s]; None where that, or the length, is unknown.
        eta_low_s: the least that it is likely to be, at most ``eta_s`` [s] (``elastic_ray.record.outlook.eta_range``).
        eta_high_s: the most that it is likely to be, at least ``eta_s`` [s].
        productive_share: training time / time since submission (ETTR), 0 to 1; None before any time has passed.
        waiting_s: of that time, what passed while it waited for resources [s].
        starting_s: from the start of its processes until a group trained [s].
        pausing_s: what changes of its group, failures among them, paused it for [s].
        catching_up_s: after a restart, training until it was as far as before [s].
        training_s: the rest [s]; the five sum to the time since submission.
        last_pause: the last pause by what it was waiting for; None before the first.
        learning_rate_factor: what the first model's learning rates are multiplied by, for its batch and by policies;
            None before the first step.
        gpu_memory_used_bytes: most that tensors of a worker have held of its GPU; None without GPUs.
        gpu_memory_reserved_bytes: most that a worker has reserved of it, caches included.
        memory_bound: most samples that a worker takes at once, since one ran out of memory with more; None for none.
        backend: carries gradients between the GPUs: ``nccl`` or ``gloo``; empty for one worker.
        mfu: model FLOPs utilisation, 0 to 1; None where operations, or the GPU's peak, are not known.
        reports: reports of rank 0 so far, those of earlier runs that it continues from included.
        checkpoint: path of what a restart would continue from, reported or automatic; empty before the first.
        trial: of a trial of a sweep, what it is; None of any other job.
        metric: that the job is judged by: its sweep's, or its checkpoints' score; empty where it names none.

    Examples:
        >>> from elastic_ray.events import JobPhase, JobStatus
        >>> status = JobStatus(job="digits", phase=JobPhase.RUNNING, workers=2, step=40)
        >>> f"{status.job}: {status.phase.value}, {status.workers} workers"
        'digits: running, 2 workers'
    """

    job: str
    phase: JobPhase
    workers: int = 0
    target_workers: int = 0
    generation: int = 0
    epoch: int = 0
    epochs: int | None = None
    step: int = 0
    batch_size: int = 0
    throughput: float = 0.0
    goodput: float | None = None
    efficiency: float | None = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    message: str = ""
    cost_usd: float | None = None
    note: str = ""
    waits_for: str = ""
    start_s: float | None = None
    progress: float | None = None
    samples_left: int | None = None
    steps_left: int | None = None
    tokens_per_s: float | None = None
    tokens_left: int | None = None
    eta_s: float | None = None
    eta_low_s: float | None = None
    eta_high_s: float | None = None
    productive_share: float | None = None
    waiting_s: float = 0.0
    starting_s: float = 0.0
    pausing_s: float = 0.0
    catching_up_s: float = 0.0
    training_s: float = 0.0
    last_pause: Pause | None = None
    learning_rate_factor: float | None = None
    gpu_memory_used_bytes: int | None = None
    gpu_memory_reserved_bytes: int | None = None
    memory_bound: int | None = None
    backend: str = ""
    mfu: float | None = None
    reports: int = 0
    checkpoint: str = ""
    trial: TrialFacts | None = None
    metric: str = ""

    @property
    def shown_metric(self) -> str:
        """Name of the metric that listings show: the one that the job names, else its first number; empty for none."""
        return self.metric or next(iter(numbers_in(self.metrics)), "")

    @property
    def score(self) -> float | None:
        """Value of the metric by which the sweep compares its trials; None if unknown."""
        return number_in(self.metrics, self.trial.metric) if self.trial is not None and self.trial.metric else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report made by one call of ``elastic_ray.report``.

    Attributes:
        index: its number in the run, from 1; a run that continues from a checkpoint counts on.
        metrics: as rank 0 reported them.
        checkpoint: path of the stored checkpoint on the job's storage file system; None if there was none.
        workers: size of the job then.
        epochs_done: epochs that were complete then, the one in whose body it was reported included if its loops were.
        steps: optimizer steps that were committed then.

    Examples:
        >>> from elastic_ray.events import Report
        >>> Report(index=0, metrics={"loss": 0.5}, workers=2).metrics["loss"]
        0.5
    """

    index: int
    metrics: Mapping[str, Any]
    checkpoint: str | None = None
    workers: int = 0
    epochs_done: int = 0
    steps: int = 0

    def to_json(self) -> str:
        """Return the report as one line of JSON, the format of ``reports.jsonl``.

        What JSON cannot hold is its ``repr``.
        """
        values = {
            "index": self.index,
            "checkpoint": self.checkpoint,
            "workers": self.workers,
            "epochs_done": self.epochs_done,
            "steps": self.steps,
        }
        try:
            return dump({**values, "metrics": dict(self.metrics)})
        except (TypeError, ValueError, RecursionError):  # keys that are no text, or a value that holds itself
            metrics = {str(name): repr(value) for name, value in self.metrics.items()}
            return dump({**values, "metrics": metrics})

    @classmethod
    def from_json(cls, line: str) -> Report:
        """Invert :meth:`to_json`.

        Raises:
            ValueError: if the line is no JSON object of these fields.
        """
        values = _object(line, "a report")
        if not isinstance(values.get("metrics"), dict):
            raise ValueError(f"a report must be a JSON object with an object 'metrics', but got {line!r:.200}")
        for name in ("index", "workers", "epochs_done", "steps"):
            if not _is_count(values.get(name, 0 if name != "index" else None)):
                raise ValueError(f"a report must have a whole number {name!r}, but got {line!r:.200}")
        checkpoint = values.get("checkpoint")
        return cls(
            index=values["index"],
            metrics=values["metrics"],
            checkpoint=None if checkpoint is None else str(checkpoint),
            workers=int(values.get("workers", 0)),
            epochs_done=int(values.get("epochs_done", 0)),
            steps=int(values.get("steps", 0)),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Information on one member of the present generation.

    Attributes:
        silence_s: time since it was last heard of [s]; None before it has been.
        slowness: its time for equal work over the group's median; None before enough steps were measured.
        gpu_memory_used_bytes, gpu_memory_reserved_bytes: as of ``JobStatus``, of this worker's GPU.

    Examples:
        >>> from elastic_ray.events import WorkerInfo
        >>> WorkerInfo(rank=0, node="n1", pid=17, generation=3, worker="w0").rank
        0
    """

    rank: int
    node: str
    pid: int
    generation: int
    worker: str
    silence_s: float | None = None
    slowness: float | None = None
    gpu_memory_used_bytes: int | None = None
    gpu_memory_reserved_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """Outcome of a job."""

    phase: JobPhase  # FINISHED, FAILED or STOPPED
    error: BaseException | Raised | None = None  # what ended the job, None when it finished or was stopped
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # rank 0's last reported metrics
    # the last reports of rank 0, in order; those before are in the run's ``reports.jsonl``
    reports: tuple[Report, ...] = ()
    first_report: int = 1  # ``Report.index`` of the first report of this run
    # path and metrics of the reported checkpoints still kept, oldest first
    checkpoints: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    states: str = ""  # directory of the automatic checkpoints that are left; empty for none
    return_value: Sealed | None = None  # what rank 0's train function returned
