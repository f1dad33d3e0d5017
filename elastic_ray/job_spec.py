"""Specification of a job: everything that its controller needs to run it, as one frozen value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_ray.authentication import new_secret
from elastic_ray.config import ElasticConfig, SchedulingConfig
from elastic_ray.events import TrialFacts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """Additional settings for a job that is a sweep's trial; its declared epochs are only an upper bound."""

    controller: str  # name of its controller after ``job:``, and of this run of the trial, which may have several
    # checkpoint to start from, a path on the job's storage file system; None starts anew. What an earlier run left in
    # the job's directory does not count: the sweep decides where a trial continues.
    start_from: str | None = None
    # how many reports may have been made that the sweep has not dealt with before the next one waits
    reports_ahead: int = 1
    # directory, on the job's storage file system, beside whose files what the trials measure is kept
    knowledge_path: str = ""
    keep_s: float = 0.0  # how long its processes wait for another trial after this one's end [s]
    # ``start_from`` in the cluster's memory, while the trial that reported it lives; None for storage only
    checkpoint_ref: Any = None
    sweep: Any = None  # actor that has what trials share, worker processes above all; None shares nothing
    # the trial is over with this report, if it is not cut before; None where that is not known
    most_reports: int | None = None
    rungs: tuple[int, ...] = ()  # reports after which its sweep may cut it, ascending; empty where that is not known
    # of the trial, numbers and short texts by name, for people
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metric: str = ""  # what its sweep compares trials by; empty where that is not known
    mode: str = "min"  # "max" if a larger metric is better, "min" otherwise


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a job from its trainer's ``RunConfig``."""

    storage_path: str  # directory of the run (of the runs, before the job has a name), on ``storage_filesystem``
    storage_filesystem: Any  # ``pyarrow.fs.FileSystem``, or None when ``storage_path`` is a URI or local path
    # restarts from the last checkpoint after machine failures that cost all members, and members lost to exceptions of
    # their own; 0 for as long as the job makes progress, -1 for no limit
    max_failures: int
    num_to_keep: int | None  # checkpoints kept; None = all
    checkpoint_score_attribute: str | None  # metric that ranks checkpoints, None = the latest are kept
    checkpoint_score_order: str  # "max" or "min"
    runtime_env: Mapping[str, Any]  # Ray runtime environment of the workers
    log_level: str = "INFO"  # level of the ``elastic_ray`` loggers of controller and workers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec(RunSettings):
    """Specification of a job as its driver submitted it; ``storage_path`` ends with the job's name."""

    job: str  # unique name; also the controller's actor name after ``job:``
    # cloudpickle of ``(train_loop_per_worker, train_loop_config)``; a config of None means that the function is called
    # without an argument
    train_loop: bytes
    min_workers: int  # fewest workers the job may run with
    max_workers: int  # most workers it may use
    # Ray resources of one worker, or of all workers of a unit, e.g. ``{"CPU": 1, "GPU": 1}``; every amount is above 0.
    bundle: Mapping[str, float]
    use_gpu: bool  # train on CUDA where a node has it
    label_selector: Mapping[str, str]  # conditions on the Ray labels of a worker's node (``placement.cluster.cluster``)
    elastic: ElasticConfig  # how the job changes size
    # how the allocator treats the job beside others
    scheduling: SchedulingConfig = dataclasses.field(default_factory=SchedulingConfig)
    # the user's name for the model, by which jobs share what they measure; None derives one
    model_fingerprint: str | None = None
    trial: TrialSpec | None = None  # of a trial of a sweep; None for any other job
    branch_of: str = ""  # job that it is a branch of; empty for any other job
    submission: str = ""  # id of Ray's job submission that it was started from; empty if from none
    user: str = ""  # who has submitted it
    # by which its workers and its controller know each other; it travels through Ray alone, and a controller that Ray
    # starts again has it again. Never shown.
    secret: str = dataclasses.field(default_factory=new_secret, repr=False)
    shown: bool = False  # its driver shows what happens to it, so that the controller's log need not
    # where that is kept instead, with ``callbacks``, if they are too large for a message; else empty
    stored_train_loop: str = ""
    # cloudpickle of the user's callbacks with the run context that they receive; empty for none
    callbacks: bytes = dataclasses.field(default=b"", repr=False)
    callback_names: tuple[str, ...] = ()  # names of their classes, in order
    datasets: str = ""  # name of the actor that reads the job's Ray datasets; empty for none

    @property
    def owner(self) -> Mapping[str, Any]:
        """Owner of the job and the resources per worker, as recorded in the job's start event."""
        return {"user": self.user, "tenant": self.scheduling.tenant, "bundle": dict(self.bundle)}

    @property
    def trial_facts(self) -> TrialFacts | None:
        """Facts about the sweep trial that the job runs; None if the job is not a trial."""
        if self.trial is None:
            return None
        sweep, said = self.trial.controller.rpartition("-")[0], self.trial
        return TrialFacts(sweep=sweep, parameters=said.parameters, metric=said.metric, mode=said.mode, rungs=said.rungs)

    @property
    def metric(self) -> str:
        """Name of the metric that ranks the sweep's trials, or else the job's checkpoints; empty if not set."""
        return (self.trial.metric if self.trial is not None else self.checkpoint_score_attribute) or ""

    @property
    def states_kept(self) -> int:
        """Number of automatic checkpoints to keep: at least two, so that the previous one remains as a fallback.

        The number is 0 for a trial, which continues only from the checkpoint that its sweep names.
        """
        if self.trial is not None or not self.elastic.automatic_checkpoints:
            return 0
        return max(2, self.num_to_keep or 2)

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(
                f"workers must satisfy 1 <= min_workers <= max_workers, but got {self.min_workers} and "
                f"{self.max_workers}"
            )
        if not self.bundle or not all(amount > 0 for amount in self.bundle.values()):
            raise ValueError(f"bundle must name at least one resource, all above 0, but got {dict(self.bundle)}")
