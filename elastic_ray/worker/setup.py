"""Setup of a worker process, and facts about the process that its controller needs (plain values)."""

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
    """Settings that a job passes to its worker processes.

    With ``paced``, ``report`` waits until the sweep lets the run continue. ``states_kept`` automatic checkpoints are
    kept; 0 if the job makes none. ``controller`` owns the process from its start, and ``token`` identifies that
    controller's workers; they are None and empty for a process owned by a sweep.
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
    """Owner of a worker process: a job, or a sweep whose trials use the process one after another.

    A pool process that was started before it had an owner is made to look like one of its owner's processes.
    """

    holder: str  # the job, or the sweep whose trials share the process; no other is ever given it
    # handle of the actor that ends the process; when that actor is gone for good, the process ends itself. None for a
    # driver.
    actor: Any
    ray_job: str  # id of Ray's job, whose driver shows what the process prints
    namespace: str  # Ray's namespace in which named actors are looked up
    # directories in which the driver's modules are, as Ray adds them to a worker's ``sys.path``
    search_path: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Assignment of a worker process to one run of a train function."""

    worker: str  # id of the worker for this run
    job: str
    train_loop: bytes  # the pickled train function and its config
    stored_train_loop: str = ""
    storage_path: str  # directory of the job's results
    node: str  # node id it runs on
    controller: Any  # handle of the job's controller
    # the job's, by which its workers know each other and their controller knows them; never shown
    secret: str = dataclasses.field(repr=False)
    checkpoint: str | None = None  # path of the checkpoint to start from, None at the beginning
    checkpoint_ref: Any = None  # the same in the cluster's memory, as far as it is still there; None for storage only
    resume_point: ResumePoint | None = None  # where that checkpoint stands
    # automatic checkpoints further than that, newest first, the first good one of which is taken
    states: tuple[StateFile, ...] = ()
    token: str = ""  # what messages to this run carry
    gpu_ids: tuple[int, ...] = ()  # GPUs of its reservation; empty without CUDA
    group: str = ""  # hex id of the placement group that is its reservation
    sizes: tuple[int, int] | None = None  # fewest and most workers that the job may have
    # where it will stand in the group that it is to join
    expected: RankInfo = dataclasses.field(default_factory=RankInfo)
    # epoch that the others are in, by their latest account; None where it starts with them
    others_at: int | None = None
    # where the process stands among those of the worker, which are several where units are; else None
    unit: UnitPlace | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """Facts about a ready worker process; ``gpu_type`` and the network ``domain`` are empty if unknown."""

    pid: int
    cuda: bool
    gpu_type: str = ""
    domain: str = ""  # of the network, likewise
