"""Support for ``torch.distributed.checkpoint.state_dict`` on models whose state is divided between ranks (torch).

Torch's functions do not support groups that change. On all ranks except the first, they would return part of the state
as if it were complete. They would also step an optimizer whose state is not in ``optimizer.state``, and require a
default process group. Programs import these functions by name, before or after a model is wrapped. The internal
functions that they call are therefore replaced: at once, or when the module is imported (importing it takes half a
second).
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.late_patch import when_imported
from elastic_ray.loop.api import current_session
from elastic_ray.loop.collectives import broadcast
from elastic_ray.sync.sharded.embedding import ShardedEmbedding
from elastic_ray.sync.sharded_parameters.sharded_optimizer import OptimizerPart

_FUNCTIONS = "torch.distributed.checkpoint.state_dict"
_MODELS: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()  # True where ranks hold parts
_REFUSED: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()
# What divides an optimizer's state knows the optimizer, which an entry may not keep.
_OPTIMIZERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def install_in_torch(wrapper: torch.nn.Module, model: torch.nn.Module, optimizer: Any, divided: Any) -> None:
    """Make torch's functions return the complete state of a model and optimizer divided between the ranks."""
    sharded = isinstance(divided, OptimizerPart)
    for each in wrapper.modules():
        if any(isinstance(inner, ShardedEmbedding) for inner in each.modules()):
            _REFUSED[each] = "with a ShardedEmbedding", "call state_dict() and load_state_dict() on all ranks"
        elif sharded and each is not wrapper and each is not model:
            _REFUSED[each] = "within a sharded model", "give the whole model, and take its names from the state dict"
    _MODELS[wrapper] = _MODELS[model] = sharded
    _OPTIMIZERS[optimizer] = weakref.ref(divided)
    when_imported(_FUNCTIONS, _replace_parts)


def _replace_parts(functions: types.ModuleType) -> None:
    for name, ours in _OURS.items():
        theirs = getattr(functions, name)
        if getattr(theirs, "func", None) is not ours:
            setattr(functions, name, functools.partial(ours, theirs))


def _get_model(theirs: Callable[..., Any], model: torch.nn.Module, info: Any) -> Any:
    """Return complete parameters, on the ranks that torch documents."""
    name = "get_state_dict()" if info.handle_optim else "get_model_state_dict()"
    if info.handle_model:
        _check_served(name, model)
    if not info.handle_model or not _MODELS.get(model):
        return theirs(model, info)
    if not info.full_state_dict:
        raise _no_shards(name)
    return _shared(theirs(model, info), info)


def _get_optimizers(theirs: Callable[..., Any], model: torch.nn.Module, optimizers: Any, info: Any) -> Any:
    """Return complete optimizer states, on the ranks that torch documents."""
    ours = _known(optimizers)
    if not info.handle_optim or not ours:
        return theirs(model, optimizers, info)
    if not info.full_state_dict and any(isinstance(each, OptimizerPart) for each in ours):
        raise _no_shards("get_state_dict()" if info.handle_model else "get_optimizer_state_dict()")
    divided = any(each.divided for each in ours)
    found = theirs(model, optimizers, info)
    return _shared(found, info) if divided else found


def _init_optimizer(theirs: Callable[[Any], None], optimizer: torch.optim.Optimizer) -> None:
    """Create initial states as torch does, unless the optimizer's states are not in ``optimizer.state``."""
    (divided,) = _known((optimizer,)) or (None,)
    if divided is None or not (isinstance(divided, OptimizerPart) or divided.divided):
        theirs(optimizer)


def _load_model(theirs: Callable[..., Any], model: torch.nn.Module, state_dict: Any, info: Any) -> Any:
    """Load complete parameters, from rank 0 with ``broadcast_from_rank0``."""
    name = "set_state_dict()" if info.handle_optim else "set_model_state_dict()"
    if info.handle_model:
        _check_served(name, model)
    if not info.handle_model or model not in _MODELS:
        return theirs(model, state_dict, info)
    if info.broadcast_from_rank0:
        state_dict = _of_rank_zero(state_dict)
    elif _MODELS[model] and not state_dict:
        raise _nothing(name)
    return theirs(model, state_dict, _as_given(info))


def _load_optimizers(
    theirs: Callable[..., Any], model: torch.nn.Module, optimizers: Any, state_dict: Any, info: Any
) -> Any:
    """Load complete optimizer states, from rank 0 with ``broadcast_from_rank0``."""
    ours = _known(optimizers)
    if not info.handle_optim or not ours:
        return theirs(model, optimizers, state_dict, info)
    name = "set_state_dict()" if info.handle_model else "set_optimizer_state_dict()"
    divided = any(isinstance(each, OptimizerPart) or each.divided for each in ours)
    if info.broadcast_from_rank0:
        state_dict = _of_rank_zero(state_dict)
    elif divided and not state_dict:
        raise _nothing(name)
    if not state_dict and not current_session().synced:
        return None  # rank 0 has loaded it, and shares what it has with all when the first epoch begins
    if divided and state_dict and "state" not in state_dict:
        raise RuntimeError(
            f"{name} cannot load a flat state dict into an optimizer whose state lies with several ranks: save it "
            "without flatten_optimizer_state_dict=True"
        )
    return theirs(model, optimizers, state_dict, _as_given(info))


def _known(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    found = [_OPTIMIZERS[each]() for each in optimizers if each in _OPTIMIZERS]
    return [each for each in found if each is not None]


def _as_given(info: Any) -> Any:
    """Return options for loading complete tensors that each rank already has.

    Torch would otherwise divide them over its own mesh.
    """
    return dataclasses.replace(info, full_state_dict=False, broadcast_from_rank0=False)


def _shared(state: Any, info: Any) -> Any:
    """Share rank 0's state: with ``full_state_dict`` and ``cpu_offload``, only rank 0 keeps it.

    Raises CommunicationFailedError if rank 0, the only holder of the complete state, is lost.
    """
    first = current_session().rank == 0
    if info.full_state_dict and info.cpu_offload:
        return state if first else {}
    whole, found = broadcast((first, state if first else {}))
    if not whole:
        raise CommunicationFailedError("rank 0, which had the whole state, was lost before it had sent it")
    return found


def _of_rank_zero(state_dict: Any) -> Any:
    """Return the state given to rank 0, in a dict that torch may modify."""
    found = broadcast(state_dict if current_session().rank == 0 else {})
    return state_dict if current_session().world_size == 1 else found


def _check_served(name: str, model: torch.nn.Module) -> None:
    """Raise RuntimeError for a module if torch would find only part of its state, or none."""
    if model in _REFUSED:
        which, way_out = _REFUSED[model]
        raise RuntimeError(f"{name} of a {type(model).__name__} {which} is not supported: {way_out}")


def _no_shards(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} of a sharded model must be given options=StateDictOptions(full_state_dict=True), with which all ranks "
        "get whole tensors, or full_state_dict=True and cpu_offload=True, with which rank 0 gets them and the others "
        "an empty dict; all ranks must call it. Shards of a group that changes are not given: automatic checkpoints "
        "write them"
    )


def _nothing(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} must be given whole tensors on every rank, but got an empty state dict on rank "
        f"{current_session().rank}: where only rank 0 has them, give options=StateDictOptions(full_state_dict=True, "
        "broadcast_from_rank0=True)"
    )


_OURS: dict[str, Callable[..., Any]] = {
    "_get_model_state_dict": _get_model,
    "_get_optim_state_dict": _get_optimizers,
    "_init_optim_state": _init_optimizer,
    "_load_model_state_dict": _load_model,
    "_load_optim_state_dict": _load_optimizers,
}
