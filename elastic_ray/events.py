"""Events, status and reports of a job: frozen values sent between processes and written to logs."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elastic_ray.json_numbers import build, dump, dumpable, known_fields, load

if TYPE_CHECKING:
    from elastic_ray.sealed import Raised, Sealed


class EventKind(str, enum.Enum):
    """Kind of a job event; its value is the string in the JSON log.

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
    """Facts about a job that is a trial of a sweep (hyperparameter search)."""

    sweep: str  # its name, as ``elastic-ray stop`` takes it
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metric: str = ""  # what the sweep compares trials by; empty where that is not known
    mode: str = "min"  # "max" if a larger metric is better, "min" otherwise
    # reports after which the sweep may cut it, ascending, the last one its end; empty where unknown
    rungs: tuple[int, ...] = ()

    @classmethod
    def read(cls, told: Any) -> TrialFacts | None:
        """Return a trial's facts from ``told``, a value parsed from JSON; None if the value is malformed."""
        try:
            found = cls(**{**told, "rungs": tuple(int(rung) for rung in told["rungs"])})
        except (TypeError, ValueError, KeyError):
            return None
        texts = all(isinstance(each, str) for each in (found.sweep, found.metric, found.mode))
        return found if texts and isinstance(found.parameters, Mapping) else None


def number_in(metrics: Any, name: str) -> float | None:
    """Return the metric called ``name`` (``"eval/loss"`` if nested); None if missing or not a finite number."""
    with contextlib.suppress(TypeError, ValueError, KeyError, RuntimeError, OverflowError):
        if name in metrics:
            found = float(metrics[name])
        else:
            for part in name.split("/"):
                metrics = metrics[part]
            found = float(metrics)
        return found if math.isfinite(found) else None
    return None


TIME_PARTS = ("training_s", "catching_up_s", "pausing_s", "starting_s", "waiting_s")
"""Parts of the time since a job's submission, as fields of ``JobStatus`` and ``TimeSpent``."""


def named_parts(spent: Any) -> dict[str, float]:
    """Return the parts of a job's time [s]: training, catching up, pausing, starting and waiting, keyed by name."""
    return {part.removesuffix("_s").replace("_", " "): getattr(spent, part) for part in TIME_PARTS}


def flattened(values: Mapping[Any, Any], depth: float = math.inf, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, at most ``depth`` levels, under joined names: ``"outer/inner"``.

    At each level the loss is first.
    """
    for name, value in sorted(values.items(), key=lambda item: item[0] != "loss"):
        if not isinstance(value, Mapping):
            yield f"{prefix}{name}", value
        elif depth > 1:
            yield from flattened(value, depth - 1, f"{prefix}{name}/")


MOST_METRICS = 32
"""Metrics of one job that are kept and shown over time."""


def numbers_in(metrics: Any) -> dict[str, float]:
    """Return reported metrics that are finite numbers, keyed by name, with the loss first.

    Values that are not numbers, those nested more than three levels deep, and those beyond ``MOST_METRICS`` are left
    out; names are as in :func:`flattened`.
    """
    told = dict(flattened(metrics, 3)) if isinstance(metrics, Mapping) else {}
    found = {name: number_in(told, name) for name in told if not isinstance(told[name], str | bytes | bool)}
    return dict([(name, number) for name, number in found.items() if number is not None][:MOST_METRICS])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Pause in a rank's training while its group changes, split into phases [s, >= 0].

    Attributes:
        vote_s: Time from the last committed step until the ranks agreed on the change, or until its failure was
            noticed. It includes the step that failed.
        group_s: Time after ``vote_s`` until the new group was formed.
        state_s: Time after ``group_s`` until all ranks in the group had the same state and were ready to train.
        first_step_s: Duration of the first step after the pause (not part of it); None until known.
    """

    vote_s: float = 0.0
    group_s: float = 0.0
    state_s: float = 0.0
    first_step_s: float | None = None

    @property
    def pause_s(self) -> float:
        """Total length of the pause [s]."""
        return self.vote_s + self.group_s + self.state_s

    @property
    def detail(self) -> dict[str, float]:
        """Phases of the pause [s], keyed by field name, for the ``detail`` of an event."""
        return {"vote_s": self.vote_s, "group_s": self.group_s, "state_s": self.state_s}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """Event for a job, such as a change of its size or a failure.

    Attributes:
        kind: Kind of the event.
        time_s: Seconds since the Unix epoch, on the controller's clock.
        from_workers: World size before the event.
        to_workers: World size after the event.
        reason: Reason for the decision, as a sentence.
        pause_s: Seconds from the old generation's last step until the new generation (group of workers) was ready for
            its first step; the maximum over the ranks that stayed. 0 if nothing paused.
        generation: Number of the generation after the event.
        detail: Further JSON-serialisable values (batch sizes, node, rank...). A size change or a failure has
            ``vote_s``, ``group_s`` and ``state_s``, which sum to ``pause_s``. A start has ``start_s``, the time since
            its processes were started. A restart has ``steps``, the step it resumes from, and ``reached_steps``, the
            step reached before the restart.

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
        """Return the event stored in ``line``, a line of JSON written by :meth:`to_json`.

        Raises:
            ValueError: The line is not a JSON object with an event's fields.
        """
        values = _object(line, "an event")
        values = known_fields(cls, values)
        wrong = sorted(name for name, value in values.items() if not _is_plain(name, value))
        if wrong:
            raise ValueError(f"an event's {wrong[0]} cannot be {values[wrong[0]]!r:.80}")
        return build(cls, values, "an event", kind=EventKind(values.get("kind")))


_COUNTS = ("from_workers", "to_workers", "generation")
_SECONDS = ("time_s", "pause_s")
_LARGEST = 1e15


def _object(line: str, what: str) -> dict[str, Any]:
    """Return the JSON object on a line of a run's file (from any writer); raises ValueError if the line has none."""
    try:
        values = load(line)
    except RecursionError:
        raise ValueError(f"{what} must be a JSON object, but is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"{what} must be a JSON object, but got {line!r:.200}")
    return values


def _is_plain(name: str, value: Any) -> bool:
    """True if an event's field may have this value."""
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
        """True if the job has ended and will never train again."""
        return self in (JobPhase.FINISHED, JobPhase.FAILED, JobPhase.STOPPED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """Status of a job at one moment.

    Attributes:
        job: Name of the job.
        phase: Phase of the job between submission and end.
        workers: World size of the group that is training; 0 before the first group.
        target_workers: World size that the job is changing to.
        generation: Number of the current generation (group of workers).
        epoch: Epoch in progress, from 0.
        epochs: Number of epochs that the loop declared; None if not declared.
        step: Optimizer steps committed so far.
        batch_size: Global batch size M [samples].
        throughput: Measured throughput [samples/s]; 0 while the job does not train, or its present number of workers
            has not been measured.
        goodput: Throughput x statistical efficiency [samples/s]; None before the job's speed model is fitted.
        efficiency: Statistical efficiency (progress per sample) of the current batch M, relative to the initial batch
            M0: (M0 + B) / (M + B), with the gradient noise scale B; None before the speed model is fitted.
        metrics: Latest metrics reported by rank 0.
        message: Sentence that says why the job is waiting or has ended; empty while the job trains normally.
        cost_usd: Cost so far [USD], at the prices in the allocator's autoscaling settings; None if prices are unknown.
        note: Warnings while the job runs: a deadline or budget that cannot be met, with the best alternative; workers
            that find no node; storage that does not respond, with the request; non-finite gradients; warnings from
            workers; slow workers.
        waits_for: Resource that the job is waiting for: slots (with their type), a placement group, a node from the
            autoscaler, starting processes, storage; empty while the job trains normally.
        start_s: Estimated time until enough slots are free for a job that is waiting for them [s], based on the ETAs of
            running jobs and assuming that no other job gets the slots first; None if unknown.
        progress: The job's progress, 0 to 1. None if the job has no declared length (its number of epochs or, for a
            trial, the limit of its sweep).
        samples_left: Samples until the job ends; None if its length, or its number of samples, is unknown.
        steps_left: Steps until the job ends, at the current batch; None if unknown.
        tokens_per_s: Throughput in tokens, if the loader's batch is declared in tokens; otherwise None.
        tokens_left: ``samples_left`` in tokens, if the batch is declared in tokens; otherwise None.
        eta_s: Time until the job ends at the current goodput [s]; None if the goodput or the length is unknown.
        eta_low_s: Likely lower bound of ``eta_s`` [s] (``elastic_ray.record.outlook.eta_range``).
        eta_high_s: Likely upper bound of ``eta_s`` [s].
        productive_share: Training time / time since submission (ETTR), 0 to 1; None before any time has passed.
        waiting_s: Part of the time since submission spent waiting for resources [s].
        starting_s: Part of that time spent starting processes, until a group was training [s].
        pausing_s: Part of that time when training was paused by group changes, including failures [s].
        catching_up_s: Part of that time spent repeating earlier training after restarts [s].
        training_s: Remaining part [s]; the five parts sum to the time since submission.
        last_pause: The last pause, split by phase; None before the first.
        learning_rate_factor: Factor applied to the first model's learning rates, due to its batch and policies; None
            before the first step.
        gpu_memory_used_bytes: Peak GPU memory held by any one worker's tensors; None if the job uses no GPUs.
        gpu_memory_reserved_bytes: Peak GPU memory reserved by any one worker, caches included.
        memory_bound: Limit on the samples that a worker processes at once, set because a worker ran out of memory with
            more; None if no worker ran out of memory.
        backend: Backend that sends gradients between the GPUs: ``nccl`` or ``gloo``; empty for one worker, and while
            the job does not train.
        mfu: Model FLOPs utilisation, 0 to 1; None if the number of operations, or the GPU's peak, is unknown, and
            where ``throughput`` is 0.
        reports: Number of reports from rank 0, including reports in earlier runs that the job continues.
        checkpoint: Path of the reported or automatic checkpoint that a restart would continue from; empty before the
            first.
        trial: Facts about a trial of a sweep; None for any other job.
        metric: Name of the metric that ranks trials of the job's sweep, or the job's checkpoints; empty if not set.

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

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields by name, so that processes running a different version can read them."""
        return _with_known, (type(self), {each.name: getattr(self, each.name) for each in dataclasses.fields(self)})

    @property
    def shown_metric(self) -> str:
        """Name of the metric to show in listings: the job's own, or else its first numeric metric; empty if none."""
        return self.metric or next(iter(numbers_in(self.metrics)), "")

    @property
    def score(self) -> float | None:
        """Value of the metric that ranks the trials of the job's sweep; None if unknown."""
        return number_in(self.metrics, self.trial.metric) if self.trial is not None and self.trial.metric else None


def _with_known(made: type[JobStatus], values: Mapping[str, Any]) -> JobStatus:
    """Return a status made of the fields that this version knows, with defaults for fields missing from ``values``."""
    known = {each.name for each in dataclasses.fields(made)}
    return made(**{name: value for name, value in values.items() if name in known})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report made by one call to ``elastic_ray.report``.

    Attributes:
        index: Number of the report in the run, counting from 1. A run that continues from a checkpoint also continues
            the count.
        metrics: Metrics as rank 0 reported them.
        checkpoint: Path of the stored checkpoint on the job's storage file system; None if none was reported.
        workers: Number of workers in the job at the time of the report.
        epochs_done: Number of epochs completed by then. The epoch in progress counts if its loops over the data were
            complete.
        steps: Number of optimizer steps committed by then.

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

        Values that JSON cannot hold are written as their ``repr``.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["metrics"]  # the line ends with them
        return dump({**values, "metrics": dumpable(self.metrics)})

    @classmethod
    def from_json(cls, line: str) -> Report:
        """Return the report stored in ``line``, a line of JSON written by :meth:`to_json`.

        Raises:
            ValueError: The line is not a JSON object with a report's fields.
        """
        values = _object(line, "a report")
        if not isinstance(values.get("metrics"), dict):
            raise ValueError(f"a report must be a JSON object with a 'metrics' object, but got {line!r:.200}")
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
    """Information about one member (worker) of a job's current generation (group of workers).

    Attributes:
        silence_s: Time since the worker's last message [s]; None before the first.
        slowness: The worker's time for equal work / the group's median; None until enough steps have been measured.
        gpu_memory_used_bytes, gpu_memory_reserved_bytes: Same as in ``JobStatus``, for this worker's GPU.

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
    """Outcome of a job that has ended."""

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
