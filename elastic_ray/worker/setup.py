"""Setup of a worker's process, and what its controller must know of it: plain values."""

from __future__ import annotations

import dataclasses
from typing import Any

from elastic_ray.checkpoints.automatic import StateFile
from elastic_ray.config import ElasticConfig
from elastic_ray.membership.messages import RankInfo
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.unit import UnitPlace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Setup of a worker process; ``paced`` jobs wait in ``report`` until they may continue.

    ``states_kept``: how many automatic checkpoints are kept; 0 for a job that makes none. ``controller`` and
    ``token``: whose process it is from its start on, and the token of that controller's workers; None and empty for one
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
    token: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOwner:
    """For whom a worker process works; one that was started before is made like a process of that one's own.

    Attributes:
        holder: the job, or the sweep whose trials share the process; no other is ever given it.
        actor: handle of the actor that ends the process; when that actor is gone for good, the process ends itself.
            None for a driver.
        ray_job: id of Ray's job, whose driver shows what the process prints.
        namespace: Ray's namespace in which named actors are looked up.
        search_path: directories in which the driver's modules are, as Ray adds them to a worker's ``sys.path``.
    """

    holder: str
    actor: Any
    ray_job: str
    namespace: str
    search_path: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Assignment of one run of a train function to a worker process.

    Attributes:
        worker: id of the worker for this run.
        train_loop: the pickled train function and its config.
        storage_path: directory of the job's results.
        node: node id it runs on.
        controller: handle of the job's controller.
        secret: the job's, by which its workers know each other and their controller knows them; never shown.
        checkpoint: path of the checkpoint to start from, None at the beginning.
        checkpoint_ref: the same in the cluster's memory, as far as it is still there; None for storage only.
        resume_point: where that checkpoint stands.
        states: automatic checkpoints further than that, newest first, the first good one of which is taken.
        token: what messages to this run carry.
        gpu_ids: GPUs of its reservation; empty without CUDA.
        group: hex id of the placement group that is its reservation.
        sizes: fewest and most workers that the job may have.
        expected: where it will stand in the group that it is to join.
        others_at: epoch that the others are in, by their latest account; None where it starts with them.
        unit: where the process stands among those of the worker, which are several where units are; else None.
    """

    worker: str
    job: str
    train_loop: bytes
    storage_path: str
    node: str
    controller: Any
    secret: str = dataclasses.field(repr=False)
    checkpoint: str | None = None
    checkpoint_ref: Any = None
    resume_point: ResumePoint | None = None
    states: tuple[StateFile, ...] = ()
    token: str = ""
    gpu_ids: tuple[int, ...] = ()
    group: str = ""
    sizes: tuple[int, int] | None = None
    expected: RankInfo = dataclasses.field(default_factory=RankInfo)
    others_at: int | None = None
    unit: UnitPlace | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A worker process, ready to be used, on a node with GPUs of this type (empty where the node does not say)."""

    pid: int
    cuda: bool
    gpu_type: str = ""
