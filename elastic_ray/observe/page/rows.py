"""Rows of the page's job and node tables, built from answers by the allocator, controllers and Ray (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from elastic_ray.events import JobPhase, JobStatus, TrialFacts, numbers_in
from elastic_ray.observe.page.job_memory import JobMemory
from elastic_ray.observe.page.model import PageJob, PageNode
from elastic_ray.observe.page.source import NodeLook
from placement.allocator.slot_use import slots_in
from placement.allocator.snapshot import JobState
from placement.cluster.cluster import GPU_TYPE_LABEL, MARKET_LABEL, SPOT, Node, by_node
from placement.cluster.jobs import JobView
from placement.cluster.node_record import NodeHistory
from placement.goodput.remaining import remaining
from placement.text import clipped

CPU = "CPU"


_OF_STATUS = ("tokens_per_s", "tokens_left", "efficiency", "epoch", "epochs", "step", "cost_usd", "reports", "score")
_OF_VIEW = ("min_workers", "max_workers", "held_at", "deadline_s", "budget_usd", "tenant", "priority", "submitted_s")


def job_row(memory: JobMemory) -> PageJob:
    """Return the row of one job."""
    status, facts, state, ended_s = memory.status, memory.facts, memory.state, memory.ended_s
    view = state.view if state is not None else None
    told: dict[str, Any] = {}
    if facts is not None:
        told |= {"min_workers": facts.min_workers, "max_workers": facts.max_workers, "storage": facts.storage}
    if status is not None:
        told |= {name: getattr(status, name) for name in _OF_STATUS}
        told |= {"batch": status.batch_size, "samples_per_s": status.throughput, "productive": status.productive_share}
        told |= {"metrics": numbers_in(status.metrics), "note": clipped(status.note)}
        told |= trial_cells(status.trial, status.metric)
        told |= {"workers": status.workers, "target": status.target_workers}
    if state is not None and view is not None:
        told |= {name: getattr(view, name) for name in _OF_VIEW}
        told |= {"target": sum(state.target.values()), "nodes": dict(state.target), "resizes": view.restarts}
        told.setdefault("workers", view.workers)
    goodput = status.goodput if status is not None else None
    goodput = goodput if goodput is not None and math.isfinite(goodput) else None
    progress, eta_s = _progress(status, view, goodput)
    told |= {"goodput": goodput, "progress": progress, "eta_s": eta_s}
    if ended_s is not None:
        told |= {"workers": 0, "target": 0, "eta_s": None, "nodes": {}}
    if _phase(status, None) == JobPhase.FINISHED.value:
        told["progress"] = 1.0
    why, phase = _why(status, state), _phase(status, ended_s)
    return PageJob(job=memory.job, phase=phase, ended_s=ended_s, why=why, colour=memory.colour, **told)


def trial_cells(trial: TrialFacts | None, metric: str) -> dict[str, Any]:
    """Return a page row's fields that describe a trial; for a job that is not a trial, only its metric."""
    return (
        {"metric": metric}
        if trial is None
        else {each.name: getattr(trial, each.name) for each in dataclasses.fields(trial)}
    )


def _phase(status: JobStatus | None, ended_s: float | None) -> str:
    """Return the job's phase; "ended" if the controller is gone and never reported how the job ended."""
    if status is None:
        return "silent" if ended_s is None else "ended"
    return "ended" if ended_s is not None and not status.phase.ended else status.phase.value


def _progress(
    status: JobStatus | None, view: JobView | None, goodput: float | None
) -> tuple[float | None, float | None]:
    """Return the job's progress, 0 to 1, and seconds left, from the controller or else from the job's model."""
    progress, eta_s = (status.progress, status.eta_s) if status is not None else (None, None)
    missing = remaining(view.progress) if view is not None else None
    if progress is None and view is not None and view.progress is not None and missing is not None:
        whole = view.progress.done + missing
        progress = view.progress.done / whole if whole > 0 else None
    if eta_s is None and view is not None and missing is not None and goodput and view.init_batch_size:
        eta_s = missing * view.init_batch_size / goodput
    return progress, eta_s


def _why(status: JobStatus | None, state: JobState | None) -> str:
    """Return what the job is waiting for or why it ended, otherwise the reason for its size."""
    if status is not None and status.message:
        return clipped(status.message)
    return clipped(str(state.reason)) if state is not None else ""


def kind_of(node: NodeLook) -> str:
    """Return the type of a node's GPUs: ``GPU`` if the node has no label for their type, ``CPU`` without GPUs."""
    if not node.total.get("GPU"):
        return CPU
    return node.labels.get(GPU_TYPE_LABEL, "") or "GPU"


def slots_of(total: Mapping[str, float]) -> int:
    """Return the number of GPUs in a node's resources ``total``, or of CPUs if it has no GPUs."""
    return int(total.get("GPU", 0.0) or total.get("CPU", 0.0))


def node_row(node: NodeLook, seen: Node | None, used: float, failed: NodeHistory | None = None) -> PageNode:
    """Return the row of one living node."""
    return PageNode(
        node=node.node,
        label=node.address or node.node[:8],
        type=kind_of(node),
        slots=max(slots_of(node.total), 1),
        used=round(used),
        spot=node.labels.get(MARKET_LABEL) == SPOT,
        draining=seen is not None and seen.draining,
        failures=clipped(failed.short) if failed is not None else "",
    )


def slots_at(state: JobState, totals: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
    """Return the number of slots planned for the job on each node, at least 1, keyed by node id like ``totals``."""
    return {
        node: max(1, math.ceil(workers * slots_in(state.view.bundle, totals.get(node, {})) - 1e-6))
        for node, workers in by_node(state.target).items()
    }


def finite(values: Any) -> tuple[float, ...]:
    """Return an array's numbers as floats, with 0 in place of numbers that are not finite."""
    return tuple(np.nan_to_num(np.asarray(values, dtype=np.float64), posinf=0.0, neginf=0.0).tolist())
