"""The bucket and the operation that a plan asks for (torch)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.operations.all_reduce import AllReduceOperation
from elastic_ray.sync.operations.buckets import build_bucket
from elastic_ray.sync.operations.protocol import BucketOperation, GradientBucket
from elastic_ray.sync.operations.row_bucket import RowBucket
from elastic_ray.sync.operations.rows import RowsOperation
from elastic_ray.sync.operations.table_gradient import TableGradient
from elastic_ray.sync.plan import BucketPlan
from elastic_ray.sync.spec import Reduce, Rows


def carries_tail(plan: BucketPlan, dtype: torch.dtype) -> bool:
    """Whether control values can ride on the bucket's reduction: they must arrive exactly."""
    plain = isinstance(plan.sync, Reduce) and plan.sync.wire.exact and plan.sync.parts == 1
    return plain and dtype in (torch.float32, torch.float64)


def make_bucket(plan: BucketPlan, index: int, params: Sequence[torch.nn.Parameter], tail: int) -> GradientBucket:
    """The bucket of a plan, with ``tail`` extra elements."""
    if isinstance(plan.sync, Rows):
        return RowBucket(index, plan.group, TableGradient(params[0], plan.sync.update))
    return build_bucket(index, plan.group, params, tail)


def make_operation(plan: BucketPlan) -> BucketOperation:
    """What is done with it.

    Raises:
        StrategyError: there is no such operation.
    """
    if isinstance(plan.sync, Rows):
        return RowsOperation()
    if carries_tail(plan, torch.float32):
        return AllReduceOperation()
    raise StrategyError(f"there is no operation for {plan.sync}")
