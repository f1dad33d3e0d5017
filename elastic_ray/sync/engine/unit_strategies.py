"""Checks of which strategies a model can use that is divided among the workers of a unit (torch)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.state.layout import digest
from elastic_ray.sync.plan import BucketPlan, ParamInfo, SyncPlan
from elastic_ray.sync.spec import Owner, Reduce

if TYPE_CHECKING:
    from elastic_ray.communication.unit_group import UnitGroup


def why_not_in_units(plan: SyncPlan, params: Sequence[ParamInfo], held: Set[str]) -> str:
    """Return why a model divided within a unit cannot use ``plan``, with a suggestion; empty if it can use it.

    Args:
        params: Parameters of the model, to which the plan refers.
        held: Names of parameters that several workers of the unit hold and that must stay equal on them.
    """
    average = plan.strategy.average
    if average is not None and average.give_back:
        return "the workers of a unit make the same steps: leave give_back=True out"
    if average is not None and average.algorithm == "pair":
        return "each worker would pull its part from another unit at another time: use 'local_sgd' or 'sma'"
    if plan.tiles is not None:
        return "divide the optimizer state within the unit (torch's fully_shard), or leave strategy= out"
    mixed = list[str]()
    for bucket in plan.buckets:
        if not isinstance(bucket.sync, Reduce | Owner):
            return "rows are not exchanged by parts: use layers without sparse=True, or leave strategy= out"
        if isinstance(bucket.sync, Reduce) and bucket.sync.wire.compresses:
            mixed += _mixed(bucket, params, held)
    if not mixed:
        return ""
    return (
        f"several workers of the unit hold {', '.join(mixed[:3])}, and would round it differently, so that it drifts "
        "apart: use 'bf16' or 'fp16', or 'powersgd' where these are vectors, which it does not compress"
    )


def _mixed(bucket: BucketPlan, params: Sequence[ParamInfo], held: Set[str]) -> list[str]:
    """Return the names of parameters in ``held`` whose compression depends on others in the bucket."""
    exact = isinstance(bucket.sync, Reduce) and bool(bucket.sync.wire.rank)  # for vectors
    own = [params[i] for i in bucket.params]
    return [p.name for p in own if not held.isdisjoint(p.names) and not (exact and len(p.shape) < 2)]


def held_by_several(unit: UnitGroup, module: torch.nn.Module) -> frozenset[str]:
    """Return the names of parameters of which several workers of a unit hold a whole copy; a collective of the unit."""
    names = [name for name, p in module.named_parameters() if not _is_divided(p, unit.place.size)]
    most = round(max(row[0] for row in unit.gather([float(len(names))])))
    rows = unit.gather([*(float(digest(name)) for name in names), *[0.0] * (most - len(names))])
    elsewhere = {number for at, row in enumerate(rows) if at != unit.place.position for number in row}
    return frozenset(name for name in names if float(digest(name)) in elsewhere)


def _is_divided(param: Any, workers: int) -> bool:
    """True if each of the unit's workers holds its own elements of the parameter."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None or mesh.size() != workers:
        return False
    return all(each.is_shard() or size == 1 for each, size in zip(param.placements, mesh.shape, strict=True))
