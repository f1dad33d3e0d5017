"""Avoidance of slow and failing nodes, which are closed to the jobs that should avoid them (pure)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from placement.cluster.cluster import Cluster, Node, add_amounts, slots, without
from placement.cluster.jobs import JobView
from placement.cluster.node_record import AvoidedNodes
from placement.policies.shared.base import admit
from placement.reasons import Cause, Reason, nodes_of

NODE_LABEL = "ray.io/node-id"
"""Node label with the node's id (Ray's own)."""

SLOW = 1.4
"""Times longer that a step takes on a node which is worth leaving."""

SEVERAL = 2
"""Jobs that must have seen a node slow before others leave it as well."""


def avoid_slow(views: Sequence[JobView], cluster: Cluster) -> tuple[Sequence[JobView], Cluster]:
    """Return the jobs and the cluster to show to the policy, changed so that jobs leave slow nodes.

    A node that several jobs have measured as slow counts as draining, unless fewer jobs could then run. A node that
    only one job has measured as slow is closed to that job alone, unless the job would have to shrink, since a slow
    worker is still useful. If no node is slow, the same objects are returned.
    """
    if not any(view.slow_nodes for view in views):
        return views, cluster
    slow = {view.job: frozenset(node for node, times in view.slow_nodes.items() if times >= SLOW) for view in views}
    seen = collections.Counter(node for nodes in slow.values() for node in nodes)
    rest = cluster.draining({node for node, jobs in seen.items() if jobs >= SEVERAL})
    floors = admit(views, cluster).floors
    if rest != cluster and admit(views, rest).floors != floors:
        rest = cluster
    open_nodes = {node.node_id for node in rest.nodes if not node.draining}
    closed = {job: nodes & open_nodes for job, nodes in slow.items() if nodes & open_nodes}
    changed = [_slow_for(view, closed[view.job], views, rest) if view.job in closed else view for view in views]
    labelled = _labelled(rest)
    if closed and admit(changed, labelled).floors == floors:
        return changed, labelled
    return views, rest


def _slow_for(view: JobView, slow: Collection[str], views: Sequence[JobView], cluster: Cluster) -> JobView:
    """Return the job excluded from these nodes if all of its workers fit on other nodes; otherwise unchanged."""
    if NODE_LABEL in view.label_selector:
        return view
    others = {each.job: dict(each.allocation) for each in views if each is not view and each.allocation}
    nodes = cluster.by_id()
    known = {job: {n: count for n, count in at.items() if n in nodes} for job, at in others.items()}
    left = without(cluster, known, {each.job: each.bundle for each in views})
    room = sum(
        node.slots(view.bundle)
        for node in left.nodes
        if not node.draining and node.node_id not in slow and node.matches(view.selector)
    )
    if room < max(view.workers, view.min_workers):
        return view
    return _closed_to(view, slow)


def avoid_failing(
    views: Sequence[JobView], cluster: Cluster, avoided: AvoidedNodes
) -> tuple[Sequence[JobView], Cluster, Mapping[str, Reason]]:
    """Return the jobs and the cluster to show to the policy, changed so that jobs leave nodes where workers fail.

    A job avoids no node if the remaining nodes could never run its minimum, or have no room for it now. If it has
    trained, it then stays on its nodes, where it works; if not, the next start shows whether the program is at fault. A
    job that has not trained waits for another node only if a disk or GPU made its own workers fail. No job loses its
    minimum to another job that leaves a node.

    Returns the jobs, the cluster (both unchanged if nothing is avoided), and the reason for each job excluded from a
    node.
    """
    if not avoided.by_all and not avoided.by_job:
        return views, cluster, {}
    closed = _closed(views, cluster, avoided)
    if not closed:
        return views, cluster, {}
    labelled = _labelled(cluster)
    running = admit(views, cluster).floors.keys()
    trained = {view.job for view in views if view.most_workers}
    while closed:
        changed = [_closed_to(view, closed[view.job]) if view.job in closed else view for view in views]
        lost = running - admit(changed, labelled).floors.keys()
        own = {v.job: avoided.broken.get((v.job, v.submitted_s), ()) for v in views if v.job in closed}
        waiting = {job for job in closed if job not in trained and closed[job].keys() <= set(own[job])}
        if lost <= waiting:
            why = {job: "; ".join(reasons[node] for node in sorted(reasons)) for job, reasons in closed.items()}
            return changed, labelled, {j: Reason(Cause.AVOIDED, nodes_of(closed[j]), why[j]) for j in closed}
        for job in (lost & closed.keys()) - waiting or (trained & closed.keys()) or set(closed):
            kept = {} if job in trained else {n: why for n, why in closed[job].items() if n in own[job]}
            if kept and job not in waiting:
                closed[job] = kept
            else:
                del closed[job]
    return views, cluster, {}


def _labelled(cluster: Cluster) -> Cluster:
    named = (dataclasses.replace(node, labels={**node.labels, NODE_LABEL: node.node_id}) for node in cluster.nodes)
    return Cluster(nodes=tuple(named))


def _closed_to(view: JobView, nodes: Collection[str]) -> JobView:
    condition = f"!in({','.join(sorted(nodes))})"
    return dataclasses.replace(view, label_selector={**view.label_selector, NODE_LABEL: condition})


def _closed(views: Sequence[JobView], cluster: Cluster, avoided: AvoidedNodes) -> dict[str, dict[str, str]]:
    """Return the nodes that each job may avoid, with reasons; other nodes must be able to hold its minimum.

    Room assigned to one job is not offered to the next. A job that has not trained may also use what others hold beyond
    their minimums; if a device made it fail, it waits for room.
    """
    by_id = cluster.by_id()
    free, spare = _free(views, cluster), _free(views, cluster, of_minimums=True)
    others: dict[object, tuple[list[Node], int]] = {}  # jobs are many, kinds of them few
    closed = dict[str, dict[str, str]]()
    for view in views:
        reasons = {node: why for node, why in avoided.of(view).items() if node in by_id}
        if not reasons or NODE_LABEL in view.label_selector:
            continue
        kind = (tuple(sorted(view.bundle.items())), tuple(sorted(view.selector.items())), frozenset(reasons))
        if kind not in others:
            nodes = [node for node in cluster.nodes if node.node_id not in reasons and node.matches(view.selector)]
            others[kind] = nodes, sum(slots(node.total, view.bundle) for node in nodes)
        nodes, possible = others[kind]
        waits = not view.most_workers and (view.job, view.submitted_s) in avoided.broken
        if possible >= view.min_workers and (waits or _reserve(view, nodes, free if view.most_workers else spare)):
            closed[view.job] = reasons
    return closed


def _free(views: Sequence[JobView], cluster: Cluster, *, of_minimums: bool = False) -> dict[str, dict[str, float]]:
    """Return free resources by node; with ``of_minimums``, as if every job held only its minimum."""
    by_id, held = cluster.by_id(), dict[str, dict[str, int]]()
    for view in views:
        beyond = max(0, sum(view.allocation.values()) - view.min_workers) if of_minimums else 0
        kept = {node: count - beyond for node, count in view.allocation.items() if node in by_id and count > beyond}
        if kept:
            held[view.job] = kept
    left = without(cluster, held, {view.job: view.bundle for view in views})
    return {node.node_id: dict(node.free) for node in left.nodes}


def _reserve(view: JobView, nodes: Sequence[Node], free: dict[str, dict[str, float]]) -> bool:
    """Reserve the missing part of the job's minimum on these nodes; return False, reserving none, if it cannot fit."""
    there = [node.node_id for node in nodes if not node.draining]
    lacking = view.min_workers - sum(view.allocation.get(node, 0) for node in there)
    taken = dict[str, int]()
    for node in there:
        if lacking <= 0:
            break
        if here := min(lacking, slots(free[node], view.bundle)):
            taken[node] = here
            lacking -= here
    if lacking > 0:
        return False
    for node, workers in taken.items():
        add_amounts(free[node], view.bundle, -workers)
    return True
