"""Checks that refuse unsupported arguments of ``AdaptiveDataParallel``, naming the alternative (torch)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.monitoring.monitor import Monitor
from elastic_ray.stragglers.detection import RESPONSES, StragglerConfig
from elastic_ray.sync.operations.gradient_checks import STEP_AFTER_BACKWARD
from elastic_ray.sync.sharded_parameters.model_checks import ALONE

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.steps.step import LoaderStep

logger = logging.getLogger("elastic_ray")

_NOT_NEEDED = "it is not needed: leave it out, since "
_OF_DDP = {
    "find_unused_parameters": _NOT_NEEDED + "parameters that a step does not use are always handled",
    "static_graph": _NOT_NEEDED + "the graph may change from step to step",
    "device_ids": _NOT_NEEDED + "the model trains on the device that it is on: move it there before",
    "output_device": _NOT_NEEDED + "outputs are where the model puts them",
    "dim": _NOT_NEEDED + "batches are cut by the AdaptiveDataLoader",
    "process_group": "the group is the job's, and changes with it",
    "broadcast_buffers": "buffers are averaged over the workers at the end of each pass of a loader; copy them "
    "yourself where that is not right",
    "init_sync": _NOT_NEEDED + "all workers begin with the first one's parameters",
    "bucket_cap_mb": _NOT_NEEDED + "buckets have up to 25 MiB, as DDP's",
    "gradient_as_bucket_view": _NOT_NEEDED + "gradients stay where autograd puts them",
    "check_reduction": _NOT_NEEDED + "it has no effect in DDP either",
    "delay_all_reduce_named_params": "every gradient is reduced as soon as its bucket is full",
    "param_to_hook_all_reduce": "every gradient is reduced as soon as its bucket is full",
    "mixed_precision": "use torch.autocast in the loop, and pass its GradScaler as grad_scaler=",
    "device_mesh": "the group is the job's, and changes with it",
    "skip_all_reduce_unused_params": _NOT_NEEDED + "parameters that no worker uses keep no gradient",
}

NO_COMMUNICATION_HOOK = (
    "register_comm_hook() is DistributedDataParallel's, whose hooks know one group of ranks: give "
    "AdaptiveDataParallel(strategy=) one of 'bf16', 'fp16' or 'powersgd' for compressed gradients, 'local_sgd' for "
    "models that are averaged now and then, or a BucketOperation of your own (elastic_ray.sync)"
)


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError for DistributedDataParallel's arguments and unknown ones; accept empty ``options``."""
    for name in options:
        if name in _OF_DDP:
            raise TypeError(f"AdaptiveDataParallel has no {name}=, which is DistributedDataParallel's: {_OF_DDP[name]}")
        raise TypeError(
            f"AdaptiveDataParallel has no argument {name!r}; it has module, optimizer, lr_scheduler, grad_scaler and "
            "scaling_rule"
        )


def refuse_in_unit(module: torch.nn.Module) -> None:
    """Raise ValueError for models that ``AdaptiveDataParallel`` does not support if workers form units."""
    for name, param in module.named_parameters():
        mesh = getattr(param, "device_mesh", None)
        if mesh is not None and mesh.mesh_dim_names == ALONE:
            raise ValueError(
                f"{name} is sharded by elastic_ray.fully_shard, over the job's workers, but the job is one of units "
                "(SchedulingConfig(unit=)): shard it within the unit, by torch's "
                "fully_shard(module, mesh=elastic_ray.unit_mesh())"
            )


def refuse_parallel(module: torch.nn.Module) -> None:
    """Raise ValueError for models that torch's tensor parallelism has divided, in workers that are no units."""
    for name, param in module.named_parameters():
        mesh = getattr(param, "device_mesh", None)
        if mesh is not None and mesh.mesh_dim_names != ALONE:
            raise ValueError(
                f"{name} is a DTensor, divided by torch's parallelize_module or distribute_tensor, but the workers "
                "form no units: train with SchedulingConfig(unit=elastic_ray.Unit(...)) and divide the model over "
                "elastic_ray.unit_mesh(), see docs/units.md; or leave the model whole"
            )


def check_stragglers(response: Any) -> StragglerConfig:
    """Check the response to slow workers that a train loop requests in a run without a trainer.

    Raises ValueError if the response is unknown, or requires a trainer.
    """
    if response == "replace":
        raise ValueError(
            "stragglers must be 'ignore', 'tell' or 'share', but got 'replace': the group of a run without a trainer "
            "is fixed, and has no worker to put in a slow one's place. Train under ElasticTrainer(..., "
            "elastic_config=ElasticConfig(stragglers='replace'))"
        )
    if response is not None and response not in RESPONSES:
        raise ValueError(f"stragglers must be 'ignore', 'tell' or 'share', or None, but got {response!r}")
    return StragglerConfig(response=response or "ignore")


def warn_of_no_effect(asked: StragglerConfig, *, lacking: bool) -> None:
    """Warn, if ``lacking``, that a loop's response to slow workers has no effect, as the trainer sets the response."""
    if lacking:
        logger.warning(
            "AdaptiveDataParallel(stragglers=%r) has no effect under a trainer: ask for it with "
            "ElasticTrainer(..., elastic_config=ElasticConfig(stragglers=%r))",
            asked.response,
            asked.response,
        )


def refuse_wrapped(module: torch.nn.Module, own: type) -> None:
    """Raise TypeError for a model in another multi-device wrapper; ``own`` is the class of this package's wrapper."""
    name = type(module).__name__
    if isinstance(module, own):
        raise TypeError(f"module must be a plain model, but got one wrapped in {name} already")
    if isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        raise TypeError(
            f"module must be a plain model, but got a {name}: each worker trains on one device, and elastic-ray "
            "averages their gradients. Pass the model that it wraps"
        )


def check_types(module: Any, monitor: Any, own: type) -> None:
    """Raise an error unless ``module`` is a plain model, not of type ``own``, and ``monitor`` a Monitor or None."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, but got {type(module).__name__}")
    refuse_wrapped(module, own)
    refuse_lazy(module)
    refuse_left_out(module)
    refuse_steps_in_backward(module)
    if monitor is not None and not isinstance(monitor, Monitor):
        raise TypeError(f"monitor must be an elastic_ray.monitoring.Monitor, but got {type(monitor).__name__}")


def refuse_lazy(module: torch.nn.Module) -> None:
    """Raise ValueError for layers whose parameters have no shape before the first batch."""
    lazy = [name for name, each in module.named_parameters() if torch.nn.parameter.is_lazy(each)]
    if lazy:
        raise ValueError(
            f"{', '.join(lazy[:5])} of the model have no shape yet (torch.nn.Lazy...), so that workers could not agree "
            "on gradients: call the model once on a batch, model(torch.zeros(2, ...)), then make the optimizer, and "
            "wrap last"
        )


def refuse_graphed(module: torch.nn.Module) -> None:
    """Raise ValueError for modules whose CUDA graph was captured for one batch shape."""
    for name, each in module.named_modules():
        forward = getattr(vars(each).get("forward"), "__qualname__", "")
        if forward.startswith(torch.cuda.make_graphed_callables.__qualname__ + "."):
            raise ValueError(
                f"{name or type(each).__name__} was captured by torch.cuda.make_graphed_callables, whose graph takes "
                "batches of one shape, but a rank's part of a step changes with the number of workers. Use "
                'torch.compile(mode="reduce-overhead"), which captures a graph for each shape'
            )


def refuse_left_out(module: torch.nn.Module) -> None:
    """Raise ValueError if the model tells DistributedDataParallel to ignore some parameters or buffers."""
    names = sorted(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    if names:
        raise ValueError(
            f"{', '.join(names[:5])} of the model are to be left out of the group "
            "(DistributedDataParallel._set_params_and_buffers_to_ignore_for_model), but AdaptiveDataParallel keeps "
            "whole models equal: set requires_grad=False where they are not trained, or keep them outside this module"
        )


def refuse_steps_in_backward(module: torch.nn.Module) -> None:
    """Raise ValueError for gradient hooks that step an optimizer, because they would run before averaging."""
    for name, param in module.named_parameters():
        for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
            if any(isinstance(value, torch.optim.Optimizer) for value in _reach(hook)):
                raise ValueError(f"a hook on the gradient of {name} steps an optimizer: {STEP_AFTER_BACKWARD}")


def bounded_tables(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return embedding layers with ``max_norm``, keyed by name."""
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {
        name or type(layer).__name__: layer
        for name, layer in module.named_modules()
        if isinstance(layer, tables) and layer.max_norm is not None
    }


def refuse_bounded_tables(tables: Mapping[str, torch.nn.Module], workers: int) -> None:
    """Raise ValueError if trained embeddings with ``max_norm`` are used with several workers."""
    for name, layer in tables.items() if workers > 1 else ():
        if layer.weight.requires_grad:
            raise ValueError(
                f"{name} has max_norm={layer.max_norm}, with which each worker shortens the rows that its own samples "
                f"look up, so the replicas of the table drift apart ({workers} workers, or as many later). Leave "
                "it out: shorten the looked-up vectors in forward(), or all rows after optimizer.step() under "
                "torch.no_grad(), with torch.renorm; or train with one worker"
            )


def _reach(hook: Any) -> Iterator[Any]:
    """Yield the objects that a hook refers to by name, including the contents of dicts and lists."""
    try:
        found = inspect.getclosurevars(inspect.unwrap(getattr(hook, "__func__", hook)))
    except (TypeError, ValueError):  # a callable object, or written in C
        values = list(getattr(hook, "__dict__", {}).values())
    else:
        values = [*found.nonlocals.values(), *found.globals.values()]
    for value in values:
        yield value
        if isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, (list, tuple)):
            yield from value


def refuse_divided_by_torch(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for torch's ZeroRedundancyOptimizer, whose shards belong to one fixed group of ranks."""
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ValueError(
            "ZeroRedundancyOptimizer divides its state among the ranks of one group, and a worker that leaves takes "
            "its part with it: give AdaptiveDataParallel the plain optimizer, as "
            "torch.optim.AdamW(model.parameters()), and "
            'strategy="zero1", which divides its state in a group that changes'
        )


def refuse_inner_training(run: Run, outer: LoaderStep) -> None:
    """Refuse micro-batches in a step ``outer`` that trains a model if an inner loop also trains it.

    The inner loop would run once for each micro-batch, between gradients that belong together. No step is halved to
    measure noise from now on.

    Raises RuntimeError if the step has several micro-batches, or later steps of its loader may have several.
    """
    run.registry.adds_up_gradients()
    info = run.registry.loaders.info
    if outer.micro_steps > 1 or (outer.leads and info is not None and info.limits.gradient_accumulation):
        raise RuntimeError(
            "a model is trained by the loop over a loader whose steps have micro-batches, or may get them "
            "(gradient_accumulation=True), and by a loop within these steps: the inner loop would run for each "
            "micro-batch, and mix its gradients with theirs. Leave gradient_accumulation out, with a batch that fits "
            "into memory at once, or let one loop follow the other"
        )
