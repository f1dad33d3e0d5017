"""Rows of the page's tables: jobs and nodes, built from the answers of allocator, controllers and Ray (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from elastic_ray.events import JobPhase, JobStatus, TrialFacts, numbers_in
from elastic_ray.observe.page.model import PageJob, PageNode
from elastic_ray.observe.page.source import JobFacts, NodeLook
from placement.allocator.snapshot import JobState
from placement.cluster.cluster import GPU_TYPE_LABEL, MARKET_LABEL, SPOT, Node, by_node
from placement.cluster.jobs import JobView
from placement.cluster.node_record import NodeHistory
from placement.goodput.remaining import remaining
from placement.text import clipped

CPU = "CPU"


def told(status: JobStatus | None, name: str) -> Any:
    """Return a field of a status; None if there is no status or it lacks the field."""
    return getattr(status, name, None)


def job_row(
    job: str,
    *,
    status: JobStatus | None,
    facts: JobFacts | None,
    state: JobState | None,
    ended_s: float | None,
    colour: str,
) -> PageJob:
    """Return the row of one job.

    Args:
        status: The controller's status; None if the controller has not answered.
        facts: Facts from the job's specification; None if the controller has not sent them.
        state: The allocator's state of the job; None if the allocator does not know the job.
        ended_s: Time at which the job was found to be gone; None while it exists.
    """
    view = state.view if state is not None else None
    low, high = (facts.min_workers, facts.max_workers) if facts is not None else (None, None)
    if view is not None:
        low, high = view.min_workers, view.max_workers
    rate, goodput = _speed(status)
    progress, eta_s = _progress(status, view, goodput)
    target = sum(state.target.values()) if state is not None else status.target_workers if status is not None else 0
    return PageJob(
        job=job,
        phase=_phase(status, ended_s),
        workers=0 if ended_s is not None else _workers(status, view),
        target=0 if ended_s is not None else target,
        min_workers=low,
        max_workers=high,
        held_at=view.held_at if view is not None else None,
        batch=status.batch_size if status is not None else 0,
        samples_per_s=rate,
        tokens_per_s=told(status, "tokens_per_s"),
        tokens_left=told(status, "tokens_left"),
        goodput=goodput,
        efficiency=told(status, "efficiency"),
        epoch=status.epoch if status is not None else 0,
        epochs=status.epochs if status is not None else None,
        step=status.step if status is not None else 0,
        metrics=numbers_in(status.metrics) if status is not None else {},
        progress=1.0 if _phase(status, None) == JobPhase.FINISHED.value else progress,
        eta_s=None if ended_s is not None else eta_s,
        productive=told(status, "productive_share"),
        deadline_s=view.deadline_s if view is not None else None,
        budget_usd=view.budget_usd if view is not None else None,
        cost_usd=status.cost_usd if status is not None else None,
        tenant=view.tenant if view is not None else "",
        priority=view.priority if view is not None else 0,
        resizes=view.restarts if view is not None else 0,
        submitted_s=view.submitted_s if view is not None else None,
        ended_s=ended_s,
        why=_why(status, state),
        note=clipped(status.note) if status is not None else "",
        nodes=dict(state.target) if state is not None and ended_s is None else {},
        reports=status.reports if status is not None else 0,
        score=status.score if status is not None else None,
        **trial_cells(status.trial if status is not None else None, told(status, "metric") or ""),
        storage=facts.storage if facts is not None else "",
        colour=colour,
    )


def trial_cells(trial: TrialFacts | None, metric: str) -> dict[str, Any]:
    """Return a trial's facts as fields of its row; for another job, only its metric."""
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


def _workers(status: JobStatus | None, view: JobView | None) -> int:
    if status is not None:
        return status.workers
    return view.workers if view is not None else 0


def _speed(status: JobStatus | None) -> tuple[float, float | None]:
    """Return the throughput and goodput [samples/s]."""
    if status is None:
        return 0.0, None
    goodput = status.goodput
    return status.throughput, goodput if goodput is not None and math.isfinite(goodput) else None


def _progress(
    status: JobStatus | None, view: JobView | None, goodput: float | None
) -> tuple[float | None, float | None]:
    """Return the job's progress, 0 to 1, and seconds to its end, from the controller or else from the job's model."""
    progress, eta_s = told(status, "progress"), told(status, "eta_s")
    missing = remaining(view.progress) if view is not None else None
    if progress is None and view is not None and view.progress is not None and missing is not None:
        whole = view.progress.done + missing
        progress = view.progress.done / whole if whole > 0 else None
    if eta_s is None and view is not None and missing is not None and goodput and view.init_batch_size:
        eta_s = missing * view.init_batch_size / goodput
    return progress, eta_s


def _why(status: JobStatus | None, state: JobState | None) -> str:
    """Return what the job waits for or why it ended, else the reason for its size."""
    if status is not None and status.message:
        return clipped(status.message)
    return clipped(str(state.reason)) if state is not None else ""


def kind_of(node: NodeLook) -> str:
    """Return the type of a node's GPUs: ``GPU`` if the node has no label for it, ``CPU`` if it has no GPUs."""
    if not node.total.get("GPU"):
        return CPU
    return node.labels.get(GPU_TYPE_LABEL, "") or "GPU"


def slots_of(total: Mapping[str, float]) -> int:
    """Return the number of a node's GPUs, or of its CPUs if it has no GPUs."""
    return int(total.get("GPU", 0.0) or total.get("CPU", 0.0))


def slots_per_worker(bundle: Mapping[str, float], total: Mapping[str, float]) -> float:
    """Return the number of a node's slots that one worker occupies."""
    return bundle.get("GPU", 0.0) if total.get("GPU") else bundle.get("CPU", 0.0)


def node_row(node: NodeLook, seen: Node | None, used: float, failed: NodeHistory | None = None) -> PageNode:
    """Return the row of one living node.

    Args:
        node: The node as Ray lists it.
        seen: The node as the allocator knows it; None if it does not, or there is no allocator.
        used: Number of slots granted to workers of elastic jobs.
        failed: Record of workers that failed on this node; None if there is none.
    """
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
    """Return the job's planned slots keyed by node id: at least one on each node that has a worker."""
    return {
        node: max(1, math.ceil(workers * slots_per_worker(state.view.bundle, totals.get(node, {})) - 1e-6))
        for node, workers in by_node(state.target).items()
    }


def finite(values: Any) -> tuple[float, ...]:
    """Return an array's numbers as floats, with 0 in place of those that are not finite."""
    return tuple(np.nan_to_num(np.asarray(values, dtype=np.float64), posinf=0.0, neginf=0.0).tolist())
