"""Checks that a model can be sharded and trained; error messages suggest an alternative (torch).

These checks run for every model. They do not import torch's sharding modules, which would take a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.spec import Strategy

if TYPE_CHECKING:
    from elastic_ray.sync.sharded_parameters.fsdp_fields import ShardedParam

ALONE = ("elastic_ray_alone",)
"""What the mesh is called that modules are sharded on before their model joins a run."""


_SHARD_SIZE = "elastic_ray_shard_size"

SHARDED = Strategy(name="fully_shard")
"""What ``strategy`` of a sharded model is."""

OF_ANOTHER_GROUP = (
    "the group has changed since the sharded model was called, and what backward() needs of that call is gone: a "
    "worker was lost in an evaluation between model(x) and backward(). Evaluate before the model is called, or after "
    "optimizer.step()"
)
OF_NO_GROUP = (
    "tensors of a sharded model cannot be combined with others that are not of its present group. Copies of parameters "
    "that a loop keeps (p.detach().clone()) stay in the group that they were made in, and a second sharded model that "
    "AdaptiveDataParallel does not wrap is in none; only in the wrapped module do rows move with the group. Make an "
    "average of the weights a part of that module, and move it where the optimizer steps: "
    "optimizer.register_step_post_hook(lambda *_: elastic_ray.sync.change_parameters(...)); see docs/recipes.md, An "
    "average of the weights"
)
CREATES_GRAPH = (
    "create_graph=True is not supported for a sharded model: torch frees the parameters that a gradient of a gradient "
    'would be computed with. Train models with gradient penalties unsharded, as with strategy="zero1"'
)
NO_STRATEGY = (
    "the parameters of this model are sharded (elastic_ray.fully_shard), and a strategy says how whole replicas are "
    "kept together: leave strategy= and set_strategy() out, or do not shard the model"
)


_HOOKS = (
    "Change gradients between backward() and optimizer.step(), or use register_post_accumulate_grad_hook() of the "
    "parameters after fully_shard(), which sees this rank's rows"
)


def key_of(shard_size: int | None) -> str:
    """Return the key for recording step times of sharded models with this shard size.

    If all workers form one group (None), the key contains no size, so that records from earlier versions stay valid.
    """
    return SHARDED.name if shard_size is None else f"{SHARDED.name}({shard_size})"


def strategy_of(model: nn.Module) -> Strategy:
    """Return a strategy with a name that identifies a sharded model's layout, for recording step times.

    Raises ValueError if modules were sharded with different values of ``shard_size``.
    """
    return dataclasses.replace(SHARDED, name=key_of(shard_size_of(model)))


def is_sharded_model(module: nn.Module) -> bool:
    """True if any module in the model is sharded with ``fully_shard``, from torch or this package."""
    return any(hasattr(type(each), "_get_fsdp_state") for each in module.modules())


def set_shard_size(module: nn.Module, shard_size: int | None) -> None:
    """Record the shard size used to shard a module."""
    setattr(module, _SHARD_SIZE, shard_size)


def shard_size_of(model: nn.Module) -> int | None:
    """Return the shard size shared by all sharded modules in a model.

    Raises ValueError if modules were sharded with different values.
    """
    found = {getattr(each, _SHARD_SIZE): name for name, each in model.named_modules() if hasattr(each, _SHARD_SIZE)}
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise ValueError(
            f"shard_size must be the same for all modules of a model, but is {one} for {first or 'the model'} "
            f"and {other} for {second or 'the model'}"
        )
    return next(iter(found), None)


def _check_shard_size(module: nn.Module, shard_size: int | None) -> None:
    """Raise TypeError or ValueError if `shard_size` is invalid or different from the sharded modules inside."""
    if shard_size is not None and (isinstance(shard_size, bool) or not isinstance(shard_size, int)):
        raise TypeError(f"shard_size must be a number of workers or None, but got {shard_size!r:.80}")
    if shard_size is not None and shard_size < 2:
        raise ValueError(
            f"shard_size must be 2 or more, or None for one group of all workers, but got {shard_size}: a model of "
            "which each worker holds the whole is not sharded"
        )
    for name, each in module.named_modules():
        inside = getattr(each, _SHARD_SIZE, shard_size)
        if inside != shard_size:
            raise ValueError(
                f"shard_size must be the same for all modules of a model, but is {inside} for {name} of "
                f"{type(module).__name__}, and here {shard_size}"
            )


def refuse_gradient_hooks(params: Iterable[ShardedParam]) -> None:
    """Raise ValueError if a sharded parameter has a gradient hook, because torch would never call the hook."""
    for each in params:
        if each.param._backward_hooks:
            raise ValueError(
                f"{each.name} has a hook of register_hook(), which torch does not call for a sharded parameter: its "
                f"gradient comes from torch's reduction, not from autograd. {_HOOKS}"
            )


def check_module(module: nn.Module, shard_size: int | None = None) -> str:
    """Check that torch can shard a module, and return the device type of its parameters.

    Raises:
        TypeError: ``shard_size`` is not a number.
        ValueError: The module cannot be sharded, or not with this ``shard_size``.
    """
    name = type(module).__name__
    if getattr(module, "elastic_ray_wraps", False):
        raise ValueError(
            "module must be a plain model, but got an AdaptiveDataParallel: call fully_shard first, on the model that "
            "it wraps, then make the optimizer, and wrap last"
        )
    if hasattr(type(module), "_get_fsdp_state"):
        raise ValueError(f"{name} is sharded already: call fully_shard once on each module")
    _check_shard_size(module, shard_size)
    params = {param: param_name for param_name, param in module.named_parameters()}
    own = {param: param_name for param, param_name in params.items() if not hasattr(param, "to_local")}
    for param, param_name in own.items():
        if not param.dim() or not param.shape[0]:
            raise ValueError(
                f"{name}.{param_name} has the shape {tuple(param.shape)}, and parameters are cut along their first "
                "dimension: give it one element at least in one dimension, as torch.nn.Parameter(torch.ones(1))"
            )
        hooked: Any = param
        if hooked._backward_hooks or hooked._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name}.{param_name} has a hook on its gradient. torch's fully_shard replaces the parameter "
                f"without the hook, so it would never be called. {_HOOKS}"
            )
        if not param.is_contiguous():
            raise ValueError(f"{name}.{param_name} is not contiguous in memory: make it so with .contiguous() before")
    kinds = {param.dtype for param in own if param.requires_grad}
    if len(kinds) > 1:
        named = ", ".join(
            f"{own[next(p for p in own if p.dtype == kind)]} is {kind}" for kind in sorted(kinds, key=str)
        )
        raise ValueError(
            f"trained parameters that are sharded together must have one dtype, but in {name} {named}: shard the "
            "modules of each dtype by themselves, or convert them; for computation in 16 bits see mp_policy"
        )
    devices = {param.device for param in own} or {param.device for param in params}
    if len(devices) > 1:
        raise ValueError(
            f"{name} has parameters on {', '.join(sorted(map(str, devices)))}: move it to one device first"
        )
    return next(iter(devices)).type if devices else "cpu"


def check_model(module: nn.Module, optimizer: Any, *, strategy: object, scaler: Any) -> None:
    """Check that a model with sharded modules can be trained.

    Raises:
        StrategyError: The model cannot be trained; the message says why and how to fix this.
        ValueError: The optimizer was created before the model was sharded.
    """
    outside = [name for name, param in module.named_parameters() if not hasattr(param, "to_local")]
    stale = sum(1 for group in optimizer.param_groups for p in group["params"] if not hasattr(p, "to_local"))
    if stale and not outside:
        raise ValueError(
            f"the optimizer holds {stale} parameters from before the model was sharded, which is trained no more: make "
            "it after fully_shard(model), as torch.optim.AdamW(model.parameters())"
        )
    if outside:
        raise StrategyError(
            f"parts of the model are sharded, but {', '.join(outside[:5])} are not: call "
            "elastic_ray.fully_shard(model) on the whole of it last, before the optimizer is made"
        )
    params: list[Any] = list(module.parameters())
    without = sum(1 for param in params if getattr(param, "elastic_ray_stands_in", False))
    if 0 < without < len(params):
        raise StrategyError(
            f"{without} of {len(params)} parameters were built on the meta device, and the others in memory: build the "
            'whole model under torch.device("meta"), or none of it'
        )
    if any(param.device_mesh.mesh_dim_names != ALONE for param in params):
        raise StrategyError(
            "the model is sharded over its own group, by torch's fully_shard or in an earlier run: build a new model "
            "and shard it with elastic_ray.fully_shard, over the job's workers"
        )
    if strategy is not None:
        raise StrategyError(
            "strategy must be left out for a model whose parameters are sharded (elastic_ray.fully_shard): it says how "
            f"whole replicas are kept together, but got {strategy!r:.80}"
        )
    if scaler is not None and scaler.is_enabled():
        raise StrategyError(
            "grad_scaler is not supported for a sharded model: each rank would check only its own rows for "
            "overflow. Train in bfloat16, which needs no scaler: fully_shard(module, mp_policy=MixedPrecisionPolicy("
            "param_dtype=torch.bfloat16, reduce_dtype=torch.float32))"
        )
