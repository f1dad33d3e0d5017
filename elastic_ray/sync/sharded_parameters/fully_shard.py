"""``elastic_ray.fully_shard``: torch's, in a group of workers that may change (torch)."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from elastic_ray.sync.sharded_parameters.checks import check_module
from elastic_ray.sync.sharded_parameters.fsdp_fields import check_torch
from elastic_ray.sync.sharded_parameters.model_state import take_whole_values
from elastic_ray.sync.sharded_parameters.process_group import make_numbers_whole, mesh_of_one

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
    **options: Any,
) -> Module:
    """Shard a module's parameters, gradients and optimizer state over the workers, however many there are.

    As ``torch.distributed.fsdp.fully_shard``, on which it is built: call it on blocks first and on the model last, then
    make the optimizer, then wrap both in ``AdaptiveDataParallel``. Parameters become ``DTensor`` objects, which
    stay the same objects when the group changes: their rows move. Each row lies with two workers, so that the loss of
    any one loses nothing; the model is trained as replicated, up to rounding.

    Args:
        module: a module with a ``forward``, on its device; its parameters have a first dimension, are contiguous, and,
            as far as they are trained, of one dtype.
        reshard_after_forward: whether to free gathered parameters between forward and backward; by default all but
            those of the outermost module.
        mp_policy: dtypes of computation and of reductions.
        options: others of torch's, for none of which there is room here.

    Returns:
        The module, changed in place.

    Raises:
        TypeError: an argument is not torch's, or is of another type than here.
        ValueError: the module cannot be sharded, or is sharded already; or its model was wrapped before.
        UnknownTorchError: torch keeps shards in other fields than are known here.
    """
    for name in options:
        if name in _NOT_SERVED:
            raise TypeError(f"elastic_ray.fully_shard has no {name}=, which is torch's: {_NOT_SERVED[name]}")
        raise TypeError(f"fully_shard has no argument {name!r}; it has module, reshard_after_forward and mp_policy")
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
    check_torch()
    make_numbers_whole()
    device = check_module(module)
    torch_fully_shard(
        module,
        mesh=mesh_of_one(device),
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy or MixedPrecisionPolicy(),
    )
    hooked: Any = module
    hooked.register_load_state_dict_pre_hook(take_whole_values)
    return module
