"""Public function ``elastic_ray.fully_shard``, torch's function for worker groups that may change (torch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from elastic_ray.sync.sharded_parameters.deferred_initialisation import prepare
from elastic_ray.sync.sharded_parameters.fsdp_fields import check_torch, hollow_out, stands_in
from elastic_ray.sync.sharded_parameters.model_checks import check_module, set_shard_size
from elastic_ray.sync.sharded_parameters.model_state import shard_whole_values
from elastic_ray.sync.sharded_parameters.process_group import explain_mixtures, make_numbers_whole, mesh_of_one

Module = TypeVar("Module", bound=nn.Module)

_NOT_SERVED = {
    "mesh": "the group is the job's, and changes with it: leave it out",
    "shard_placement_fn": "rows are cut along the first dimension, whatever the size of the group: leave it out",
    "offload_policy": "shards stay on the device that they are on: leave it out",
    "ignored_params": "all parameters of the model must be sharded, frozen ones too: leave it out",
    "dp_mesh_dims": "the group is the job's, and changes with it: leave it out",
}


def fully_shard(
    module: Module,
    *,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    device: torch.device | str | None = None,
    shard_size: int | None = None,
    **options: Any,
) -> Module:
    """Shard a module's parameters, gradients and optimizer state over any number of workers.

    Use this function like ``torch.distributed.fsdp.fully_shard``, which it is based on. On every worker, call it on the
    model's blocks and finally on the model itself, then create the optimizer and wrap both in ``AdaptiveDataParallel``.
    Parameters become ``DTensor`` objects, which remain the same objects when the group changes; only their rows move.
    At least two workers hold each row, so losing a single worker loses no state. The results are the same as for a
    replicated model, up to rounding.

    Args:
        module: Module with a ``forward``, on its device. Its parameters must have a first dimension and be contiguous,
            and trained parameters must share one dtype.
        reshard_after_forward: Whether to free gathered parameters between forward and backward. By default, all are
            freed except the parameters of the outermost module.
        mp_policy: Dtypes of computation and of reductions.
        param_init_fn: For a module built on the meta device: called with each submodule to fill the parameters and
            buffers that it holds directly. By default, each submodule's ``reset_parameters()`` is called.
        device: For a module built on the meta device: the device for its shards. Defaults to the current CUDA device,
            or to the CPU if CUDA is not available.
        shard_size: Number of workers in a shard group (HSDP), at least 2, the same for all modules in a model. Each
            group divides the entire model among its workers, and gradients are averaged across groups. By default, or
            if the workers cannot be divided into two or more such groups, rows are divided among all workers.
        options: Other options of torch's function. They are not supported and raise a TypeError.

    Returns:
        The module, changed in place.

    Raises:
        TypeError: An option is unknown or not supported, or an argument has the wrong type.
        ValueError: The module cannot be sharded, is already sharded, or belongs to a model that is already wrapped; or
            an argument for modules on the meta device is given for a module in memory; or ``shard_size`` is below 2 or
            differs from the value for submodules.
        UnknownTorchError: The installed torch lacks the expected private fields.
    """
    for name in options:
        if name in _NOT_SERVED:
            raise TypeError(f"elastic_ray.fully_shard has no {name}=, which is torch's: {_NOT_SERVED[name]}")
        raise TypeError(
            f"fully_shard has no argument {name!r}; it has module, reshard_after_forward, mp_policy, param_init_fn, "
            "device and shard_size"
        )
    _check_types(module, reshard_after_forward, mp_policy, param_init_fn)
    check_torch()
    make_numbers_whole()
    explain_mixtures()
    kind = check_module(module, shard_size)
    place = _device_of(device) if _is_unmade(module, kind, param_init_fn=param_init_fn, device=device) else None
    if place is not None:
        prepare(module, param_init_fn, place)
    torch_fully_shard(
        module,
        mesh=mesh_of_one(kind if place is None else place.type),
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy or MixedPrecisionPolicy(),
    )
    if place is not None:
        hollow_out(module, place)
    set_shard_size(module, shard_size)
    hooked: Any = module
    hooked.register_load_state_dict_pre_hook(shard_whole_values)
    return module


def _check_types(module: object, reshard_after_forward: object, mp_policy: object, param_init_fn: Any) -> None:
    """Raise TypeError if an argument of ``fully_shard`` has the wrong type."""
    if isinstance(module, (list, tuple)):
        raise TypeError(
            f"module must be one torch.nn.Module, but got a {type(module).__name__} of {len(module)}: shard each of "
            "them by itself, or leave them to the module around them, as those must be that share a parameter"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, but got {type(module).__name__}")
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise TypeError(
            f"reshard_after_forward must be True, False or None, but got {reshard_after_forward!r}: a number of ranks "
            "would not divide every size of the group"
        )
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            "mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy, but got " + type(mp_policy).__name__
        )
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(
            "param_init_fn must be a function that is given one module and fills what it holds, but got "
            f"{param_init_fn!r:.80}"
        )


def _is_unmade(module: nn.Module, kind: str, **options: object) -> bool:
    """True if a module has parameters or buffers without memory.

    Raises ValueError if its parameters are in memory, but its buffers or the options are for the meta device.
    """
    buffers = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if kind == "meta":
        return True
    if all(map(stands_in, module.parameters())):  # made by calls on parts of it
        return bool(buffers)
    name = type(module).__name__
    if buffers:
        raise ValueError(
            f"{name}.{buffers[0]} is on the meta device, but parameters are on {kind}: build the whole model under "
            'torch.device("meta"), or none of it'
        )
    for option, value in options.items():
        if value is not None:
            raise ValueError(
                f"{option} is for modules that were built on the meta device, but {name} has its parameters on {kind}: "
                f"initialise and move it before it is sharded, and leave out {option}={value!r:.80}"
            )
    return False


def _device_of(device: torch.device | str | None) -> torch.device:
    """Return the device for parameters that have not been allocated yet."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    found = torch.device(device)
    if found.type == "meta":
        raise ValueError("device must be one with memory, as 'cpu' or 'cuda:0', but got 'meta'")
    if found == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return found
