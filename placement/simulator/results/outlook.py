"""Outlook for running jobs on other nodes: predicted workers and end times, from the jobs' fitted models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from placement.allocator.config import AllocatorConfig
from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobEnded, JobHeartbeat, NodesChanged, TimePassed
from placement.allocator.snapshot import Trigger
from placement.cluster.cluster import Cluster, Node, by_node
from placement.cluster.jobs import JobView
from placement.errors import InputError
from placement.goodput.remaining import remaining
from placement.goodput.speeds import GoodputCache, model_of, table
from placement.planning.constraints import Constraints
from placement.planning.plan import NO_CONSTRAINTS
from placement.policies import make_policy
from placement.policies.shared.base import Policy
from placement.simulator.nodes.clusters import parse_cluster
from placement.text import count

CPU_NODES = "cpu"
"""Name of nodes that have CPUs instead of GPUs: ``cpu:2x8``."""

_PLENTY = 1e6
_ACCELERATOR = "accelerator_type:"
_CONFIG = AllocatorConfig(rounds=True, silence_s=math.inf)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Predicted number of workers and end time for one job; see :func:`outlook`."""

    job: str
    workers: int  # that it would have at first
    nodes: Mapping[str, int]
    goodput: float | None  # useful samples per second with these; None while the job has no model
    # seconds from now until it would be done; None if its length is not known, or it would never run
    ends_s: float | None
    reason: str


def read_nodes(text: str, views: Sequence[JobView]) -> Cluster:
    """Return the nodes of a cluster string such as ``t4:2x4``; the type ``cpu`` counts CPUs instead of GPUs."""
    others = {name for view in views for name in view.bundle if name not in ("GPU", "CPU")}
    return Cluster(nodes=tuple(_furnished(node, others) for node in parse_cluster(text).nodes))


def _furnished(node: Node, others: set[str]) -> Node:
    devices = node.total["GPU"]
    amounts = {"CPU": devices} if node.gpu_type == CPU_NODES else {"GPU": devices, "CPU": _PLENTY}
    kind = f"{_ACCELERATOR}{node.gpu_type}"
    amounts |= {name: _PLENTY for name in sorted(others) if name == kind or not name.startswith(_ACCELERATOR)}
    labels = {} if node.gpu_type == CPU_NODES else node.labels
    return Node(node_id=node.node_id, total=amounts, free=amounts, labels=labels)


def outlook(
    views: Sequence[JobView],
    cluster: Cluster,
    policy: str | Policy,
    now_s: float,
    *,
    stay: bool = False,
    constraints: Constraints = NO_CONSTRAINTS,
) -> tuple[Outlook, ...]:
    """Predict each job's workers on these nodes, and when it ends; the policy decides again whenever a job ends.

    The prediction stops when every job with a known length has ended. Between decisions, a job progresses at goodput /
    M0 iterations per second, according to its current model. On a GPU type that it has never run on, its model for a
    type that it has run on is used. Resizes are free. Jobs without a declared length or a model keep their workers
    until the end.

    Args:
        stay: True if the jobs already run on these nodes, so that the result describes their current workers; False if
            they all start from scratch.
    """
    config = dataclasses.replace(
        _CONFIG,
        tenants=constraints.tenants,
        one_multi_node_job_per_node=constraints.one_multi_node_job_per_node,
        avoid_slow_nodes=constraints.avoid_slow_nodes,
    )
    try:
        core = AllocatorCore(make_policy(policy), config)
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from error
    core.handle(NodesChanged(cluster=cluster), now_s)
    running = {view.job: view if stay else view.placed({}) for view in views}
    missing = {job: _missing(view) for job, view in running.items()}
    first: dict[str, Outlook] = {}
    ends: dict[str, float] = {}
    at_s = now_s
    while running:
        targets = _share_out(core, running, at_s)
        rates = {job: _rate(view, targets[job][0], cluster) for job, view in running.items()}
        if not first:
            first = {job: _row(view, *targets[job], rates[job]) for job, view in running.items()}
            if stay:
                first = {job: _present_row(view, cluster, first[job]) for job, view in running.items()}
        left = {job: missing[job] / rate if rate else math.inf for job, rate in rates.items()}
        job = min(sorted(left), key=lambda job: left[job])
        step_s = left[job]
        if step_s == math.inf:
            break
        at_s += step_s
        ends[job] = at_s - now_s
        del running[job]
        core.handle(JobEnded(job=job), at_s)
        done = {name: (rates[name] or 0.0) * step_s for name in running}
        missing = {name: max(missing[name] - done[name], 0.0) for name in running}
        running = {name: _advanced(view, targets[name][0], done[name]) for name, view in running.items()}
    return tuple(dataclasses.replace(first[view.job], ends_s=ends.get(view.job)) for view in views)


def _share_out(
    core: AllocatorCore, running: Mapping[str, JobView], at_s: float
) -> dict[str, tuple[Mapping[str, int], str]]:
    """Return every job's target nodes, with the reason; raise InputError if the decision was refused."""
    for view in running.values():
        core.handle(JobHeartbeat(view=view), at_s)
    core.handle(TimePassed(), at_s)
    log = core.log
    if log and log[-1].trigger is Trigger.REFUSED and log[-1].time_s == at_s:
        raise InputError(log[-1].reason.explained)
    states = core.snapshot().jobs
    return {job: (states[job].target, str(states[job].reason)) for job in running}


def _row(view: JobView, nodes: Mapping[str, int], reason: str, rate: float | None) -> Outlook:
    goodput = None if rate is None or view.init_batch_size is None else rate * view.init_batch_size
    return Outlook(job=view.job, workers=sum(nodes.values()), nodes=nodes, goodput=goodput, ends_s=None, reason=reason)


def _present_row(view: JobView, cluster: Cluster, decided: Outlook) -> Outlook:
    """Return the outlook for a job's current workers; its reason mentions any different decision by the allocator."""
    if dict(view.allocation) == dict(decided.nodes):
        return decided
    reason = f"decided on {count(decided.workers)}: {decided.reason}"
    return _row(view, view.allocation, reason, _rate(view, view.allocation, cluster))


def _rate(view: JobView, nodes: Mapping[str, int], cluster: Cluster) -> float | None:
    """Return iterations at M0 per second, by measured times before the model, as policies do; None without a model."""
    by_id = cluster.by_id()
    gpu = min((by_id[node].gpu_type for node in by_node(nodes) if node in by_id), default="")
    model = model_of(view, gpu)
    if model is None or view.init_batch_size is None:
        return None
    if not nodes:
        return 0.0
    on, workers = (np.array([[count]], dtype=np.int64) for count in (len(nodes), sum(nodes.values())))
    return float(table([view], gpu, on, workers, GoodputCache())[0, 0]) / model.init_batch_size


def _missing(view: JobView) -> float:
    """Return the iterations until the job's end; infinity if epochs, or the length of one, are unknown."""
    progress = view.progress
    if progress is None or not (progress.epoch_ends or progress.usual_epoch):
        return math.inf
    missing = remaining(progress)
    return math.inf if missing is None else missing


def _advanced(view: JobView, nodes: Mapping[str, int], done: float) -> JobView:
    """Return the job after ``done`` more iterations on these nodes."""
    placed = dataclasses.replace(view.placed(nodes), most_workers=max(view.most_workers, sum(nodes.values())))
    if view.progress is None or not done:
        return placed
    progress = dataclasses.replace(view.progress, done=view.progress.done + done)
    usual = progress.usual_epoch
    if usual is not None and not progress.epoch_ends and progress.done >= usual:
        progress = dataclasses.replace(progress, epoch_ends=(usual,))
    return dataclasses.replace(placed, progress=progress)
