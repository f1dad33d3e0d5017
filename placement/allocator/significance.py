"""Significance of a job's heartbeat: which changes call for a new decision (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from placement.allocator.snapshot import Trigger
from placement.cluster.jobs import JobView, speeds
from placement.reasons import Cause, Reason

_LIMITS = (
    *("bundle", "min_workers", "max_workers", "held_at", "paused", "wished", "label_selector", "submitted_s"),
    *("priority", "tenant", "preemptible", "deadline_s", "whole_nodes", "tenant_weight", "spot", "budget_usd"),
    "utility",
)


_CHANGE = 0.1  # relative, of a speed or a weight, that counts
_MAY_BE_UNKNOWN = ("stop_cost_s", "growth_limit")


def trigger_of(before: JobView, after: JobView) -> Trigger | None:
    """Return the trigger of a new decision if the heartbeat changes something that decisions depend on, else None.

    A changed placement of workers does not count, since the last decision requested it. Neither does a model whose
    speeds all change by less than a tenth.
    """
    if before is after:
        return None
    if any(getattr(before, field) != getattr(after, field) for field in _LIMITS):
        return Trigger.LIMITS
    if any((getattr(before, field) is None) != (getattr(after, field) is None) for field in _MAY_BE_UNKNOWN):
        return Trigger.LIMITS
    if before.slow_nodes.keys() != after.slow_nodes.keys():
        return Trigger.NODES
    if {each.worker for each in before.node_failures} != {each.worker for each in after.node_failures}:
        return Trigger.NODES
    if abs(after.weight - before.weight) > _CHANGE * before.weight:
        return Trigger.WEIGHT
    if before.fingerprint != after.fingerprint:  # others may know the model
        return Trigger.MODEL
    if before.goodput is None and after.goodput is None:
        return Trigger.MODEL if _sizes(before) != _sizes(after) else None
    if before.goodput is None or after.goodput is None:
        return Trigger.MODEL
    if _sizes(before)[1:] != _sizes(after)[1:]:
        return Trigger.MODEL
    if before.goodput == after.goodput:
        return None
    old, new = (speeds(view, [1] * after.max_workers) for view in (before, after))
    # On one node and on several: the two extremes of the model's communication cost.
    old1, new1 = (speeds(view, [after.max_workers]) for view in (before, after))
    return Trigger.MODEL if _differ(old, new) or _differ(old1, new1) else None


def _sizes(view: JobView) -> tuple[object, ...]:
    """Return the fields that determine which sizes and batches are possible for the job."""
    return (
        view.useful_workers,
        view.init_batch_size,
        view.max_batch_size,
        view.held_batch,
        view.atomic_bsz_range,
        view.accumulation,
    )


def _differ(old: NDArray[np.float64], new: NDArray[np.float64]) -> bool:
    return len(old) != len(new) or bool(np.any(np.abs(new - old) > _CHANGE * np.maximum(old, new)))


@dataclasses.dataclass(slots=True, kw_only=True)
class KnownJob:
    """Allocator's record of one job, which the next heartbeat could rebuild; only its own methods modify it."""

    view: JobView  # the last heartbeat's
    decided_on: JobView  # the view that the last decision saw; news is what differs from it
    target: Mapping[str, int]  # workers by node id that it is to have
    reason: Reason  # why
    heard_s: float  # when it was last heard of [s], by the clock for intervals, as all times here
    swayed_s: float = -math.inf  # when measured speeds alone changed its size last [s]
    sways: int = 0  # times that they did since something else was decided about
    impossible_since_s: float | None = None  # since when no node could hold it [s]; None if some could
    told_impossible: bool = False  # whether it was told so

    @classmethod
    def arrived(cls, view: JobView, now_s: float) -> KnownJob:
        """Return the record of a new job, with the workers it already holds as its planned workers."""
        reason = Reason(Cause.CAME if view.allocation else Cause.ARRIVED)
        return cls(view=view, decided_on=view, target=dict(view.allocation), reason=reason, heard_s=now_s)

    @property
    def waits(self) -> bool:
        """True if the job has no planned workers and is not paused."""
        return not self.target and not self.view.paused

    def receive(self, view: JobView, now_s: float) -> None:
        """Store the view in a heartbeat that arrived at ``now_s`` [s, monotonic]."""
        self.view, self.heard_s = view, now_s

    def excuse(self, now_s: float) -> None:
        """Treat the job as heard from at ``now_s`` [s, monotonic], although no heartbeat arrived."""
        self.heard_s = now_s

    def decided(self, *, forced: bool) -> None:
        """Record that a decision used the job's current view; ``forced`` if measured speeds are not its only cause."""
        self.decided_on = self.view
        self.sways = 0 if forced else self.sways

    def give(self, target: Mapping[str, int]) -> None:
        """Set the job's planned workers: the number of workers keyed by node id; empty for none."""
        self.target = target

    def swayed(self, now_s: float) -> None:
        """Record that at ``now_s`` [s, monotonic] measured speeds alone changed the job's size."""
        self.swayed_s, self.sways = now_s, self.sways + 1

    def explain(self, reason: Reason) -> None:
        """Set the reason for the job's current workers."""
        self.reason = reason

    def judge(self, impossible: Reason | None, now_s: float) -> bool:
        """Store why no node could hold the job (None if one could); return True if the job has just become possible."""
        if impossible is not None:
            self.reason = impossible
            self.impossible_since_s = now_s if self.impossible_since_s is None else self.impossible_since_s
            return False
        again = self.impossible_since_s is not None
        self.impossible_since_s, self.told_impossible = None, self.told_impossible and not again
        return again

    def must_report_impossible(self, now_s: float, after_s: float) -> bool:
        """True, but only once, if no node could have held the job for ``after_s`` [s]: the user is then notified."""
        since_s = self.impossible_since_s
        if since_s is None or self.told_impossible or now_s - since_s < after_s:
            return False
        self.told_impossible = True
        return True
