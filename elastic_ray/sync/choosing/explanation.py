"""Readable tables that show how a model's parameters are synchronised, and why (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from elastic_ray.sync.choosing.candidates import describe, sent_bytes
from elastic_ray.sync.choosing.choice import Choice
from elastic_ray.sync.plan import BucketPlan, ModelProfile, SyncPlan, Topology
from elastic_ray.sync.spec import Rows

_NAMED = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRow:
    """Table row for a class of parameters that are all synchronised in the same way."""

    parameters: str  # the first of their names, and how many there are
    what: str  # is done with them
    nbytes: int
    sent_nbytes: int  # that each rank gives to collectives in a step for them, as they travel
    # from its first collective to its last in a step [s], the median; None before a step
    measured_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRow:
    """Table row for a strategy that was considered as a candidate."""

    name: str
    measured_s: float | None = None  # of a step [s]; None before
    chosen: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTable:
    """Explanation of how a model is synchronised; ``str()`` formats it as a table.

    Attributes:
        candidates: Strategies that were considered, in the order they were tried; empty if the user set the strategy.
        measured_s: Median duration of the latest steps [s]; None before the first measurement.
        reason: Reason the current strategy was chosen; empty if the user set it.
    """

    strategy: str
    workers: int
    rows: tuple[StrategyRow, ...]
    candidates: tuple[CandidateRow, ...] = ()
    measured_s: float | None = None
    invariant: str = ""
    reason: str = ""

    def __str__(self) -> str:
        head = f"strategy {self.strategy}, {self.workers} worker{'s' if self.workers > 1 else ''}"
        lines = [f"{head}: {self.reason}" if self.reason else head, f"after each step {self.invariant}"]
        cells = [("parameters", "what is done", "MiB sent", "measured ms")]
        cells += [
            (row.parameters, row.what, f"{row.sent_nbytes / 2**20:.3g}", _ms(row.measured_s)) for row in self.rows
        ]
        nbytes = sum(row.sent_nbytes for row in self.rows)
        cells.append(("a step", "", f"{nbytes / 2**20:.3g}", _ms(self.measured_s)))
        lines += _aligned(cells)
        if self.candidates:
            lines.append("")
            considered = [("considered", "measured ms", "")]
            considered += [(row.name, _ms(row.measured_s), "kept" if row.chosen else "") for row in self.candidates]
            lines += _aligned(considered)
        return "\n".join(lines)


def explain(
    plan: SyncPlan,
    profile: ModelProfile,
    topology: Topology,
    *,
    choice: Choice | None = None,
    step_s: float | None = None,
    bucket_s: Mapping[int, float] | None = None,
) -> StrategyTable:
    """Return a table that explains how the current plan synchronises each parameter, and why.

    Args:
        step_s: Measured duration of a step under the plan [s].
        bucket_s: Measured duration of each bucket's collectives in a step [s], keyed by bucket index.
    """
    classes: dict[str, list[int]] = {}
    for index, bucket in enumerate(plan.buckets):
        classes.setdefault(_what(bucket, plan), []).append(index)
    rows = []
    for what, indices in classes.items():
        mine = [plan.buckets[index] for index in indices]
        times = [bucket_s[index] for index in indices if index in bucket_s] if bucket_s else []
        rows.append(_row(what, plan, mine, profile, topology.world_size, max(times, default=None)))
    return StrategyTable(
        strategy=plan.strategy.label,
        workers=topology.world_size,
        rows=tuple(rows),
        candidates=_candidates(choice) if choice is not None else (),
        measured_s=step_s,
        invariant=plan.strategy.invariant,
        reason=choice.reason if choice is not None else "",
    )


def _what(bucket: BucketPlan, plan: SyncPlan) -> str:
    average, tiles = plan.strategy.average, plan.tiles
    if average is not None:
        return f"models averaged ({average.algorithm}, every {average.period} steps)"
    if tiles is None or not tiles.divided or not tiles.holds(bucket.params):
        return describe(bucket.sync)
    return f"{describe(bucket.sync)}, optimizer state in tiles with {tiles.owner.copies} owners"


def _row(
    what: str,
    plan: SyncPlan,
    buckets: Sequence[BucketPlan],
    profile: ModelProfile,
    world_size: int,
    measured_s: float | None,
) -> StrategyRow:
    """Return the table row for one class of parameters."""
    names = [profile.params[i].name for i in sorted(i for bucket in buckets for i in bucket.params)]
    shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    in_buckets = f", {len(buckets)} of them" if len(buckets) > 1 and not isinstance(buckets[0].sync, Rows) else ""
    return StrategyRow(
        parameters=shown,
        what=what + in_buckets,
        nbytes=sum(profile.params[i].nbytes for bucket in buckets for i in bucket.params),
        sent_nbytes=sent_bytes(plan, buckets, profile.params, world_size),
        measured_s=measured_s,
    )


def _candidates(choice: Choice) -> tuple[CandidateRow, ...]:
    """Return the candidates in a choice, with their measured times."""
    names, kept = [each.name for each in choice.options], choice.strategy.name if choice.settled else None
    return tuple(CandidateRow(name=n, measured_s=choice.measured.get(n), chosen=n == kept) for n in names)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3g}"


def _aligned(cells: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the rows as text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
