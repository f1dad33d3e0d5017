"""Strategies that may be the fastest for a model: tens, one way for each class of its parameters (pure)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from elastic_ray.sync.builders import exactly
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.choosing.links import PARTS
from elastic_ray.sync.plan import SyncPlan, lower
from elastic_ray.sync.profile import ModelProfile, ParamInfo, Topology
from elastic_ray.sync.spec import Owner, Reduce, Rows, Rule, Strategy, Sync, Wire

_MIB = 1 << 20
PLAIN = Reduce()
"""What torch DDP does: the measure of all others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy that this model, optimizer and group can use.

    Attributes:
        strategy: it.
        plan: it, worked out.
    """

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
            found.setdefault(_what_is_done(plan), Candidate(strategy=strategy, plan=plan))
    return tuple(found.values())


def _strategies(profile: ModelProfile, *, exact: bool) -> Iterator[Strategy]:
    """Every combination, refused or not."""
    sparse = [param for param in profile.params if param.sparse]
    tables = [param for param in profile.params if param.table and not param.sparse and len(param.shape) == 2]
    for rest, of_sparse, of_tables in itertools.product(_dense(exact=exact), _sparse(sparse), _tables(tables)):
        rules = [*_rules(sparse, of_sparse), *_rules(tables, of_tables)]
        where = (" of sparse tables", " of dense tables") if sparse and tables else ("", "")
        kinds = [(way, of) for way, of in zip((of_sparse, of_tables), where, strict=True) if way is not None]
        name = " + ".join([*(describe(way) + of for way, of in kinds), describe(rest)])
        yield Strategy(rules=tuple(rules), default=rest, name=name)


def _dense(*, exact: bool) -> Sequence[Sync]:
    """Ways for parameters that are no tables."""
    ways: list[Sync] = [
        PLAIN,
        Reduce(bucket_bytes=4 * _MIB),
        Reduce(bucket_bytes=_MIB),
        Reduce(parts=PARTS),
        Owner(placement="balanced"),
    ]
    if not exact:
        ways += [Reduce(wire=Wire(dtype="bf16")), Reduce(wire=Wire(rank=4))]
    return ways


def _sparse(params: Sequence[ParamInfo]) -> Sequence[Sync | None]:
    """Ways for tables whose gradients are sparse."""
    return [Rows(update="sparse"), Rows(update="dense")] if params else [None]


def _tables(params: Sequence[ParamInfo]) -> Sequence[Sync | None]:
    """Ways for tables whose gradients are dense, and stay so for the user's code; None: as the rest."""
    return [None, Rows(update="dense")] if params else [None]


def _rules(params: Sequence[ParamInfo], way: Sync | None) -> list[Rule]:
    """By each of a parameter's names: one that is tied has several."""
    return [] if way is None else [Rule(pattern=exactly(name), sync=way) for p in params for name in p.names]


def describe(sync: Sync) -> str:
    """A way in a few words."""
    if isinstance(sync, Rows):
        return "touched rows" if sync.update == "auto" else f"touched rows, {sync.update} update"
    wire = f" as {sync.wire.dtype}" if sync.wire.dtype != "native" else ""
    if sync.wire.rank:
        wire = f" with PowerSGD of rank {sync.wire.rank}"
    if isinstance(sync, Owner):
        return f"owners ({sync.placement}){wire}"
    parts = f" in {sync.parts} parts" if sync.parts > 1 else ""
    return f"all-reduce{wire}{parts} in buckets of {sync.bucket_bytes / _MIB:g} MiB"


def _what_is_done(plan: SyncPlan) -> object:
    """Equal for plans that do the same: the size at which another bucket is begun matters by the buckets alone."""

    def work(sync: Sync) -> Sync:
        return sync if isinstance(sync, Rows) else dataclasses.replace(sync, bucket_bytes=PLAIN.bucket_bytes)

    return tuple((bucket.params, work(bucket.sync), bucket.owner) for bucket in plan.buckets)
