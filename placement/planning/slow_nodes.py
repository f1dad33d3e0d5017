"""Nodes on which steps are slow: who has seen that leaves them, and all jobs do where several have (pure)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence

from placement.cluster.cluster import Cluster, without
from placement.cluster.jobs import JobView
from placement.policies.shared.base import admit

NODE_LABEL = "ray.io/node-id"
"""Node label with the node's id (Ray's own)."""

SLOW = 1.4
"""Times longer that a step takes on a node which is worth leaving."""

SEVERAL = 2
"""Jobs that must have seen a node slow before others leave it as well."""


def avoid_slow(views: Sequence[JobView], cluster: Cluster) -> tuple[Sequence[JobView], Cluster]:
    """The jobs and the cluster as a policy is to see them, so that slow nodes are left.

    A node that several jobs have seen slow counts as draining, unless fewer jobs could then run. One that only one job
    has seen is closed to that job alone, unless it would have to shrink for that: a slow worker still does some work.

    Returns:
        The very same objects where no node is slow.
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
    named = (dataclasses.replace(node, labels={**node.labels, NODE_LABEL: node.node_id}) for node in rest.nodes)
    labelled = Cluster(nodes=tuple(named))
    if closed and admit(changed, labelled).floors == floors:
        return changed, labelled
    return views, rest


def _slow_for(view: JobView, slow: Collection[str], views: Sequence[JobView], cluster: Cluster) -> JobView:
    """The job as one that does not run on these nodes, if all its workers find room on others."""
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
    condition = f"!in({','.join(sorted(slow))})"
    return dataclasses.replace(view, label_selector={**view.label_selector, NODE_LABEL: condition})
