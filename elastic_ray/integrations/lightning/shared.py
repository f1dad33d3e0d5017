"""Collectives, loaders and ranks shared by the Lightning and Fabric strategies."""

from __future__ import annotations

import logging
from pathlib import Path, PurePath
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities import rank_zero as fabric_rank_zero
from torch.distributed import ReduceOp

import elastic_ray as er
from elastic_ray.integrations.batch_options import BatchOptions
from elastic_ray.loop.api import current_session, get_context
from elastic_ray.loop.collectives import ReduceOp as ReduceOperation
from elastic_ray.run.registry import HookPoint

logger = logging.getLogger(__name__)

_OPS: dict[str, ReduceOperation] = {"avg": "mean", "mean": "mean", "sum": "sum", "min": "min", "max": "max"}
_TORCH_OPS: dict[Any, ReduceOperation] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}


def reduced(value: Any, group: Any, op: Any) -> Any:
    """Return a tensor reduced over workers as Lightning's ``reduce`` does; return any other value unchanged."""
    _check_group(group)
    if not isinstance(value, torch.Tensor):
        return value
    name: ReduceOperation | None = "sum"
    if op is not None:
        name = _OPS.get(op.lower()) if isinstance(op, str) else _TORCH_OPS.get(op)
    if name is None:
        raise ValueError(f"reduce_op must be one of {', '.join(_OPS)}, or torch's ReduceOp of that name, but got {op}")
    return er.all_reduce(value, name)


def adaptive(given: Any, options: BatchOptions) -> er.AdaptiveDataLoader:
    """Return the user's loader, converted so that its batches are global and divided between all workers."""
    loader = options.shared(given)
    options.apply(loader)
    if loader is not given and get_context().get_world_rank() == 0:
        logger.info(
            "batches of %s samples are shared by all workers, however many there are; Lightning's own strategies give "
            "each worker as many",
            loader.batch_size,
        )
    return loader


class OneDevice:
    """Base class of both strategies: one device per worker, no process group, and the job's collectives."""

    _parallel_devices: list[torch.device] | None
    _gone = False  # True if this worker is in no collective any more

    @property
    def _shares(self) -> bool:
        """True while each worker gets a share of the samples."""
        return True

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return equal-shaped tensors from all workers, stacked; in an evaluation, stack only this worker's tensor."""
        if not self._shares:
            return tensor[None]
        _check_group(group)
        if sync_grads:
            raise NotImplementedError(
                "all_gather(sync_grads=True) is not supported under elastic-ray: a loss over samples of several "
                "workers would change with their number. Make the samples that belong together one item of the dataset"
            )
        return torch.stack(er.all_gather(tensor))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # Lightning's name
        """True if all workers decide True or, with ``all=False``, if any worker does."""
        return decision if self._gone else bool(er.all_reduce(int(decision), "min" if all else "max"))

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers, as ``elastic_ray.barrier`` does."""
        if not self._gone:
            er.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s ``obj`` on all ranks; accepts tensors, plain values and paths, and never pickles."""
        if self._gone:
            return obj
        return Path(er.broadcast(str(obj), src)) if isinstance(obj, PurePath) else er.broadcast(obj, src)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """List that contains the worker's device; setting several devices raises ValueError."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            raise ValueError(
                f"devices must be 1 (or 'auto' where a worker has one), but this is {len(devices)}: under elastic-ray "
                "each worker trains on one device, and ScalingConfig(num_workers=) says how many workers there are"
            )
        self._parallel_devices = devices

    @property
    def root_device(self) -> torch.device:
        """Device of this worker."""
        return self._parallel_devices[0] if self._parallel_devices else torch.device("cpu")

    def setup_environment(self) -> None:
        """Set up the device, and keep the rank in Lightning's ``rank_zero_only`` up to date as the group changes."""
        theirs: Any = super()
        theirs.setup_environment()
        set_rank()
        current_session().registry.add_hook(HookPoint.SHAPE_CHANGED, set_rank)


def set_rank() -> None:
    """Set this worker's current rank in Lightning's ``rank_zero_only``."""
    theirs: Any = fabric_rank_zero.rank_zero_only
    theirs.rank = get_context().get_world_rank()


def accumulating() -> bool:
    """True if the current micro-batch is not the last of its step, so that no optimizer step follows it."""
    return current_session().ledger.accumulating


def _check_group(group: Any) -> None:
    if group is not None and group is not torch.distributed.group.WORLD:
        raise ValueError("custom process groups are not supported under elastic-ray: the job's workers change")


class ElasticRayEnvironment(ClusterEnvironment):
    """Lightning environment that reports the group's current ranks and size."""

    @property
    def creates_processes_externally(self) -> bool:
        """True, because the job starts the processes."""
        return True

    @property
    def main_address(self) -> str:
        """Empty address, unused because there is no default process group."""
        return ""

    @property
    def main_port(self) -> int:
        """Port 0, unused because there is no default process group."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return False, because only the strategies select this environment."""
        return False

    def world_size(self) -> int:
        """Return the number of workers in the current group."""
        return get_context().get_world_size()

    def set_world_size(self, size: int) -> None:
        """Do nothing, because the job sets the size."""

    def global_rank(self) -> int:
        """Return this worker's rank."""
        return get_context().get_world_rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, because the job sets the rank."""

    def local_rank(self) -> int:
        """Return this worker's rank on its node."""
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        """Return the index of this worker's node in the job."""
        return get_context().get_node_rank()
