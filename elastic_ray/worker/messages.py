"""Messages of workers to their controller: signals of the membership machine, further ones, and ends of runs.

What a user's train function makes is told as plain data of bounded size (``elastic_ray.state.plain_metrics``), or
closed (``elastic_ray.sealed``): Ray unpickles a message in the controller before any code of ours can look at it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from elastic_ray.batch.reports import LoaderInfo, StepReport
from elastic_ray.checkpoints.automatic import StateFile
from elastic_ray.events import EventKind, Pause
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.membership.signals import PrepareFailed, Ready, Rerun, Signal, StepFailed, Switched
from elastic_ray.sealed import Raised, Sealed
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.worker.error_origin import ErrorOrigin
from elastic_ray.worker.setup import ProcessInfo


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateSaved:
    """An automatic checkpoint is there.

    Attributes:
        pause_s: for how long training stood still [s].
        cost_s: that, and the processor's time that writing took [s].
        write_s: how long writing took [s].
    """

    state: StateFile
    pause_s: float
    cost_s: float
    write_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady(Ready):
    """Signal: the worker waits for its first generation.

    Attributes:
        loader: limits of the training loader.
        resumed: which automatic checkpoint it continues from, or why it could not.
    """

    loader: LoaderInfo | None
    resumed: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOutOfMemory(Rerun):
    """Signal: the worker ran out of memory with ``atomic_bsz`` samples at once, and starts over.

    Without ``has_state`` it was inside ``optimizer.step()``, and what it holds is of no step. ``more_than_equal`` says
    that an equal split of the step would have given it fewer samples.
    """

    atomic_bsz: int
    cause: str
    more_than_equal: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNotice(Signal):
    """Something that the job's user should know, as an event: its kind, a sentence, and numbers."""

    kind: EventKind
    text: str
    detail: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport(Signal):
    """Rank 0's metrics, and the stored checkpoint's path; ``index`` counts the run's reports.

    ``checkpoint_ref`` is the checkpoint in the cluster's memory, None if it is in storage only; ``problem`` says why
    the checkpoint was given up.

    Ray may deliver calls to an async actor out of order, hence the number. ``again``: a controller before this one has
    heard it, and may not have written it.
    """

    index: int
    metrics: Mapping[str, Any]
    checkpoint: str | None
    resume_point: ResumePoint
    checkpoint_ref: Any = None
    again: bool = False
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHeartbeat(Signal):
    """A sign of life.

    Attributes:
        report: rank 0's measurements.
        at: generation and number of committed edges that the worker has reached, None before its first generation.
        ending: the last one, for the run is over.
        waits: what it waits for storage for, as a sentence; empty where storage answers.
        gpu_memory: bytes of its GPU that it has used at most, and reserved; None without one.
        position: of the process in the worker's unit.
    """

    report: StepReport | None = None
    at: tuple[int, int] | None = None
    ending: bool = False
    waits: str = ""
    gpu_memory: tuple[int, int] | None = None
    position: int = 0


class ControllerAnswer(enum.Enum):
    """Answer of a controller to a process that asks whether it belongs to it."""

    KNOWN = "known"
    INTRODUCE = "introduce yourself"
    STRANGER = "stranger"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReregistration:
    """Registration of a worker with a restarted controller: all that the controller had known of it.

    Attributes:
        token: what messages to its run carry.
        node: node id it runs on.
        group: hex id of its placement group.
        actor: handle of its process.
        lent: whether a sweep has lent it.
        spec: the generation that it has taken up, None before its first; it leaves where it is no member of it.
        switched: the latest generation in which it has exchanged state, 0 before its first.
        pause: that of its last change.
        ready: what it told when it had built its model; None before.
        failed: its failed collective, where it waits for the generation after that; else None.
        starts_over: it ran out of memory, and builds its model anew with the state that it keeps.
    """

    worker: str
    token: str
    node: str
    group: str
    actor: Any
    process: str
    lent: bool
    process_info: ProcessInfo
    spec: GenerationSpec | None = None
    switched: int = 0
    pause: Pause = dataclasses.field(default_factory=Pause)
    ready: WorkerReady | None = None
    failed: StepFailed | None = None
    starts_over: bool = False


WorkerMessage = (
    WorkerHeartbeat
    | WorkerReady
    | StepFailed
    | PrepareFailed
    | Switched
    | WorkerOutOfMemory
    | WorkerReport
    | WorkerNotice
)
"""What a worker says of itself; :data:`elastic_ray.membership.messages.ControllerMessage` is what it hears."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """End of a run of the train function, with facts of the process.

    Attributes:
        memory_bytes: resident memory of the process afterwards.
        cuda_used: whether the process holds a CUDA context.
    """

    memory_bytes: int = 0
    cuda_used: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(RunEnd):
    """The train function has returned ``value``, on the worker's last ``rank`` after ``steps`` steps of all loaders."""

    value: Sealed | None = None
    rank: int = 0
    steps: int = 0


class RunLeft(RunEnd):
    """The worker has left its generation, as it was told to."""


class RunStopped(RunEnd):
    """The job was told to stop."""


class RunPreempted(RunEnd):
    """The job is preempted, and another rank saves it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSaved(RunEnd):
    """Rank 0's of a preempted job: it has saved the state, or ``problem`` says why it could not."""

    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFailed(RunEnd):
    """The train function has raised ``error``, or something went wrong beside it.

    Attributes:
        origin: where that comes from; None of what went wrong beside the train function.
        trained: whether this worker has committed a step by then.
        steps: committed steps of all loaders by then.
        reused: the process had run the job's train function before.
    """

    error: BaseException | Raised | None = None
    origin: ErrorOrigin | None = None
    trained: bool = False
    steps: int = 0
    reused: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOutOfMemory(RunFailed):
    """End of a run that ran out of memory before its first generation; ``cause`` is a sentence on it."""

    cause: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupLost(RunEnd):
    """The worker's group is broken, and none followed; ``cause`` says why in a sentence."""

    cause: str


RunResult = RunFinished | RunLeft | RunStopped | RunPreempted | RunSaved | RunFailed | RunOutOfMemory | GroupLost
