"""``TrainingArguments`` of a worker: its rank is that of now, and what cannot be kept is refused."""

from __future__ import annotations

import copyreg
from typing import Any

from transformers import TrainingArguments

from elastic_ray.loop.api import get_context


class _ElasticArguments:
    """Ranks are asked of the job. What is pickled, as beside a checkpoint, is the arguments as they were."""

    @property
    def process_index(self) -> int:
        """This worker's rank."""
        return get_context().get_world_rank()

    @property
    def local_process_index(self) -> int:
        """Its rank among those on its node."""
        return get_context().get_local_rank()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), vars(self)  # type: ignore[attr-defined]


def elastic(theirs: TrainingArguments) -> TrainingArguments:
    """Make arguments those of a worker, in place."""
    kind = type(theirs)
    if not issubclass(kind, _ElasticArguments):
        theirs.__class__ = type(kind.__name__, (_ElasticArguments, kind), {"__module__": kind.__module__})
    return theirs


def check_arguments(args: Any) -> None:
    """Raise ValueError for what cannot be kept when workers come and go."""
    found = {
        "gradient_accumulation_steps": args.gradient_accumulation_steps != 1,
        "deepspeed": getattr(args, "deepspeed", None),
        "fsdp": getattr(args, "fsdp", None),
        "auto_find_batch_size": args.auto_find_batch_size,
        "enable_jit_checkpoint": getattr(args, "enable_jit_checkpoint", False),
        "n_gpu": args.n_gpu > 1,
        "train_sampling_strategy": getattr(args, "train_sampling_strategy", "") == "batch_rebalance",
        "world_size": args.world_size > 1,
    }
    for name, way_out in _REFUSED.items():
        if found[name]:
            raise ValueError(f"{name}={getattr(args, name)!r} cannot be kept under elastic-ray: {way_out}")


_REFUSED = {
    "gradient_accumulation_steps": (
        "the job cuts micro-batches by itself: pass a larger per_device_train_batch_size, and "
        "Trainer(max_batch_size=, gradient_accumulation=True)"
    ),
    "deepspeed": "its state cannot follow the group: leave it out",
    "fsdp": "its shards cannot follow the group: leave it out",
    "auto_find_batch_size": (
        "a job that runs out of memory goes on with smaller micro-batches by itself: leave it out, and pass "
        "Trainer(max_batch_size=, gradient_accumulation=True)"
    ),
    "enable_jit_checkpoint": "the job saves before a preemption by itself: leave it out",
    "n_gpu": (
        "DataParallel would spread a worker over several GPUs: give each worker one GPU, "
        "ScalingConfig(use_gpu=True), and more workers"
    ),
    "train_sampling_strategy": "its batches are cut for a fixed number of processes: use 'group_by_length' or 'random'",
    "world_size": (
        "torchrun or accelerate launch has set up processes of its own here: the job starts workers, each of them a "
        "process of its own"
    ),
}
