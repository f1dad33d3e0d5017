"""Messages from workers to their controller: membership signals, reports, and results of runs.

Objects created by the user's train function are sent either as plain data of bounded size
(``elastic_ray.state.plain_metrics``) or sealed (``elastic_ray.sealed``). Ray unpickles messages in the controller
before our code can inspect them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from elastic_ray.batch.reports import LoaderInfo, StepReport
from elastic_ray.checkpoints.automatic import StateFile
from elastic_ray.events import EventKind
from elastic_ray.membership.recovery import SurvivingWorker
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
    """Signal that the worker has built its model and is waiting for its first generation."""

    loader: LoaderInfo | None  # limits of the training loader
    resumed: str = ""  # which automatic checkpoint it continues from, or why it could not


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOutOfMemory(Rerun):
    """Signal that the worker ran out of memory with ``atomic_bsz`` samples per forward pass, and starts over.

    Without ``has_state``, the worker was inside ``optimizer.step()``, so its state does not match any step.
    ``more_than_equal`` is True if the worker had more samples than an equal split of the step would have given it.
    """

    atomic_bsz: int
    cause: str
    more_than_equal: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNotice(Signal):
    """Message about an event, to be shown to the job's user."""

    kind: EventKind
    text: str
    detail: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport(Signal):
    """Report of rank 0: its metrics and the path of the stored checkpoint.

    ``index`` counts the run's reports; it is needed because Ray may deliver calls to an async actor out of order.
    ``checkpoint_ref`` refers to a copy of the checkpoint in the cluster's memory; None if there is no copy.
    ``problem`` says why the checkpoint was not stored. ``again`` marks a report that an earlier controller received
    but may not have written, or that a lost rank 0 may have made: it counts only if its index is new.
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
    """Periodic sign of life from a worker, with its progress and, from rank 0, its measurements."""

    report: StepReport | None = None  # rank 0's measurements
    # generation and number of committed edges that the worker has reached, None before its first generation
    at: tuple[int, int] | None = None
    ending: bool = False  # the last one, for the run is over
    waits: str = ""  # what it waits for storage for, as a sentence; empty where storage answers
    # bytes of its GPU that it has used at most, and reserved; None without one
    gpu_memory: tuple[int, int] | None = None
    position: int = 0  # of the process in the worker's unit


class ControllerAnswer(enum.Enum):
    """Reply of a controller to a process that asks whether it belongs to this controller."""

    KNOWN = "known"
    INTRODUCE = "introduce yourself"
    STRANGER = "stranger"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReregistration(SurvivingWorker):
    """Registration of a worker with a restarted controller, with everything the previous controller knew about it."""

    token: str  # what messages to its run carry
    group: str  # hex id of its placement group
    actor: Any  # handle of its process
    process: str
    lent: bool  # whether a sweep has lent it
    process_info: ProcessInfo
    ready: WorkerReady | None = None
    position: int = 0  # of the process in its unit

    @property
    def name(self) -> str:
        """Name of the worker's process, as shown to users."""
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
    """End of a run of the train function, with the resources that its process uses."""

    memory_bytes: int = 0  # resident memory of the process afterwards
    cuda_used: bool = False  # whether the process holds a CUDA context


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(RunEnd):
    """End of a run whose train function returned ``value``; includes the worker's last rank and number of steps."""

    value: Sealed | None = None
    rank: int = 0
    steps: int = 0


class RunLeft(RunEnd):
    """End of a run whose worker has left its generation as instructed."""


class RunStopped(RunEnd):
    """End of a run whose job was stopped."""


class RunPreempted(RunEnd):
    """End of a run whose job is preempted; rank 0 sends ``RunSaved`` instead."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSaved(RunEnd):
    """End of rank 0's run in a preempted job; ``problem`` says why the state was not saved, and is empty if it was."""

    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFailed(RunEnd):
    """End of a run whose train function raised ``error``, or that failed outside of the train function."""

    error: BaseException | Raised | None = None
    origin: ErrorOrigin | None = None  # where that comes from; None of what went wrong beside the train function
    trained: bool = False  # whether this worker has committed a step by then
    steps: int = 0  # committed steps of all loaders by then
    reused: bool = False  # the process had run the job's train function before


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOutOfMemory(RunFailed):
    """End of a run that ran out of memory before its first generation; ``cause`` describes this in a sentence."""

    cause: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupLost(RunEnd):
    """End of a run whose group broke and was not replaced in time; ``cause`` gives the reason in a sentence."""

    cause: str


RunResult = RunFinished | RunLeft | RunStopped | RunPreempted | RunSaved | RunFailed | RunOutOfMemory | GroupLost
