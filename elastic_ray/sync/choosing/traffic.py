"""Bytes that a plan's collectives are given in a step, and that they carry (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic_ray.sync.plan import BucketPlan, SyncPlan
from elastic_ray.sync.profile import ParamInfo
from elastic_ray.sync.spec import Owner, Reduce, Rows

_ID_BYTES = 8  # of a row's number on the wire
_UNKNOWN_ROWS = 0.1  # share of a table's rows that a rank is taken to touch in a step, before any was seen


def sent_bytes(plan: SyncPlan, buckets: Sequence[BucketPlan], params: Sequence[ParamInfo], world_size: int) -> int:
    """Bytes that each rank gives to collectives in a step for some buckets of a plan, in the form in which they travel.

    Of tables whose rows travel it is a guess, until rows were seen; of averaged models a step's share of a period.
    """
    average = plan.strategy.average
    if world_size == 1:
        return 0
    if average is not None:
        return sum(params[i].nbytes for bucket in buckets for i in bucket.params) // average.period
    return sum(_bucket_bytes(bucket, params, world_size)[0] for bucket in buckets)


def traffic(plan: SyncPlan, params: Sequence[ParamInfo], world_size: int) -> int:
    """Bytes that a rank's link carries in a step: by how much plans differ, not how long they take.

    With W ranks, an all-reduce of n bytes counts 2 n, as does a reduction to one rank, its broadcast ceil(log2 W) n,
    and an all-gather of n bytes of each rank W n.
    """
    return 0 if world_size == 1 else sum(_bucket_bytes(each, params, world_size)[1] for each in plan.buckets)


def collectives(plan: SyncPlan) -> int:
    """Number of collectives of a step."""
    return sum(each.sync.parts if isinstance(each.sync, Reduce) else 2 for each in plan.buckets)


def _bucket_bytes(bucket: BucketPlan, params: Sequence[ParamInfo], world_size: int) -> tuple[int, int]:
    """Bytes of one bucket that a rank sends, and those that its link carries."""
    mine, sync = [params[i] for i in bucket.params], bucket.sync
    nbytes, numel = sum(param.nbytes for param in mine), sum(param.numel for param in mine)
    if isinstance(sync, Rows):
        table = mine[0]
        touched = _touched_rows(table)
        if touched * world_size > table.shape[0]:  # then the whole table is reduced
            return nbytes, 2 * nbytes
        sent = touched * (nbytes // table.shape[0] + _ID_BYTES)
        return sent, sent * world_size
    sent = nbytes if sync.wire.exact else 2 * numel
    if isinstance(sync, Owner):
        if sync.owns_tiles:  # to first owners, half of an all-reduce's way, and each share from there to the others
            passed = nbytes * (sync.copies - 1) // world_size
            return sent + passed, sent + passed
        return sent, (2 + math.ceil(math.log2(world_size))) * sent
    if sync.wire.rank:
        sent = sum(_low_rank_bytes(param, sync.wire.rank) for param in mine)
    elif sync.wire.dtype == "int8":  # a byte an element from everybody to everybody
        return numel, numel * world_size
    return sent, 2 * sent


def _touched_rows(table: ParamInfo) -> int:
    """Distinct rows of a table that a rank touches in a step, a guess where none was seen."""
    guess = max(1, math.ceil(table.shape[0] * _UNKNOWN_ROWS))
    return min(table.rows if table.rows is not None else guess, table.shape[0])


def _low_rank_bytes(param: ParamInfo, rank: int) -> int:
    """PowerSGD's factors P (rows x rank) and Q (columns x rank), or the whole where these are no smaller."""
    if len(param.shape) < 2:
        return param.nbytes
    rows = param.shape[0]
    factors = (rows + param.numel // rows) * rank
    return min(factors, param.numel) * param.itemsize
