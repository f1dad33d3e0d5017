"""Strategies that may be the fastest for a model, in the order in which they are tried (pure).

There are some tens: one way for each class of parameters. Trials are real steps; those come first that carry the
fewest bytes in the fewest collectives.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from elastic_ray.sync.builders import exactly
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.choosing.choice import Option
from elastic_ray.sync.choosing.traffic import collectives, traffic
from elastic_ray.sync.plan import SyncPlan, lower
from elastic_ray.sync.profile import ModelProfile, ParamInfo, Topology
from elastic_ray.sync.spec import Owner, Reduce, Rows, Rule, Strategy, Sync, Wire

_MIB = 1 << 20
_PARTS = 4
_HOPELESS = 8  # times the least traffic: not worth steps of training
PLAIN = Reduce()
"""What torch DDP does: the measure of all others."""

# Ways for parameters that are no tables; where a builder makes one, by its name.
_DENSE: Mapping[str, Sync] = {
    "all_reduce": PLAIN,
    "all_reduce of 4 MiB": Reduce(bucket_bytes=4 * _MIB),
    "all_reduce of 1 MiB": Reduce(bucket_bytes=_MIB),
    "partitioned_ar": Reduce(parts=_PARTS),
    "ps_balanced": Owner(placement="balanced"),
}
_COMPRESSED: Mapping[str, Sync] = {
    "bf16": Reduce(wire=Wire(dtype="bf16")),
    "powersgd": Reduce(wire=Wire(rank=4)),
}
# Ways for tables, "" for that of the rest. A gradient that autograd makes dense stays so for the user's code.
_OF_SPARSE: Mapping[str, Sync | None] = {"rows": Rows(), "rows made dense": Rows(update="dense")}
_OF_DENSE: Mapping[str, Sync | None] = {"": None, "rows": Rows()}
_NO_TABLES: Mapping[str, Sync | None] = {"": None}


# For fewer bytes all ways cost a few messages: what tells them apart in a trial is chance.
_LEAST_BYTES = 4 * _MIB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy that this model, optimizer and group can use."""

    strategy: Strategy
    plan: SyncPlan


def candidates(
    profile: ModelProfile,
    topology: Topology,
    *,
    exact: bool,
    works: Callable[[SyncPlan], bool] = lambda plan: True,
) -> tuple[Candidate, ...]:
    """All of them, no two of which do the same; plain all-reduce of all that is dense comes first.

    Args:
        profile: the model.
        topology: the group.
        exact: only those whose step is that of plain data-parallel training.
        works: whether a plan can be carried out.
    """
    found: dict[object, Candidate] = {}
    for strategy in _strategies(profile, exact=exact):
        try:
            plan = lower(strategy, profile, topology)
        except StrategyError:
            continue
        if works(plan):
            found.setdefault(what_is_done(plan), Candidate(strategy=strategy, plan=plan))
    return tuple(found.values())


def what_is_done(plan: SyncPlan) -> object:
    """Equal for plans that do the same: the size at which another bucket is begun matters by the buckets alone."""

    def work(sync: Sync) -> Sync:
        return sync if isinstance(sync, Rows) else dataclasses.replace(sync, bucket_bytes=PLAIN.bucket_bytes)

    return tuple((bucket.params, work(bucket.sync), bucket.owner) for bucket in plan.buckets)


def with_rows(profile: ModelProfile, rows: Mapping[str, int]) -> ModelProfile:
    """The profile with touched rows of tables, by their names."""
    params = (dataclasses.replace(each, rows=rows.get(each.name, each.rows)) for each in profile.params)
    return dataclasses.replace(profile, params=tuple(params))


def consider(
    profile: ModelProfile,
    topology: Topology,
    present: Strategy,
    *,
    exact: bool,
    works: Callable[[SyncPlan], bool] = lambda plan: True,
) -> tuple[Option, ...]:
    """Options in the order of their trials, of which exactly one does what is done at present.

    Args:
        profile: the model, with the touched rows of its tables.
        topology: the group.
        present: the strategy in force.
        exact: only strategies whose step is that of plain data-parallel training.
        works: whether a plan can be carried out.
    """
    plan = lower(present, profile, topology)
    done = what_is_done(plan)
    found = list(candidates(profile, topology, exact=exact, works=works))
    if not any(what_is_done(each.plan) == done for each in found):
        found.append(Candidate(strategy=present, plan=plan))

    carried = {id(each): traffic(each.plan, profile.params, topology.world_size) for each in found}
    most = max(_LEAST_BYTES, _HOPELESS * min(carried.values()))
    ordered = sorted(found, key=lambda each: (carried[id(each)], collectives(each.plan)))
    return tuple(
        Option(strategy=each.strategy, plain=each is found[0] and each.strategy.default == PLAIN, present=here)
        for each in ordered
        if (here := what_is_done(each.plan) == done) or carried[id(each)] <= most
    )


def _strategies(profile: ModelProfile, *, exact: bool) -> Iterator[Strategy]:
    """Every combination, refused or not."""
    sparse = [param for param in profile.params if param.sparse]
    tables = [param for param in profile.params if param.table and not param.sparse and len(param.shape) == 2]
    dense = _DENSE if exact else {**_DENSE, **_COMPRESSED}
    for of_tables, of_sparse, rest in itertools.product(
        (_OF_DENSE if tables else _NO_TABLES).items(),
        (_OF_SPARSE if sparse else _NO_TABLES).items(),
        dense.items(),
    ):
        others = [p for p in profile.params if not (p.sparse or (of_tables[1] is not None and p in tables))]
        if rest[1] != PLAIN and sum(p.nbytes for p in others) < _LEAST_BYTES:
            continue
        yield Strategy(
            rules=(*_rules(sparse, of_sparse[1]), *_rules(tables, of_tables[1])),
            default=rest[1],
            name=_name(of_sparse[0], of_tables[0], rest[0], both=bool(sparse and tables)),
        )


def _rules(params: Sequence[ParamInfo], way: Sync | None) -> list[Rule]:
    """By each of a parameter's names: one that is tied has several."""
    return [] if way is None else [Rule(pattern=exactly(name), sync=way) for p in params for name in p.names]


def _name(of_sparse: str, of_tables: str, rest: str, *, both: bool) -> str:
    """For people; ``parallax`` where that builder makes the same."""
    if (
        {of_sparse, of_tables} <= ({"rows"} if both else {"", "rows"})
        and of_sparse + of_tables
        and rest == "all_reduce"
    ):
        return "parallax"
    kinds = [of_sparse and f"{of_sparse} (sparse tables)", of_tables and f"{of_tables} (dense tables)"]
    return " + ".join([*filter(None, kinds if both else [of_sparse, of_tables]), rest])


def describe(sync: Sync) -> str:
    """A way in a few words."""
    if isinstance(sync, Rows):
        return "touched rows" if sync.update == "auto" else f"touched rows, {sync.update} update"
    wire = f" as {sync.wire.dtype}" if sync.wire.dtype != "native" else ""
    if sync.wire.rank:
        wire = f" with PowerSGD of rank {sync.wire.rank}"
    if isinstance(sync, Owner):
        return f"slices to their owners{wire}" if sync.owns_tiles else f"owners ({sync.placement}){wire}"
    parts = f" in {sync.parts} parts" if sync.parts > 1 else ""
    return f"all-reduce{wire}{parts} in buckets of {sync.bucket_bytes / _MIB:g} MiB"
