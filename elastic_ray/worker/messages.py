"""Messages from workers to their controller: membership signals, other messages, and results of runs.

Objects made by the user's train function are sent as plain data of bounded size
(``elastic_ray.state.plain_metrics``) or sealed (``elastic_ray.sealed``), because Ray unpickles a message in the
controller before any of our code can inspect it.
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
    """Message that an automatic checkpoint was written."""

    state: StateFile
    pause_s: float  # for how long training stood still [s]
    cost_s: float  # that, and the processor's time that writing took [s]
    write_s: float  # how long writing took [s]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady(Ready):
    """Signal that the worker is waiting for its first generation."""

    loader: LoaderInfo | None  # limits of the training loader
    resumed: str = ""  # which automatic checkpoint it continues from, or why it could not


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOutOfMemory(Rerun):
    """Signal that the worker ran out of memory with ``atomic_bsz`` samples at once, and starts over.

    Without ``has_state`` it was inside ``optimizer.step()``, so its state belongs to no step. ``more_than_equal`` is
    True if an equal split of the step would have given the worker fewer samples.
    """

    atomic_bsz: int
    cause: str
    more_than_equal: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNotice(Signal):
    """Event message for the job's user: its kind, a sentence, and numbers."""

    kind: EventKind
    text: str
    detail: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport(Signal):
    """Metrics of rank 0 and the path of the stored checkpoint; ``index`` counts the run's reports.

    ``checkpoint_ref`` refers to a copy of the checkpoint in the cluster's memory; None if there is none. ``problem``
    says why the checkpoint was not stored.

    The index is needed because Ray may deliver calls to an async actor out of order. ``again`` marks a report that an
    earlier controller received but may not have written.
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
    """Heartbeat of a worker."""

    report: StepReport | None = None  # rank 0's measurements
    # generation and number of committed edges that the worker has reached, None before its first generation
    at: tuple[int, int] | None = None
    ending: bool = False  # the last one, for the run is over
    waits: str = ""  # what it waits for storage for, as a sentence; empty where storage answers
    # bytes of its GPU that it has used at most, and reserved; None without one
    gpu_memory: tuple[int, int] | None = None
    position: int = 0  # of the process in the worker's unit


class ControllerAnswer(enum.Enum):
    """Answer of a controller to a process that asks whether it belongs to that controller."""

    KNOWN = "known"
    INTRODUCE = "introduce yourself"
    STRANGER = "stranger"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReregistration:
    """Registration of a worker with a restarted controller: everything the previous controller knew about it."""

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
        """Name of the process as shown to users."""
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
    """End of a run of the train function, with the resources its process uses."""

    memory_bytes: int = 0  # resident memory of the process afterwards
    cuda_used: bool = False  # whether the process holds a CUDA context


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(RunEnd):
    """End of a run whose train function returned ``value``, with its last ``rank`` and ``steps`` of all loaders."""

    value: Sealed | None = None
    rank: int = 0
    steps: int = 0


class RunLeft(RunEnd):
    """End of a run because the worker has left its generation as instructed."""


class RunStopped(RunEnd):
    """End of a run because the job was stopped."""


class RunPreempted(RunEnd):
    """End of a run because the job is preempted; rank 0 reports the saved state."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSaved(RunEnd):
    """End of rank 0's run in a preempted job: the state was saved, or ``problem`` says why not."""

    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFailed(RunEnd):
    """End of a run because the train function raised ``error``, or something outside it failed."""

    error: BaseException | Raised | None = None
    origin: ErrorOrigin | None = None  # where that comes from; None of what went wrong beside the train function
    trained: bool = False  # whether this worker has committed a step by then
    steps: int = 0  # committed steps of all loaders by then
    reused: bool = False  # the process had run the job's train function before


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOutOfMemory(RunFailed):
    """End of a run that ran out of memory before its first generation; ``cause`` describes it in a sentence."""

    cause: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupLost(RunEnd):
    """End of a run because the group broke and no new one formed; ``cause`` gives the reason in a sentence."""

    cause: str


RunResult = RunFinished | RunLeft | RunStopped | RunPreempted | RunSaved | RunFailed | RunOutOfMemory | GroupLost
