"""Process group for a sharded model's tensors, built on elastic-ray's collectives (torch).

If a peer is lost, torch's own ``ProcessGroup`` would block in a collective, and raise inside user code. The process
group in this module has no separate connections. Collectives triggered by user code on sharded tensors
(``clip_grad_norm_``, ``full_tensor()``) run in the current generation, or are skipped in a lost step.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from elastic_ray.communication.ended_work import BACKEND, EndedWork
from elastic_ray.sync.sharded_parameters.model_checks import ALONE, OF_NO_GROUP

if TYPE_CHECKING:
    from elastic_ray.sync.sharded_parameters.shard_collectives import ShardCollectives

_NUMBERS = itertools.count()
_NAME = "elastic_ray_"
_PROPAGATE = "_propagate_op_sharding_dispatch_slow_path"
_ALONE: dict[str, DeviceMesh] = {}
_MAKING = threading.Lock()


class ShardProcessGroup(dist.ProcessGroup):
    """Process group that runs collectives on a sharded model's tensors in the current generation.

    Args:
        collectives: Collectives of the model; None for a group of one.
    """

    def __init__(self, rank: int, world_size: int, collectives: ShardCollectives | None) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        self._alone = collectives is None
        # Torch's caches keep meshes for as long as the process lives: they must not keep the run and its model as well.
        self._known = weakref.ref(collectives) if collectives is not None else lambda: None

    @property
    def _collectives(self) -> ShardCollectives | None:
        """Collectives of the model; None for a group of one.

        Raises RuntimeError if the model no longer exists.
        """
        found = self._known()
        if found is None and not self._alone:
            raise RuntimeError(
                "a tensor of a sharded model outlives the model, whose other rows are no longer available: copy what "
                "you need, for example by full_tensor(), while the model exists"
            )
        return found

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return BACKEND

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        """Reduce tensors over the group in place."""
        collectives = self._collectives
        if collectives is None:
            return EndedWork()
        for tensor in tensors:
            collectives.sum_up(tensor, getattr(options, "reduceOp", dist.ReduceOp.SUM))
        return EndedWork()

    def all_gather_single(self, output: Any, tensor: Any, options: Any = None) -> Any:
        """Gather ``tensor`` from all ranks into ``output``, as required by ``full_tensor()`` of a sharded tensor."""
        collectives = self._collectives
        if collectives is None:
            output.copy_(tensor.reshape(output.shape))
        else:
            collectives.gather(output, tensor)
        return EndedWork()

    def allgather_into_tensor_coalesced(self, outputs: Any, tensors: Any, options: Any = None) -> Any:
        """Gather each of several tensors from all ranks into the output at the same position."""
        for output, tensor in zip(outputs, tensors, strict=True):
            self.all_gather_single(output, tensor)
        return EndedWork()

    # Other names that torch has for the same.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]


def make_mesh(
    device_type: str, rank: int, world_size: int, collectives: ShardCollectives | None, *, name: str = ""
) -> DeviceMesh:
    """Return a new mesh that is not equal to any other, because torch reuses cached results for equal meshes."""
    name = name or f"{_NAME}{next(_NUMBERS)}"
    mesh = DeviceMesh(device_type, torch.arange(world_size), mesh_dim_names=(name,), _init_backend=False, _rank=rank)
    group = _registered(name, lambda: ShardProcessGroup(rank, world_size, collectives))
    for field, value in (("_dim_group_names", [name]), ("_pg_registry", {name: group})):
        setattr(mesh, field, value)
    return mesh


def _registered(name: str, make: Callable[[], Any]) -> Any:
    """Return the group registered in torch under this name; if missing, register the result of ``make``.

    Meshes of a single rank on two devices share the group.
    """
    from torch._C._distributed_c10d import _register_process_group, _resolve_process_group

    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        group = make()
        _register_process_group(name, group)  # type: ignore[arg-type]
        return group


def discard_mesh(mesh: DeviceMesh) -> None:
    """Unregister a mesh that is no longer used by any tensor."""
    from torch._C._distributed_c10d import _unregister_process_group

    for name in mesh._dim_group_names:
        _unregister_process_group(name)


def _number(call: Any, arguments: Any, options: Any) -> Any:
    """Return ``item()`` of a sharded tensor as a global value, and torch's result for tensors on other meshes."""
    tensor: Any = arguments[0]
    ours = (tensor.device_mesh.mesh_dim_names or ("",))[0].startswith(_NAME)
    alike = all(each.is_replicate() for each in tensor.placements)
    return (tensor._local_tensor if alike or not ours else tensor.full_tensor()).item()


def _norms(call: Any, arguments: Any, options: Any) -> Any:
    """Return norms of one or more sharded tensors like torch, even if this rank has no rows of some of them.

    Torch raises an error for the largest or smallest element of an empty tensor. Here, an empty part has no effect on
    the result.
    """
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(call, arguments, options)
    dispatcher.sharding_propagator.propagate(info)
    order = float(arguments[1]) if len(arguments) > 1 else 2.0
    of_all = call is torch.ops.aten._foreach_norm.Scalar or (len(arguments) < 3 or arguments[2] is None)
    if math.isinf(order) and of_all:
        neutral = 0.0 if order > 0 else math.inf
        info.local_args = tuple(
            each.new_full((1,) * max(1, each.dim()), neutral) if isinstance(each, Tensor) and not each.numel() else each
            for each in info.local_args
        )
    found = dispatcher._dispatch_get_local_results_slow_path(call, arguments, info)
    return dispatcher.wrap(found, info.output_sharding.output_spec)


def explain_mixtures() -> None:
    """Patch torch's error about mixing a sharded model's tensors with others, so that it suggests a solution."""
    dispatcher: Any = DTensor._op_dispatcher
    propagate = getattr(dispatcher, _PROPAGATE)
    if hasattr(propagate, "__wrapped__"):
        return

    @functools.wraps(propagate)
    def explained(call: Any, args: Any, kwargs: Any, *more: Any) -> Any:
        try:
            return propagate(call, args, kwargs, *more)
        except Exception as error:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
            meshes = {id(each.device_mesh): (each.device_mesh.mesh_dim_names or ("",))[0] for each in tensors}
            if len(meshes) > 1 and any(name.startswith(_NAME) for name in meshes.values()):
                raise RuntimeError(OF_NO_GROUP) from error
            raise

    setattr(dispatcher, _PROPAGATE, explained)


def make_numbers_whole() -> None:
    """Patch torch so that ``item()``, ``float()`` and ``bool()`` of a sharded tensor return the global value.

    Without the patch, torch returns this rank's part, such as the norm of the rank's own rows for ``p.grad.norm()``.
    Norms of any order are also patched, to support ranks without rows.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, _number)
    handlers.setdefault(torch.ops.aten._foreach_norm.Scalar, _norms)
    handlers.setdefault(torch.ops.aten.linalg_vector_norm.default, _norms)


def mesh_of_one(device_type: str) -> DeviceMesh:
    """Return a mesh with only this process, for sharding modules before their model joins a run."""
    with _MAKING:
        if device_type not in _ALONE:
            _ALONE[device_type] = make_mesh(device_type, 0, 1, None, name=ALONE[0])
        found = _ALONE[device_type]
        # User code may have called destroy_process_group(), which forgets those of everybody.
        _registered(ALONE[0], lambda: found._pg_registry[ALONE[0]])
        return found
