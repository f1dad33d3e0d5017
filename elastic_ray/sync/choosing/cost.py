"""How long a step takes under a plan: compute, communication, and what a CPU adds to it (pure).

T = compute + sum over buckets of (collectives by the link table + merging and copying). Over gloo nothing is gained
by overlap: what the network does not take, the CPU does; measured, the sum is nearest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from elastic_ray.sync.choosing.links import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_BF16,
    ALL_REDUCE_PARTS,
    BROADCAST,
    OPERATIONS,
    REDUCE,
    LinkSample,
    LinkTable,
)
from elastic_ray.sync.plan import BucketPlan, SyncPlan
from elastic_ray.sync.profile import ModelProfile, ParamInfo, Topology
from elastic_ray.sync.spec import Average, Owner, Reduce, Rows, Wire

_ID_BYTES = 8  # of a row's number on the wire
_COUNT_BYTES = 16
UNKNOWN_ROWS = 0.1
"""Share of a table's rows that a rank is taken to touch in a step, before any was seen."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CpuRates:
    """What a CPU needs for a byte of gradients [s/byte]. Measured on one core of a 2 GHz server, float32.

    Attributes:
        merge: rows of all ranks sorted and added up, for a byte gathered.
        copy: into a bucket and back.
        update: a dense gradient of a table zeroed and applied, where its rows would do.
        backward: a dense gradient of a table made; where rows travel, autograd makes rows.
        cast: to 16 bits and back.
        low_rank: PowerSGD's products and its residual.
    """

    merge: float = 3.0e-9
    copy: float = 2.0e-10
    update: float = 2.0e-10
    backward: float = 4.0e-10
    cast: float = 8.0e-10
    low_rank: float = 1.0e-9


RATES = CpuRates()
# Where bytes are asked for, and not times.
_ANY = LinkTable(samples=tuple(LinkSample(operation=each, nbytes=1, seconds=1.0) for each in OPERATIONS))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A step's time [s].

    Attributes:
        compute_s: forward, backward and update.
        communication_s: collectives, one after the other.
        cpu_s: merging, copying, compressing.
        nbytes: that each rank gives to collectives.
    """

    compute_s: float = 0.0
    communication_s: float = 0.0
    cpu_s: float = 0.0
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute_s + self.communication_s + self.cpu_s

    @property
    def sync_s(self) -> float:
        """What synchronisation adds to compute."""
        return self.communication_s + self.cpu_s


def predict(
    plan: SyncPlan, profile: ModelProfile, links: LinkTable, topology: Topology, rates: CpuRates = RATES
) -> StepCost:
    """A step's time under a plan.

    Args:
        plan: of this model and group.
        profile: ``compute_s`` None counts as 0: then only differences between plans mean something.
        links: of this group; not used by a group of one.
        topology: the group.
        rates: of its CPUs.

    Raises:
        KeyError: an operation that the plan needs was not measured.
    """
    costs = [bucket_cost(bucket, profile.params, links, topology.world_size, rates) for bucket in plan.buckets]
    average = plan.strategy.average
    if average is not None:
        costs = [_average_cost(average, profile.params, links, topology.world_size, rates)]
    return StepCost(
        compute_s=profile.compute_s or 0.0,
        communication_s=sum(cost.communication_s for cost in costs),
        cpu_s=sum(cost.cpu_s for cost in costs),
        nbytes=sum(cost.nbytes for cost in costs),
    )


def sent_bytes(plan: SyncPlan, buckets: Sequence[BucketPlan], params: Sequence[ParamInfo], world_size: int) -> int:
    """What each rank gives to collectives in a step for some buckets of a plan, in the form in which it travels.

    Of tables whose rows travel it is a guess, until rows were seen; of averaged models a step's share of a period.
    """
    if plan.strategy.average is not None:
        mine = [params[i] for bucket in buckets for i in bucket.params]
        return _average_cost(plan.strategy.average, mine, _ANY, world_size, RATES).nbytes
    return sum(bucket_cost(bucket, params, _ANY, world_size).nbytes for bucket in buckets)


def sync_seconds(
    plan: SyncPlan, buckets: Sequence[BucketPlan], params: Sequence[ParamInfo], links: LinkTable, world_size: int
) -> float | None:
    """What some buckets of a plan add to a step [s]; None where an operation that they need was not measured."""
    try:
        if plan.strategy.average is not None:
            mine = [params[i] for bucket in buckets for i in bucket.params]
            return _average_cost(plan.strategy.average, mine, links, world_size, RATES).sync_s
        return sum(bucket_cost(bucket, params, links, world_size).sync_s for bucket in buckets)
    except KeyError:
        return None


def bucket_cost(
    bucket: BucketPlan, params: Sequence[ParamInfo], links: LinkTable, world_size: int, rates: CpuRates = RATES
) -> StepCost:
    """What one bucket adds to a step; nothing but a table's dense backward and update in a group of one.

    Raises:
        KeyError: an operation that it needs was not measured.
    """
    mine = [params[i] for i in bucket.params]
    tables = sum(param.nbytes for param in mine if param.table)
    sync = bucket.sync
    if isinstance(sync, Rows):
        cost, gives_sparse = _rows_cost(mine[0], links, world_size, rates), _gives_sparse(mine[0], sync)
        return cost if gives_sparse else dataclasses.replace(cost, cpu_s=cost.cpu_s + tables * rates.update)
    dense = tables * (rates.update + rates.backward)
    if world_size == 1:
        return StepCost(cpu_s=dense)
    if isinstance(sync, Owner) and sync.owns_tiles:
        cost = _sliced_cost(mine, sync, links, world_size, rates)
    elif isinstance(sync, Owner):
        cost = _owner_cost(mine, sync.wire, links, rates)
    else:
        cost = _reduce_cost(mine, sync, links, world_size, rates)
    return dataclasses.replace(cost, cpu_s=cost.cpu_s + dense)


def _gives_sparse(param: ParamInfo, sync: Rows) -> bool:
    return sync.update == "sparse" or (sync.update == "auto" and param.sparse)


def touched_rows(param: ParamInfo) -> int:
    """Distinct rows of a table that a rank touches in a step, a guess where none was seen."""
    guess = max(1, math.ceil(param.shape[0] * UNKNOWN_ROWS))
    return min(param.rows if param.rows is not None else guess, param.shape[0])


def _rows_cost(table: ParamInfo, links: LinkTable, world_size: int, rates: CpuRates) -> StepCost:
    """Counts, then rows and their numbers, padded to the longest, gathered everywhere and merged; or all of it."""
    if world_size == 1:
        return StepCost()
    row, touched = table.nbytes // table.shape[0], touched_rows(table)
    mine = touched * (row + _ID_BYTES)
    gathered = mine * world_size
    seconds = links.seconds(ALL_GATHER, _COUNT_BYTES * world_size)
    if touched * world_size > table.shape[0]:  # then the whole table is reduced
        seconds += links.seconds(ALL_REDUCE, table.nbytes)
        return StepCost(communication_s=seconds, cpu_s=table.nbytes * rates.copy, nbytes=table.nbytes)
    seconds += links.seconds(ALL_GATHER, gathered)
    return StepCost(communication_s=seconds, cpu_s=gathered * rates.merge, nbytes=mine)


def _reduce_cost(
    params: Sequence[ParamInfo], sync: Reduce, links: LinkTable, world_size: int, rates: CpuRates
) -> StepCost:
    """One flat bucket, as its wire has it."""
    nbytes, wire = sum(param.nbytes for param in params), sync.wire
    if wire.rank:
        return _low_rank_cost(params, wire.rank, links, rates)
    if wire.dtype == "int8":  # a byte an element from everybody to everybody, and its scale
        sent = sum(param.numel for param in params)
        seconds = links.seconds(ALL_GATHER, sent * world_size)
        return StepCost(communication_s=seconds, cpu_s=nbytes * rates.cast * world_size, nbytes=sent)
    copy = nbytes * rates.copy
    if not wire.exact:
        sent = sum(2 * param.numel for param in params)
        seconds = links.seconds(ALL_REDUCE_BF16 if links.knows(ALL_REDUCE_BF16) else ALL_REDUCE, sent)
        return StepCost(communication_s=seconds, cpu_s=copy + nbytes * rates.cast, nbytes=sent)
    operation = ALL_REDUCE_PARTS if sync.parts > 1 and links.knows(ALL_REDUCE_PARTS) else ALL_REDUCE
    packed = copy if sync.parts == 1 else 2 * copy
    return StepCost(communication_s=links.seconds(operation, nbytes), cpu_s=packed, nbytes=nbytes)


def _low_rank_cost(params: Sequence[ParamInfo], rank: int, links: LinkTable, rates: CpuRates) -> StepCost:
    """Two all-reduces of factors, P (rows x rank) and Q (columns x rank); vectors travel whole with the first."""
    first = second = 0
    for param in params:
        rows, columns = (param.shape[0], param.numel // param.shape[0]) if len(param.shape) > 1 else (param.numel, 0)
        if columns and (rows + columns) * rank < param.numel:
            first, second = first + rows * rank * param.itemsize, second + columns * rank * param.itemsize
        else:
            first += param.nbytes
    seconds = links.seconds(ALL_REDUCE, first) + links.seconds(ALL_REDUCE, second)
    cpu_s = sum(param.nbytes for param in params) * rates.low_rank
    return StepCost(communication_s=seconds, cpu_s=cpu_s, nbytes=first + second)


def _owner_cost(params: Sequence[ParamInfo], wire: Wire, links: LinkTable, rates: CpuRates) -> StepCost:
    """To the owner, and the mean from there."""
    nbytes = sum(param.nbytes for param in params)
    sent = nbytes if wire.exact else sum(2 * param.numel for param in params)
    seconds = links.seconds(REDUCE, sent) + links.seconds(BROADCAST, sent)
    cpu_s = nbytes * (rates.copy if wire.exact else rates.copy + rates.cast)
    return StepCost(communication_s=seconds, cpu_s=cpu_s, nbytes=sent)


def _sliced_cost(
    params: Sequence[ParamInfo], owner: Owner, links: LinkTable, world_size: int, rates: CpuRates
) -> StepCost:
    """To first owners, half of an all-reduce's way, and each share from there to the other owners."""
    nbytes = sum(param.nbytes for param in params)
    sent = nbytes if owner.wire.exact else sum(2 * param.numel for param in params)
    passed = nbytes * (owner.copies - 1) // world_size
    seconds = links.seconds(ALL_REDUCE, sent / 2) + (links.seconds(ALL_REDUCE, passed / 2) if passed else 0.0)
    cpu_s = nbytes * (2 * rates.copy if owner.wire.exact else 2 * rates.copy + rates.cast)
    return StepCost(communication_s=seconds, cpu_s=cpu_s, nbytes=sent + passed)


def _average_cost(
    average: Average, params: Sequence[ParamInfo], links: LinkTable, world_size: int, rates: CpuRates
) -> StepCost:
    """The whole model every ``period`` steps, and the vote of each step by itself."""
    if world_size == 1:
        return StepCost()
    nbytes = sum(param.nbytes for param in params)
    among = 2 / world_size if average.algorithm == "pair" else 1.0
    seconds = links.seconds(ALL_REDUCE, nbytes * among) / average.period + links.seconds(ALL_REDUCE, 256)
    return StepCost(
        communication_s=seconds, cpu_s=nbytes * rates.copy / average.period, nbytes=nbytes // average.period
    )
