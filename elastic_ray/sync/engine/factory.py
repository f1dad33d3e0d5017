"""Creation of the buckets and operations that a plan specifies (torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.operations.bucket_operation import BucketOperation, GradientBucket, WireForm
from elastic_ray.sync.operations.buckets import AllReduceOperation, Bucket
from elastic_ray.sync.operations.int8 import Int8Compression
from elastic_ray.sync.operations.low_rank import LowRankCompression
from elastic_ray.sync.operations.owing import CompressedOperation
from elastic_ray.sync.operations.partitioned_reduce import (
    CastReduceOperation,
    OwnerOperation,
    PartitionedReduceOperation,
)
from elastic_ray.sync.operations.topologies import RoutedReduceOperation
from elastic_ray.sync.plan import BucketPlan
from elastic_ray.sync.sliced_gradients.operation import SlicedBucket, SlicedOperation
from elastic_ray.sync.spec import Owner, Reduce, Rows
from elastic_ray.sync.tables.row_bucket import RowBucket
from elastic_ray.sync.tables.rows_operation import RowsOperation
from elastic_ray.sync.tables.table_gradient import TableGradient

if TYPE_CHECKING:
    from elastic_ray.sync.engine.joint_optimizer import JointTiles
    from elastic_ray.sync.optimizer_tiles.tiled_optimizer import TiledOptimizer


def carries_tail(plan: BucketPlan, dtype: torch.dtype) -> bool:
    """True if control values can travel with the bucket's reduction, which must preserve them exactly."""
    return is_plain(plan) and dtype.to_real() in (torch.float32, torch.float64)


def is_plain(plan: BucketPlan) -> bool:
    """True if the bucket itself is all-reduced and nothing else uses its memory."""
    return isinstance(plan.sync, Reduce) and plan.sync.wire.exact and plan.sync.parts == 1


def make_bucket(
    plan: BucketPlan, index: int, params: Sequence[torch.nn.Parameter], tail: int, owners: TiledOptimizer | JointTiles
) -> GradientBucket:
    """Return the bucket of a plan, with ``tail`` extra elements; ``owners`` knows which ranks own optimizer state."""
    if isinstance(plan.sync, Rows):
        return RowBucket(index, plan.group, TableGradient(params[0], plan.sync.update))
    if isinstance(plan.sync, Owner) and plan.sync.owns_tiles:
        return SlicedBucket(index, plan.group, params, owners)
    return Bucket(index, plan.group, params, tail, shows=is_plain(plan))


def make_operation(plan: BucketPlan) -> BucketOperation:
    """Return the operation that executes a bucket's plan. Raises StrategyError if no such operation exists."""
    sync = plan.sync
    if isinstance(sync, Reduce):
        if sync.topology != "native" and len(plan.nodes) > 1:
            return RoutedReduceOperation(sync.topology, plan.nodes)
        return _reduction(sync, plan.params)
    if isinstance(sync, Owner) and sync.owns_tiles:
        return SlicedOperation(sync.copies, WireForm(sync.wire.dtype))
    if isinstance(sync, Owner):
        return OwnerOperation(plan.owner, WireForm(sync.wire.dtype))
    if isinstance(sync, Rows):
        return RowsOperation()
    raise StrategyError(f"there is no operation for {sync}")


def _reduction(sync: Reduce, places: Sequence[int]) -> BucketOperation:
    """Return the operation of an all-reduce: plain, partitioned or compressed."""
    wire = sync.wire
    if wire.compresses:
        compression = LowRankCompression(wire.rank) if wire.rank else Int8Compression()
        return CompressedOperation(compression, places, feeds_back=wire.error_feedback)
    if sync.parts > 1:
        return PartitionedReduceOperation(sync.parts, sync.axis, sync.seed, places, WireForm(wire.dtype))
    return AllReduceOperation() if wire.exact else CastReduceOperation(WireForm(wire.dtype))
