"""Strategies that may be the fastest for a model, in the order they are tried (pure).

There are a few dozen candidates: every combination of one method for each class of parameters. Trials are real training
steps, so candidates that send the fewest bytes in the fewest collectives are tried first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from elastic_ray.sync.builders import exactly
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.plan import BucketPlan, ModelProfile, ParamInfo, SyncPlan, Topology, lower
from elastic_ray.sync.spec import Owner, Reduce, Rows, Rule, Strategy, Sync, Wire

_ID_BYTES = 8  # of a row's number on the wire
_UNKNOWN_ROWS = 0.1  # share of a table's rows that a rank is taken to touch in a step, before any was seen


def sent_bytes(plan: SyncPlan, buckets: Sequence[BucketPlan], params: Sequence[ParamInfo], world_size: int) -> int:
    """Return the bytes, after compression, that each rank sends in one step for the given buckets of the plan.

    For tables that send only their touched rows, the result is an estimate until those rows have been counted. For
    averaged models, it is the traffic in one period divided by the number of steps.
    """
    average = plan.strategy.average
    if world_size == 1:
        return 0
    if average is not None:
        return sum(params[i].nbytes for bucket in buckets for i in bucket.params) // average.period
    return sum(_bucket_bytes(bucket, params, world_size)[0] for bucket in buckets)


def traffic(plan: SyncPlan, params: Sequence[ParamInfo], world_size: int) -> int:
    """Return the bytes carried by a rank's link in one step, for comparing plans rather than predicting step times.

    With W ranks, an all-reduce of n bytes counts 2 n. A reduction to one rank also counts 2 n, and the
    broadcast of its result ceil(log2 W) n. An all-gather of n bytes from each rank counts W n.
    """
    return 0 if world_size == 1 else sum(_bucket_bytes(each, params, world_size)[1] for each in plan.buckets)


def collectives(plan: SyncPlan) -> int:
    """Return the number of collectives needed for a step under the plan."""
    return sum(each.sync.parts if isinstance(each.sync, Reduce) else 2 for each in plan.buckets)


def _bucket_bytes(bucket: BucketPlan, params: Sequence[ParamInfo], world_size: int) -> tuple[int, int]:
    """Return the bytes a rank sends for one bucket, and the bytes its link carries."""
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
    """Return the number of distinct table rows that a rank touches in one step, estimated if not yet observed."""
    guess = max(1, math.ceil(table.shape[0] * _UNKNOWN_ROWS))
    return min(table.rows if table.rows is not None else guess, table.shape[0])


def _low_rank_bytes(param: ParamInfo, rank: int) -> int:
    """Return the bytes of PowerSGD's factors P (rows x rank) and Q (columns x rank), or of the parameter if smaller."""
    if len(param.shape) < 2:
        return param.nbytes
    rows = param.shape[0]
    factors = (rows + param.numel // rows) * rank
    return min(factors, param.numel) * param.itemsize


_MIB = 1 << 20
_PARTS = 4
_HOPELESS = 8  # times the least traffic: not worth steps of training
PLAIN = Reduce()
"""What torch DDP does: the measure of all others."""

# Ways for parameters that are no tables; where a builder makes one, by its name.
_DENSE: Mapping[str, Sync] = {
    "all_reduce": PLAIN,
    "all_reduce of 25 MiB": Reduce(bucket_bytes=25 * _MIB),
    "all_reduce of 4 MiB": Reduce(bucket_bytes=4 * _MIB),
    "all_reduce of 1 MiB": Reduce(bucket_bytes=_MIB),
    "two_level": Reduce(topology="two_level"),
    "partitioned_ar": Reduce(parts=_PARTS),
    "ps_balanced": Owner(placement="balanced"),
}
_COMPRESSED: Mapping[str, Sync] = {"bf16": Reduce(wire=Wire(dtype="bf16")), "powersgd": Reduce(wire=Wire(rank=4))}
# Ways for tables, "" for that of the rest. A gradient that autograd makes dense stays so for the user's code.
_OF_SPARSE: Mapping[str, Sync | None] = {"rows": Rows(), "rows made dense": Rows(update="dense")}
_OF_DENSE: Mapping[str, Sync | None] = {"": None, "rows": Rows()}
_NO_TABLES: Mapping[str, Sync | None] = {"": None}


# For fewer bytes all ways cost a few messages: what tells them apart in a trial is chance. But a message between nodes
# takes longer than within one, and two levels send fewer of them.
_LEAST_BYTES = 4 * _MIB
_OF_FEW_BYTES = "two_level"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Strategy usable with this model, optimizer and group, and its synchronisation plan."""

    strategy: Strategy
    plan: SyncPlan


def candidates(
    profile: ModelProfile, topology: Topology, *, exact: bool, works: Callable[[SyncPlan], bool] = lambda plan: True
) -> tuple[Candidate, ...]:
    """Return the distinct strategies that can be raced, in the order they are tried; plain all-reduce is first.

    Args:
        exact: Whether to return only strategies that produce the same result as plain data-parallel training.
        works: Returns True if a plan can be executed; by default, all plans can.
    """
    found: dict[object, Candidate] = {}
    for strategy in _strategies(profile, exact=exact, several_nodes=len(set(topology.nodes)) > 1):
        try:
            plan = lower(strategy, profile, topology)
        except StrategyError:
            continue
        if works(plan):
            found.setdefault(what_is_done(plan), Candidate(strategy=strategy, plan=plan))
    return tuple(found.values())


def what_is_done(plan: SyncPlan) -> object:
    """Return a value that is equal for plans that synchronise alike, even if their ``bucket_bytes`` differ."""

    def work(sync: Sync) -> Sync:
        return sync if isinstance(sync, Rows) else dataclasses.replace(sync, bucket_bytes=None)

    return tuple((bucket.params, work(bucket.sync), bucket.owner) for bucket in plan.buckets)


def with_rows(profile: ModelProfile, rows: Mapping[str, int]) -> ModelProfile:
    """Return a copy of the profile with the given touched-row counts, keyed by table name."""
    params = (dataclasses.replace(each, rows=rows.get(each.name, each.rows)) for each in profile.params)
    return dataclasses.replace(profile, params=tuple(params))


def consider(
    profile: ModelProfile,
    topology: Topology,
    present: Strategy,
    *,
    exact: bool,
    most: int,
    works: Callable[[SyncPlan], bool] = lambda plan: True,
) -> tuple[Strategy, ...]:
    """Return the strategies to race: first the equivalent of the current strategy, then those with the least traffic.

    The result includes plain all-reduce unless its traffic is far too high to win the race.

    Args:
        most: Maximum number of strategies, at least 2.
        works: Returns True if a plan can be executed; by default, all plans can.
    """
    plan = lower(present, profile, topology)
    done = what_is_done(plan)
    found = candidates(profile, topology, exact=exact, works=works)
    mine = next((each for each in found if what_is_done(each.plan) == done), Candidate(strategy=present, plan=plan))
    carried = {id(each): traffic(each.plan, profile.params, topology.world_size) for each in (*found, mine)}
    limit = max(_LEAST_BYTES, _HOPELESS * min(carried.values()))
    others = [each for each in found if each is not mine and carried[id(each)] <= limit]
    others.sort(key=lambda each: (carried[id(each)], collectives(each.plan)))
    plain = next((each for each in others if each is found[0] and each.strategy.default == PLAIN), None)
    racing = others[: most - 1]
    if plain is not None and plain not in racing:
        racing[-1] = plain
    return tuple(each.strategy for each in (mine, *racing))


def _strategies(profile: ModelProfile, *, exact: bool, several_nodes: bool) -> Iterator[Strategy]:
    """Yield every combination of methods, including combinations that the model cannot use."""
    sparse = [param for param in profile.params if param.sparse]
    tables = [param for param in profile.params if param.table and not param.sparse and len(param.shape) == 2]
    dense = _DENSE if exact else {**_DENSE, **_COMPRESSED}
    for of_tables, of_sparse, rest in itertools.product(
        (_OF_DENSE if tables else _NO_TABLES).items(), (_OF_SPARSE if sparse else _NO_TABLES).items(), dense.items()
    ):
        others = [p for p in profile.params if not (p.sparse or (of_tables[1] is not None and p in tables))]
        tried = rest[1] == PLAIN or (several_nodes and rest[0] == _OF_FEW_BYTES)
        if not tried and sum(p.nbytes for p in others) < _LEAST_BYTES:
            continue
        yield Strategy(
            rules=(*_rules(sparse, of_sparse[1]), *_rules(tables, of_tables[1])),
            default=rest[1],
            name=_name(of_sparse[0], of_tables[0], rest[0], both=bool(sparse and tables)),
        )


def _rules(params: Sequence[ParamInfo], way: Sync | None) -> list[Rule]:
    """Return one rule for each name of each parameter (a tied parameter has several); no rules if ``way`` is None."""
    return [] if way is None else [Rule(pattern=exactly(name), sync=way) for p in params for name in p.names]


def _name(of_sparse: str, of_tables: str, rest: str, *, both: bool) -> str:
    """Return a readable name; ``parallax`` if that builder would produce the same strategy."""
    if (
        {of_sparse, of_tables} <= ({"rows"} if both else {"", "rows"})
        and of_sparse + of_tables
        and rest == "all_reduce"
    ):
        return "parallax"
    kinds = [of_sparse and f"{of_sparse} (sparse tables)", of_tables and f"{of_tables} (dense tables)"]
    return " + ".join([*filter(None, kinds if both else [of_sparse, of_tables]), rest])


def describe(sync: Sync) -> str:
    """Return a short description of a synchronisation method."""
    if isinstance(sync, Rows):
        return "touched rows" if sync.update == "auto" else f"touched rows, {sync.update} update"
    wire = f" as {sync.wire.dtype}" if sync.wire.dtype != "native" else ""
    if sync.wire.rank:
        wire = f" with PowerSGD of rank {sync.wire.rank}"
    if isinstance(sync, Owner):
        return f"slices to their owners{wire}" if sync.owns_tiles else f"owners ({sync.placement}){wire}"
    parts = f" in {sync.parts} parts" if sync.parts > 1 else ""
    way = f" ({sync.topology})" if sync.topology != "native" else ""
    size = "" if sync.bucket_bytes is None else f" in buckets of {sync.bucket_bytes / _MIB:g} MiB"
    return f"all-reduce{way}{wire}{parts}{size}"
