"""SHELL over Ray Data: lets an epoch of a dataset have one order, whichever process executes it, and how often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.data import ExecutionResources, FileShuffleConfig, RandomSeedConfig


def hold_order(dataset: Any, *, epoch: int, seed: int) -> None:
    """Let the dataset's next execution have the order of this epoch; the dataset is changed, so it is to be a copy.

    Ray Data counts a dataset's executions, and its seeded shuffles draw by that count: here it is the epoch. Shuffles
    without a seed, in which any order is as good as another, are given one. What users' functions draw by themselves is
    not held.

    Args:
        dataset: the ``ray.data.Dataset``.
        epoch: from 0.
        seed: for shuffles that have none.
    """
    for operator in dataset._logical_plan.dag.post_order_iter():
        _seed_operator(operator, seed)
    theirs = dataset.context
    theirs._execution_idx = epoch
    theirs.enable_progress_bars = False
    theirs = theirs.execution_options
    theirs.preserve_order = True


def leave_room(dataset: Any, left: Mapping[str, float]) -> None:
    """Let the dataset's executions leave these CPUs and GPUs of the cluster to the job's workers, but not the last CPU.

    Otherwise Ray Data's tasks would take every CPU that is free, and the job could not grow. What the user has excluded
    himself holds as well.
    """
    theirs: Any = dataset.context.execution_options
    there: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    cpus = max(0.0, min(left.get("CPU", 0.0), there.get("CPU", 0.0) - 1.0))
    room = ExecutionResources(cpu=cpus, gpu=left.get("GPU", 0.0))
    theirs._set_exclude_resources(theirs.exclude_resources.add(room))


def _seed_operator(operator: Any, seed: int) -> None:
    """Give an operator of Ray Data's plan this seed, where it draws without one."""
    theirs: Any
    for theirs in _seeds(operator):
        if theirs.seed is None:
            theirs.seed, theirs.reseed_after_execution = seed, True
    make = getattr(operator, "shuffle_config_factory", None)
    if make is not None and _draws_anew(make):
        object.__setattr__(operator, "shuffle_config_factory", lambda: FileShuffleConfig(seed=seed))
    theirs = getattr(operator, "datasource", None)
    shuffle = getattr(theirs, "_shuffle", None)
    if shuffle == "files" or (isinstance(shuffle, FileShuffleConfig) and shuffle.seed is None):
        theirs._shuffle = FileShuffleConfig(seed=seed)


def _seeds(operator: Any) -> Iterator[Any]:
    """Seeds of shuffles and samples."""
    found = getattr(operator, "seed_config", None), *(getattr(operator, "fn_args", None) or ())
    return (each for each in found if isinstance(each, RandomSeedConfig))


def _draws_anew(make: Any) -> bool:
    """Whether a shuffle of files has another seed each time (``shuffle="files"``), or none."""
    first, second = make(), make()
    return first is not None and (first.seed is None or first.seed != second.seed)
