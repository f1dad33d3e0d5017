"""Access to private fields of torch's ``fully_shard``, used in no other module (torch).

Torch cannot move a sharded module to another group. This module therefore replaces its mesh and its shards between two
steps; modules, parameters and hooks stay the same objects. It is written for torch 2.11 to 2.15; :func:`check_torch`
checks that the installed version has all required fields.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.sharded_parameters.process_group import mesh_of_one

# Imported where they are used: all else must work with a torch that has moved them.
_NAMES = {
    "torch._C._distributed_c10d": (
        *("_register_process_group", "_resolve_process_group", "_unregister_process_group"),
    ),
    "torch._prims_common": ("make_contiguous_strides_for",),
    "torch.distributed.fsdp._fully_shard._fsdp_common": ("FSDPMeshInfo", "TrainingState"),
    "torch.distributed.tensor._dtensor_spec": ("DTensorSpec",),
}
_STATE = ("_state_ctx", "_is_root", "_training_state")
_GROUPS = "_fsdp_param_groups", "_fsdp_param_group"  # up to torch 2.11 a module has one group, or none
_CONTEXT = ("post_backward_final_callback_queued", "iter_forward_root")
_SETTINGS = {"gradient_divide_factor": "set_gradient_divide_factor", "_all_reduce_hook": "set_all_reduce_hook"}
_OTHER_SETTERS = (
    *("set_reduce_scatter_divide_factor", "set_custom_all_gather", "set_custom_reduce_scatter"),
    *("set_force_sum_reduction_for_comms", "set_reduce_scatter_unused_params"),  # the last one: from torch 2.12 on
)
_CHANGED = (
    "{setter}() is not supported for elastic_ray.fully_shard: gradients are the mean over the samples of a step, "
    "whatever the shares of the workers. Leave it out, and scale the loss where another scale is wanted"
)
_GROUP = (
    "mesh_info",
    "post_forward_mesh_info",
    "fsdp_params",
    "_training_state",
    "_to_sharded",
    "post_backward",
    "reduce_grads",
    "finalize_backward",
    *_SETTINGS,
)
_PARAM = (
    *("mesh_info", "post_forward_mesh_info", "_spmd_mesh", "_spmd_placements", "_sharding_spec"),
    *("sharded_size", "contiguous_sharded_stride", "padded_sharded_param_size", "_sharded_param_data"),
    *(
        "sharded_param",
        "all_gather_outputs",
        "unsharded_accumulated_grad",
        "_module_info",
        "_orig_size",
        "fsdp_placement",
        "mp_policy",
        "_setattr_on_modules",
    ),
)
_TENSOR = ("_local_tensor", "_spec")
_DISPATCHER = (
    *("_custom_op_handlers", "unwrap_to_op_info", "sharding_propagator", "wrap"),
    "_dispatch_get_local_results_slow_path",
    "_propagate_op_sharding_dispatch_slow_path",
)


NO_MEMORY_YET = (
    "the model was built on the meta device, and gets its shards when its first loop over an AdaptiveDataLoader "
    "begins, when it is known which rows each worker holds: call it, save it and load into it in that loop or after "
    "it. Weights of a file can be put in by fully_shard(..., param_init_fn=...)"
)


class UnknownTorchError(RuntimeError):
    """Error raised if the installed version of torch lacks any of the expected private fields."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShardedParam:
    """Parameter of a sharded module, with the private object kept for it by torch."""

    name: str  # the first of its names in the model
    param: nn.Parameter  # the user's object, a ``DTensor``
    shape: tuple[int, ...]  # of the whole parameter
    field: Any  # what torch keeps of it

    @property
    def local(self) -> Tensor:
        """Rows of the parameter on this rank, in their own memory."""
        return self.param._local_tensor  # type: ignore[attr-defined,no-any-return]

    @property
    def local_grad(self) -> Tensor | None:
        """Gradient of the rows on this rank; None if they have no gradient."""
        grad: Any = self.param.grad
        return None if grad is None else grad._local_tensor


def check_torch() -> None:
    """Check that torch has the private fields replaced by this module.

    Raises UnknownTorchError if a field is missing; the message names the missing fields and torch's version.
    """
    if missing := _missing_fields():
        raise UnknownTorchError(
            "elastic_ray.fully_shard swaps the shards of a module inside torch's fully_shard, whose fields it knows "
            f"for torch 2.11 to 2.15; in torch {torch.__version__} there is no {', '.join(missing)}. Install one of "
            'these, or shard the optimizer state alone: AdaptiveDataParallel(model, optimizer, strategy="zero1")'
        )


@functools.cache
def _missing_fields() -> tuple[str, ...]:
    """Return the private fields missing from a small sharded module, with the names of their classes."""
    if "_rank" not in inspect.signature(DeviceMesh).parameters:
        return ("DeviceMesh(_rank=)",)
    if missing := tuple(_moved_names()):
        return missing
    dispatcher: Any = DTensor._op_dispatcher
    probe = nn.Linear(2, 2, bias=False)
    torch_fully_shard(probe, mesh=mesh_of_one("cpu"))
    return *_lacking(dispatcher, _DISPATCHER), *missing_fields(probe)


def _moved_names() -> Iterator[str]:
    """Yield each private module of torch that cannot be imported, and the names that the others lack."""
    for home, names in _NAMES.items():
        try:
            module = importlib.import_module(home)
        except ImportError:
            yield home
        else:
            yield from (f"{home}.{name}" for name in names if not hasattr(module, name))


def missing_fields(module: nn.Module) -> tuple[str, ...]:
    """Return the required private fields missing from a sharded module, as ``Class.field``."""
    found = list(_lacking(module, ("_get_fsdp_state",)))
    if found:
        return tuple(found)
    for state in states_of(module):
        found += _lacking(state, _STATE)
        found += _lacking(getattr(state, "_state_ctx", None), _CONTEXT)
        if not any(hasattr(state, name) for name in _GROUPS):
            found.append(f"{type(state).__name__}.{_GROUPS[0]}")
            continue
        for group in _param_groups(state):
            found += _lacking(group, _GROUP)
            for field in getattr(group, "fsdp_params", ()):
                found += _lacking(field, _PARAM)
                found += _lacking(getattr(field, "sharded_param", None), _TENSOR)
    return tuple(dict.fromkeys(found))


def _lacking(target: object, names: Sequence[str]) -> Iterator[str]:
    return (f"{type(target).__name__}.{name}" for name in names if not hasattr(target, name))


def _param_groups(state: Any) -> list[Any]:
    """Return the parameter groups that a sharded module gathers together; several if it has several meshes."""
    several, one = _GROUPS
    if hasattr(state, several):
        return list(getattr(state, several))
    group = getattr(state, one)
    return [] if group is None else [group]


def states_of(module: nn.Module) -> list[Any]:
    """Return torch's state objects for all sharded modules in a model, without duplicates, outermost first."""
    found: dict[int, Any] = {}
    for each in module.modules():
        if isinstance(each, FSDPModule):
            state = each._get_fsdp_state()
            found.setdefault(id(state), state)
    return list(found.values())


def units_of(module: nn.Module) -> list[FSDPModule]:
    """Return all sharded modules in a model."""
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def groups_of(module: nn.Module) -> list[Any]:
    """Return torch's parameter groups for all sharded modules; parameters in the same group are gathered together."""
    return [group for state in states_of(module) for group in _param_groups(state)]


def params_of(module: nn.Module) -> list[ShardedParam]:
    """Return all sharded parameters in a model, in model order."""
    fields = {id(field.sharded_param): field for group in groups_of(module) for field in group.fsdp_params}
    return [
        ShardedParam(name, param, tuple(fields[id(param)]._orig_size), fields[id(param)])
        for name, param in module.named_parameters()
        if id(param) in fields
    ]


def scattered_params(unit: FSDPModule) -> list[tuple[nn.Parameter, int, int]]:
    """Return a sharded module's parameters whose gradients torch scatters together, in memory order.

    Each parameter is returned with the number of elements in this rank's rows, without and with zero padding.
    """
    return [
        (field.sharded_param, field.sharded_size.numel(), field.padded_sharded_param_size.numel())
        for group in _param_groups(unit._get_fsdp_state())
        for field in group.fsdp_params
        if hasattr(field, "_unsharded_param") and field._unsharded_param.requires_grad
    ]


def check_places(module: nn.Module) -> None:
    """Check that no sharded parameter of the model has been replaced.

    Raises StrategyError if a parameter was replaced.
    """
    names = {id(each): name for name, each in module.named_modules()}
    for field in (field for group in groups_of(module) for field in group.fsdp_params):
        info = field._module_info
        places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
        for owner, name in places:
            if getattr(owner, name) is not field.sharded_param:
                raise StrategyError(
                    f"{names.get(id(owner), '')}.{name} is not the parameter that was sharded there, but was put in "
                    "its place later: tie and replace parameters before fully_shard(), and load weights by "
                    "load_state_dict()"
                )


def install_hooks(unit: FSDPModule, all_gather: Any, reduce_scatter: Any, all_reduce_hook: Any) -> None:
    """Set the three communication hooks of a sharded module, and prevent user code from changing them.

    Raises StrategyError if user code has already set a hook.
    """
    for group in _param_groups(unit._get_fsdp_state()):
        for field, setter in _SETTINGS.items():
            if getattr(group, field) is not None:
                raise StrategyError(_CHANGED.format(setter=setter))
    unit.set_custom_all_gather(all_gather)
    unit.set_custom_reduce_scatter(reduce_scatter)
    unit.set_all_reduce_hook(all_reduce_hook)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    if _knows_unused():
        unit.set_reduce_scatter_unused_params(True, recurse=False)
    for setter in (*_SETTINGS.values(), *_OTHER_SETTERS):
        setattr(unit, setter, functools.partial(_refuse_setting, setter))


def watch_use(unit: FSDPModule, used: Callable[[nn.Parameter], None]) -> None:
    """Report which of a sharded module's parameters have a gradient when torch scatters gradients.

    For all other parameters, torch scatters zeros, which cannot be told apart from gradients later, because ranks may
    use different parameters.

    Args:
        used: Called with each such parameter, at least once per backward pass.
    """
    for group in _param_groups(unit._get_fsdp_state()):
        _put(group, post_backward=functools.partial(_post_backward, group, used))


def _post_backward(group: Any, used: Callable[[nn.Parameter], None], *unused: Any) -> None:
    """Report a group's used parameters, then call torch's handler for a backward pass that has reached the group."""
    for field in group.fsdp_params:
        gathered = field._unsharded_param if hasattr(field, "_unsharded_param") else None
        if (gathered is not None and gathered.grad is not None) or field.unsharded_accumulated_grad is not None:
            used(field.sharded_param)
        elif gathered is not None and gathered.requires_grad and group.reduce_grads and not _knows_unused():
            gathered.grad = torch.zeros_like(gathered)  # other ranks may use it, and a group is scattered as one
    type(group).post_backward(group, *unused)


def _knows_unused() -> bool:
    """True if torch itself scatters zeros for parameters not used in a pass."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def _refuse_setting(setter: str, *arguments: Any, **options: Any) -> None:
    raise StrategyError(_CHANGED.format(setter=setter))


def hollow_out(module: nn.Module, device: torch.device) -> None:
    """Replace the parameters of a sharded module on the meta device with stand-ins.

    A stand-in is on the given device and has the parameter's shape, but memory for only one element. All elements read
    as NaN, and torch refuses to write more than one number into it.
    """
    for group in groups_of(module):
        for field in group.fsdp_params:
            before = field.sharded_param
            if not before._local_tensor.is_meta:
                continue
            filling = torch.nan if before.is_floating_point() else 0
            rows = torch.full((), filling, dtype=before.dtype, device=device).expand(before._local_tensor.shape)
            made: Any = DTensor
            after = nn.Parameter(made(rows, before._spec, requires_grad=False), requires_grad=before.requires_grad)
            _put(after, elastic_ray_stands_in=True)
            _put(field, sharded_param=after, _sharded_param_data=rows)
            field._setattr_on_modules(after)


def stands_in(param: Tensor) -> bool:
    """True if a sharded module's parameter is a stand-in without memory."""
    return bool(getattr(param, "elastic_ray_stands_in", False))


def is_sharded(tensor: Tensor) -> bool:
    """True if the tensor is a sharded module's parameter."""
    return isinstance(tensor, DTensor)


def to_sharded(module: nn.Module) -> None:
    """Free a model's gathered parameters, even in a lost step or after a pass without gradients."""
    for state in states_of(module):
        if state._is_root:
            _reset(state)
    for group in groups_of(module):
        group._to_sharded()
        for field in group.fsdp_params:  # torch would add those of a pass that has not ended to the next one's
            if "unsharded_accumulated_grad" in vars(field):  # not from torch 2.15 on
                _put(field, unsharded_accumulated_grad=None)
            if hasattr(field, "_unsharded_param"):
                _put(field._unsharded_param, grad=None)


def _reset(root: Any) -> None:
    """Wait for all operations in progress in a model's sharded modules, and clear them."""
    if hasattr(root, "_reset_iter_state"):  # from torch 2.13 on
        root._reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    stream, pending = root._device_handle.current_stream(), root._comm_ctx
    for each in (pending.all_gather_state, pending.reduce_scatter_state):
        if each is not None and each.event is not None:
            stream.wait_event(each.event)
    _put(pending, all_gather_state=None, reduce_scatter_state=None)
    pending.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        _put(state, _training_state=TrainingState.IDLE)
        for group in _param_groups(state):
            group.finalize_backward()
            _put(group, _partial_reduce_output=None, _training_state=TrainingState.IDLE)
    _put(root._state_ctx, iter_forward_root=None, post_backward_final_callback_queued=False)


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, as torch does after each call to a sharded module."""
    for unit in units_of(module):
        unit.reshard()


def is_backward_over(module: nn.Module) -> bool:
    """True if torch has finished the backward pass, including the last reductions."""
    return not any(state._state_ctx.post_backward_final_callback_queued for state in states_of(module))


def reduce_rest(module: nn.Module) -> None:
    """Reduce gradients that torch has left unreduced after a backward pass.

    If a module is used several times under reentrant checkpointing, torch considers its part of the pass finished after
    the first nested backward pass, and would add later gradients to the next step's gradients.
    """
    for group in groups_of(module):
        fields = [field for field in group.fsdp_params if hasattr(field, "_unsharded_param")]
        if any(field._unsharded_param.grad is not None for field in fields):
            state = group._training_state
            group.post_backward()
            group.finalize_backward()
            _put(group, _training_state=state)


def memory_for(param: ShardedParam, rows: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """Return memory for a shard in the form expected by torch.

    Args:
        rows: Rows of the shard; None if it has no rows. If there are exactly ``chunk`` rows and nothing else shares
            their memory, they are not copied.
        chunk: Number of rows in the largest shard; torch pads all shards to this size.

    Returns the entire memory, which is zero after the rows, and a view of just the rows.
    """
    alone = rows is not None and rows.is_contiguous() and rows.untyped_storage().nbytes() == rows.nbytes
    if rows is not None and alone and len(rows) == chunk:
        return rows, rows
    whole = param.local.new_zeros((chunk, *param.shape[1:]))
    found = whole.narrow(0, 0, 0 if rows is None else len(rows))
    if rows is not None:
        found.copy_(rows)
    return whole, found


def adopt(module: nn.Module, mesh: DeviceMesh, shards: Sequence[tuple[ShardedParam, Tensor, Tensor]]) -> None:
    """Give a model's parameters, which stay the same objects, another group's shards.

    Args:
        shards: Each parameter with the result of :func:`memory_for`: entire memory, and view of the rows.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    to_sharded(module)
    info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
    for group in groups_of(module):
        _put(group, mesh_info=info, post_forward_mesh_info=None if group.post_forward_mesh_info is None else info)
    for param, memory, rows in shards:
        _swap(param, info, memory, rows)


def _swap(param: ShardedParam, info: Any, memory: Tensor, rows: Tensor) -> None:
    """Replace the mesh and the shard of one parameter."""
    from torch._prims_common import make_contiguous_strides_for
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    field = param.field
    spec = DTensorSpec(info.mesh, field._spmd_placements, tensor_meta=field._sharding_spec.tensor_meta)
    _put(
        field,
        mesh_info=info,
        post_forward_mesh_info=None if field.post_forward_mesh_info is None else info,
        _spmd_mesh=info.mesh,
        _sharding_spec=spec,
        sharded_size=rows.size(),
        contiguous_sharded_stride=make_contiguous_strides_for(rows.size()),
        padded_sharded_param_size=memory.size(),
        _sharded_param_data=memory.view(-1),
        all_gather_outputs=[],
    )
    if hasattr(field, "_shard_mesh"):  # from torch 2.12 on; before, it is that of mesh_info
        _put(field, _shard_mesh=info.mesh)
    if hasattr(field, "_sharding_spec_by_dtype"):  # from torch 2.15 on; specs of gradients on the mesh before
        field._sharding_spec_by_dtype.clear()
    if hasattr(field, "_unsharded_param"):  # sized by the group
        del field._unsharded_param
    _put(param.param, _local_tensor=rows, _spec=spec, grad=None, elastic_ray_stands_in=False)


def shard_like(param: Tensor, rows: Tensor) -> Tensor:
    """Return ``rows``, this rank's rows of a parameter, as a tensor that can replace the parameter."""
    shard: Any = DTensor
    return shard(rows, param._spec, requires_grad=False)  # type: ignore[attr-defined,no-any-return]


def _put(target: Any, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(target, name, value)
