"""Whether a job's heartbeat says something that the last decision did not know (pure)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placement.allocator.snapshot import Trigger
from placement.cluster.jobs import JobView, speeds

_LIMITS = (
    *("bundle", "min_workers", "max_workers", "held_at", "paused", "wished", "label_selector", "submitted_s"),
    *("priority", "tenant", "preemptible", "deadline_s", "whole_nodes", "tenant_weight", "spot", "budget_usd"),
)


_MAY_BE_UNKNOWN = ("stop_cost_s", "growth_limit")


def trigger_of(before: JobView, after: JobView, model_change: float) -> Trigger | None:
    """Whether a heartbeat says something that a decision depends on: the trigger of one, or None.

    A new place of the workers is no news: it is what the last decision asked for. Neither is a model whose
    speeds all differ by less than ``model_change``, relatively.
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
    if abs(after.weight - before.weight) > model_change * before.weight:
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
    return Trigger.MODEL if _differ(old, new, model_change) or _differ(old1, new1, model_change) else None


def _sizes(view: JobView) -> tuple[object, ...]:
    """Which sizes and batches the job could have."""
    return (
        view.useful_workers,
        view.init_batch_size,
        view.max_batch_size,
        view.held_batch,
        view.atomic_bsz_range,
        view.accumulation,
    )


def _differ(old: NDArray[np.float64], new: NDArray[np.float64], relative: float) -> bool:
    return len(old) != len(new) or bool(np.any(np.abs(new - old) > relative * np.maximum(old, new)))
