"""SHELL over torch.distributed: in every train function, the default process group is the job's current group."""

from __future__ import annotations

import functools
import os
import sys
from collections import UserDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from elastic_ray.communication.ended_work import BACKEND
from elastic_ray.run.current import session_of_thread
from elastic_ray.session.torch_group import DefaultGroup, SoloGroup, made_group

if TYPE_CHECKING:
    from elastic_ray.communication.unit_group import UnitGroup


class _AllRanks(UserDict[int, int]):
    """Mapping of group ranks to equal world ranks, for the current group."""

    def __init__(self) -> None: ...

    @property
    def data(self) -> dict[int, int]:  # type: ignore[override]
        return {rank: rank for rank in range(dist.get_world_size())}


class _OwnRank(_AllRanks):
    """Mapping of this worker's current rank to rank 0, for a group that consists of this worker alone."""

    @property
    def data(self) -> dict[int, int]:  # type: ignore[override]
        return {dist.get_rank(): 0}


def _create(store: Any, rank: int, size: int, timeout: Any) -> DefaultGroup:
    """Return a new group, which torch names later."""
    return made_group("")


def is_ours() -> bool:
    """True if torch's default process group in this process is the job's elastic group."""
    return bool(_UNITS) or isinstance(dist.GroupMember.WORLD, DefaultGroup)


def install() -> None:
    """Initialise ``torch.distributed`` with the current group, unless the program has already initialised it."""
    if not dist.is_available() or dist.is_initialized():
        return
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
    if not _ORIGINALS:
        _accept(dist)
    hook = sys.excepthook
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "0")
    _ORIGINALS["init_process_group"](BACKEND, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    sys.excepthook = hook  # torch's would name this process rank 0
    _update_ranks()


def install_unit(unit: UnitGroup) -> None:
    """Initialise ``torch.distributed`` with a unit's fixed group of workers, which elastic collectives do not use."""
    if not _ORIGINALS:
        _accept(dist)
    if dist.is_initialized():
        _ORIGINALS["destroy_process_group"]()
    hook = sys.excepthook
    unit.open(_ORIGINALS["init_process_group"])
    sys.excepthook = hook
    _UNITS.append(unit)


def uninstall_unit(unit: UnitGroup) -> None:
    """Destroy the default process group that :func:`install_unit` made, after the unit's run."""
    if unit in _UNITS:
        _UNITS.remove(unit)
        _ORIGINALS["destroy_process_group"]()
    unit.close()


def _update_ranks() -> None:
    """Patch torch's rank tables so that our groups have the ranks of the current group."""
    world: Any = dist.distributed_c10d._world
    for group in world.pg_group_ranks:
        if isinstance(group, DefaultGroup):
            world.pg_group_ranks[group] = _OwnRank() if isinstance(group, SoloGroup) else _AllRanks()


_ORIGINALS: dict[str, Callable[..., Any]] = {}
_UNITS: list[UnitGroup] = []  # the one whose group the default group is


def _accept(module: Any) -> None:
    """Patch torch so that initialising or destroying the default group does nothing if that group is the job's."""
    core: Any = module.distributed_c10d

    def init_process_group(*args: Any, **options: Any) -> None:
        """Do nothing in a job; in a standalone process, replace our group if several processes are requested."""
        session = session_of_thread()
        others = session is None or (not session.elastic and session.group.rank_info.world_size == 1)
        asks = any(options.get(each) for each in ("store", "world_size")) or int(os.environ.get("WORLD_SIZE", "1")) > 1
        if is_ours() and others and asks:
            _ORIGINALS["destroy_process_group"]()
        if not is_ours():
            _ORIGINALS["init_process_group"](*args, **options)

    def destroy_process_group(group: Any = None) -> None:
        """Destroy the group unless it is ours."""
        ours = group is None or group is dist.GroupMember.WORLD or isinstance(group, DefaultGroup)
        if not is_ours() or not ours:
            _ORIGINALS["destroy_process_group"](group)

    def new_group(*args: Any, **options: Any) -> Any:
        """Return a group made by torch, with the current group's ranks."""
        made = _ORIGINALS["new_group"](*args, **options)
        if is_ours():
            _update_ranks()
        return made

    for ours in (init_process_group, destroy_process_group, new_group):
        _ORIGINALS[ours.__name__] = theirs = getattr(core, ours.__name__)
        for each in (core, module):
            setattr(each, ours.__name__, functools.wraps(theirs)(ours))
