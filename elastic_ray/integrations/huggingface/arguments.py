"""``TrainingArguments`` with the job's current ranks, and checks that refuse unsupported arguments."""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from elastic_ray.loop.api import current_session, get_context


class _ElasticArguments:
    """Training arguments with the worker's current ranks in the job; they are pickled as the original class."""

    @property
    def process_index(self) -> int:
        """Rank of this worker."""
        return get_context().get_world_rank()

    @property
    def local_process_index(self) -> int:
        """Rank of this worker on its node."""
        return get_context().get_local_rank()

    @property
    def gradient_accumulation_steps(self) -> int:
        """1, because the job splits a step's batch itself; :func:`accumulated` returns the user's value."""
        return 1

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        vars(self)["gradient_accumulation_steps"] = steps

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), vars(self)  # type: ignore[attr-defined]


def elastic(theirs: TrainingArguments) -> TrainingArguments:
    """Make training arguments elastic in place and return them; also turn off progress bars, which flood the output."""
    kind = type(theirs)
    theirs.disable_tqdm = theirs.disable_tqdm or current_session().elastic
    if not issubclass(kind, _ElasticArguments):
        theirs.__class__ = type(kind.__name__, (_ElasticArguments, kind), {"__module__": kind.__module__})
    return theirs


def accumulated(theirs: TrainingArguments) -> int:
    """Return the number of micro-batches per step that the user requested."""
    return int(vars(theirs)["gradient_accumulation_steps"])


def check_arguments(args: Any) -> None:
    """Raise ValueError for training arguments that are not supported while workers join and leave."""
    found = {
        "deepspeed": getattr(args, "deepspeed", None),
        "fsdp": getattr(args, "fsdp", None),
        "auto_find_batch_size": args.auto_find_batch_size,
        "dataloader_in_order": getattr(args, "dataloader_in_order", True) is False,
        "accelerator_config": _dispatches(getattr(args, "accelerator_config", None)),
        "enable_jit_checkpoint": getattr(args, "enable_jit_checkpoint", False),
        "n_gpu": args.n_gpu > 1,
        "train_sampling_strategy": getattr(args, "train_sampling_strategy", "") == "batch_rebalance",
        "world_size": args.world_size > 1,
        "ddp_timeout": getattr(args, "ddp_timeout", 1800) != 1800,
        "average_tokens_across_devices": getattr(args, "average_tokens_across_devices", True) is False,
        "optim": _updates_in_backward(str(getattr(args.optim, "value", args.optim))),
        **{name: getattr(args, name, None) is not None for name in (*_OF_DDP, "ddp_backend", "parallelism_config")},
    }
    for name, way_out in _REFUSED.items():
        if found[name]:
            raise ValueError(f"{name}={getattr(args, name)!r} is not supported under elastic-ray: {way_out}")


def _dispatches(config: Any) -> bool:
    """True if an ``accelerator_config`` sets an option that only works in accelerate's own loops and loaders."""
    return bool(getattr(config, "dispatch_batches", None) or getattr(config, "gradient_accumulation_kwargs", None))


def _updates_in_backward(optimizer: str) -> bool:
    """True if the optimizer updates parameters during backward, before gradients are averaged over the workers."""
    return optimizer.endswith("layerwise") or optimizer in ("lomo", "adalomo")


_OF_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")

_REFUSED = {
    **dict.fromkeys(_OF_DDP, "there is no DistributedDataParallel here, and it is not needed: leave it out"),
    "deepspeed": "its state cannot follow the group: leave it out",
    "fsdp": "its shards cannot follow the group: leave it out",
    "parallelism_config": "its groups of processes cannot follow the job's: leave it out",
    "ddp_backend": "the job chooses it by the workers' devices: leave it out",
    "ddp_timeout": (
        "leave it out, and say how long a worker waits for a slow one by "
        "ElasticTrainer(elastic_config=ElasticConfig(collective_timeout_s=))"
    ),
    "average_tokens_across_devices": (
        "the loss is that of all tokens of a step, however many workers share them: leave it out"
    ),
    "optim": (
        "it updates parameters within backward, before the workers' gradients are averaged: take one that updates in "
        "step(), such as 'galore_adamw' or 'adafactor'"
    ),
    "dataloader_in_order": (
        "a job that changes size continues after the last sample that was used, which needs their order: leave it out"
    ),
    "accelerator_config": (
        "with dispatch_batches one process would read for the others, and gradient_accumulation_kwargs are for steps "
        "that the job cuts by itself: leave these two out"
    ),
    "auto_find_batch_size": (
        "a job that runs out of memory continues with smaller micro-batches by itself: leave it out, and pass "
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


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for ``accelerate.Accelerator`` arguments that are not supported while workers join and leave."""
    found = {name: options.get(name) is not None for name in _OF_ACCELERATOR}
    handlers = {type(each).__name__ for each in options.get("kwargs_handlers") or ()}
    found["DistributedDataParallelKwargs"] = "DistributedDataParallelKwargs" in handlers
    data = options.get("dataloader_config")
    found |= {name: getattr(data, name, None) is True for name in _OF_DATA}
    found["rng_types"] = set(options.get("rng_types") or ()) - {"generator"} != set()
    for name, way_out in _OF_ACCELERATOR.items():
        if found[name]:
            raise ValueError(f"{name} is not supported under elastic-ray: {way_out}")


_NO_SHARDS = "its shards cannot follow the group: leave it out, and each worker holds the whole model"
_OF_DATA = {
    "use_stateful_dataloader": (
        "where the job is in the data is part of its state, whatever the number of workers: leave it out of "
        "DataLoaderConfiguration, and Accelerator.save_state() and load_state() keep the place"
    ),
    "dispatch_batches": (
        "each worker reads its own share, none reads for the others: leave it out of DataLoaderConfiguration"
    ),
}
_OF_ACCELERATOR = {
    **_OF_DATA,
    "rng_types": (
        "workers draw random numbers of their own, and the order of samples is the same on all of them anyway: leave "
        "it out, or pass ['generator']"
    ),
    **dict.fromkeys(("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin"), _NO_SHARDS),
    **dict.fromkeys(("torch_tp_plugin", "parallelism_config"), _NO_SHARDS),
    "DistributedDataParallelKwargs": (
        "there is no DistributedDataParallel here: leave them out, and pass "
        "Accelerator(elastic_options={'strategy': 'bf16'}) in place of a comm_hook"
    ),
}
