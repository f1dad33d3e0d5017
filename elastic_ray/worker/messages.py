"""What workers tell their controller, and what they are started with: plain values.

What a user's train function makes is told as plain data of bounded size (``elastic_ray.loop.metrics``), or closed
(``elastic_ray.sealed``): Ray unpickles a message in the controller before anybody can look at it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from elastic_ray.batch.reports import LoaderInfo, StepReport
from elastic_ray.checkpoints.automatic import StateFile
from elastic_ray.config import ElasticConfig
from elastic_ray.membership.plan import Place, Plan
from elastic_ray.sealed import Raised, Sealed
from elastic_ray.state.resume_point import ResumePoint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What every worker process of a job is told first; ``paced`` jobs wait in ``report`` until they may go on.

    ``states_kept``: how many automatic checkpoints are kept; 0 for a job that makes none. ``controller`` and
    ``crew``: whose process it is from its start on, and the token of that controller's workers; None and empty for one
    that a sweep owns.
    """

    use_gpu: bool
    cpus: float
    storage_filesystem: Any
    elastic: ElasticConfig
    log_level: str
    paced: bool = False
    states_kept: int = 0
    controller: Any = None
    crew: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """For whom a worker process works; one that was started before is made like a process of that one's own.

    Attributes:
        holder: the job, or the sweep whose trials share the process; nobody else is ever given it.
        owner: handle of the actor that ends the process; when that actor is gone for good, the process ends itself.
            None for a driver.
        ray_job: id of Ray's job, whose driver shows what the process prints.
        namespace: Ray's namespace in which named actors are looked up.
        search_path: directories in which the driver's modules are, as Ray adds them to a worker's ``sys.path``.
    """

    holder: str
    owner: Any
    ray_job: str
    namespace: str
    search_path: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One run of a train function in a worker process.

    Attributes:
        worker: id of the worker for this run.
        job: name of the job.
        train_loop: the pickled train function and its config.
        storage_path: directory of the job's results.
        node: node id it runs on.
        controller: handle of the job's controller.
        secret: the job's, by which its workers know each other and their controller knows them; never shown.
        checkpoint: path of the checkpoint to start from, None at the beginning.
        held: the same in the cluster's memory, as far as it is still there; None for storage only.
        resume_point: where that checkpoint stands.
        states: automatic checkpoints further than that, newest first, the first good one of which is taken.
        token: what messages to this run carry.
        gpu_ids: GPUs of its reservation; empty without CUDA.
        group: hex id of the placement group that is its reservation.
        expected: where it will stand in the group that it is to join.
    """

    worker: str
    job: str
    train_loop: bytes
    storage_path: str
    node: str
    controller: Any
    secret: str = dataclasses.field(repr=False)
    checkpoint: str | None = None
    held: Any = None
    resume_point: ResumePoint | None = None
    states: tuple[StateFile, ...] = ()
    token: str = ""
    gpu_ids: tuple[int, ...] = ()
    group: str = ""
    expected: Place = dataclasses.field(default_factory=Place)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """A worker process, ready to be used, on a node with GPUs of this type (empty where the node does not say)."""

    pid: int
    cuda: bool
    gpu_type: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run of the train function ended.

    Attributes:
        kind: "finished", "left", "stopped", "preempted", "saved" (rank 0's of a preempted job), "error" (the user's),
            "lost" (the group's) or "no room" (out of memory before its first generation).
        value: what the train function returned.
        error: what it raised, or what went wrong beside it.
        cause: why a run was lost, found no room or could not be saved, as a sentence.
        memory_bytes: resident memory of the process afterwards.
        cuda_used: whether the process holds a CUDA context.
    """

    kind: str
    value: Sealed | None = None
    error: BaseException | Raised | None = None
    cause: str = ""
    memory_bytes: int = 0
    cuda_used: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateSaved:
    """An automatic checkpoint is there.

    Attributes:
        state: what was written.
        pause_s: for how long training stood still [s].
        cost_s: that, and the processor's time that writing took [s].
        write_s: how long writing took [s].
    """

    state: StateFile
    pause_s: float
    cost_s: float
    write_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """It waits for its first generation; ``resumed`` says what automatic checkpoint it goes on from, or could not.

    ``loaded``: steps of that checkpoint; 0 without one. ``has_state``: what it holds is nowhere else.
    """

    loader: LoaderInfo | None
    has_state: bool
    loaded: int = 0
    resumed: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """A collective failed on it."""

    generation: int
    cause: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCouldNotForm:
    """It could not form a group."""

    generation: int
    cause: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSwitched:
    """It has entered a generation."""

    generation: int
    pause_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOutOfMemory:
    """It ran out of memory with this many samples at once, and starts over.

    ``whole``: with the state that it keeps. Else it was inside ``optimizer.step()``, and its state is of no step.
    """

    atomic_bsz: int
    cause: str
    whole: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTold:
    """Something that the job's user should know, as an event: its kind, a sentence, and numbers."""

    kind: str
    text: str
    detail: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """Rank 0's metrics, and the stored checkpoint's path; ``index`` counts the run's reports.

    ``held`` is the checkpoint in the cluster's memory, None if it is in storage only; ``problem`` says why the
    checkpoint was given up.
    Ray may deliver calls to an async actor out of order, hence the number. ``again``: a controller before this one has
    heard it, and may not have written it.
    """

    index: int
    metrics: Mapping[str, Any]
    checkpoint: str | None
    resume_point: ResumePoint
    held: Any = None
    again: bool = False
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A sign of life.

    Attributes:
        report: rank 0's measurements.
        at: generation and number of committed edges that the worker has reached, None before its first generation.
        ending: the last one, for the run is over.
        waits: what it waits for storage for, as a sentence; empty where storage answers.
    """

    report: StepReport | None = None
    at: tuple[int, int] | None = None
    ending: bool = False
    waits: str = ""


class Greeting(enum.Enum):
    """What a controller answers a process that asks whether it is the controller's."""

    KNOWN = "known"
    INTRODUCE = "introduce yourself"
    STRANGER = "stranger"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a worker tells a controller that Ray has restarted: all that the controller had known of it.

    Attributes:
        worker: its id.
        token: what messages to its run carry.
        node: node id it runs on.
        group: hex id of its placement group.
        actor: handle of its process.
        process: name of that.
        lent: whether a sweep has lent it.
        facts: of its process.
        plan: the generation that it has taken up, None before its first; it leaves where it is no member of it.
        switched: the latest generation in which it has exchanged state, 0 before its first.
        pause_s: pause of its last change [s].
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
    facts: ProcessFacts
    plan: Plan | None = None
    switched: int = 0
    pause_s: float = 0.0
    ready: WorkerReady | None = None
    failed: WorkerFailed | None = None
    starts_over: bool = False


WorkerMessage = (
    WorkerReady
    | WorkerFailed
    | WorkerCouldNotForm
    | WorkerSwitched
    | WorkerOutOfMemory
    | WorkerReport
    | WorkerTold
    | Beat
)
