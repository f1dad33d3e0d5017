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
from elastic_ray.unit import process_names
from elastic_ray.worker.error_origin import ErrorOrigin
from elastic_ray.worker.setup import ProcessInfo


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateSaved:
    """Message: an automatic checkpoint was written."""

    state: StateFile
    pause_s: float  # for how long training stood still [s]
    cost_s: float  # that, and the processor's time that writing took [s]
    write_s: float  # how long writing took [s]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady(Ready):
    """Signal: the worker waits for its first generation."""

    loader: LoaderInfo | None  # limits of the training loader
    resumed: str = ""  # which automatic checkpoint it continues from, or why it could not


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
    """Message for the job's user, as an event: its kind, a sentence, and numbers."""

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
    """Sign of life of a worker."""

    report: StepReport | None = None  # rank 0's measurements
    # generation and number of committed edges that the worker has reached, None before its first generation
    at: tuple[int, int] | None = None
    ending: bool = False  # the last one, for the run is over
    waits: str = ""  # what it waits for storage for, as a sentence; empty where storage answers
    # bytes of its GPU that it has used at most, and reserved; None without one
    gpu_memory: tuple[int, int] | None = None
    position: int = 0  # of the process in the worker's unit


class ControllerAnswer(enum.Enum):
    """Answer of a controller to a process that asks whether it belongs to it."""

    KNOWN = "known"
    INTRODUCE = "introduce yourself"
    STRANGER = "stranger"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReregistration:
    """Registration of a worker with a restarted controller: all that the controller had known of it."""

    worker: str
    token: str  # what messages to its run carry
    node: str  # node id it runs on
    group: str  # hex id of its placement group
    actor: Any  # handle of its process
    process: str
    lent: bool  # whether a sweep has lent it
    process_info: ProcessInfo
    # the generation that it has taken up, None before its first; it leaves where it is no member of it
    spec: GenerationSpec | None = None
    switched: int = 0  # the latest generation in which it has exchanged state, 0 before its first
    pause: Pause = dataclasses.field(default_factory=Pause)  # that of its last change
    ready: WorkerReady | None = None  # what it told when it had built its model; None before
    failed: StepFailed | None = None  # its failed collective, where it waits for the generation after that; else None
    starts_over: bool = False  # it ran out of memory, and builds its model anew with the state that it keeps
    position: int = 0  # of the process in its unit

    @property
    def name(self) -> str:
        """Name of the process for the one who watches it."""
        return process_names(self.worker, self.position + 1)[self.position]


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
    """End of a run of the train function, with facts of the process."""

    memory_bytes: int = 0  # resident memory of the process afterwards
    cuda_used: bool = False  # whether the process holds a CUDA context


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(RunEnd):
    """End of a run: the train function returned ``value``, as last ``rank`` after ``steps`` steps of all loaders."""

    value: Sealed | None = None
    rank: int = 0
    steps: int = 0


class RunLeft(RunEnd):
    """End of a run: the worker has left its generation, as it was told to."""


class RunStopped(RunEnd):
    """End of a run: the job was told to stop."""


class RunPreempted(RunEnd):
    """End of a run: the job is preempted, and another rank saves it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSaved(RunEnd):
    """End of rank 0's run in a preempted job: it has saved the state, or ``problem`` says why it could not."""

    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFailed(RunEnd):
    """End of a run: the train function has raised ``error``, or something failed beside it."""

    error: BaseException | Raised | None = None
    origin: ErrorOrigin | None = None  # where that comes from; None of what went wrong beside the train function
    trained: bool = False  # whether this worker has committed a step by then
    steps: int = 0  # committed steps of all loaders by then
    reused: bool = False  # the process had run the job's train function before


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOutOfMemory(RunFailed):
    """End of a run that ran out of memory before its first generation; ``cause`` is a sentence on it."""

    cause: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupLost(RunEnd):
    """End of a run: the group is broken and none followed; ``cause`` says why in a sentence."""

    cause: str


RunResult = RunFinished | RunLeft | RunStopped | RunPreempted | RunSaved | RunFailed | RunOutOfMemory | GroupLost
