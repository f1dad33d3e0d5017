"""Nodes on which workers have failed are closed to the jobs that avoid them (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from placement.cluster.cluster import Cluster, slots, without
from placement.cluster.jobs import JobView
from placement.cluster.node_record import AvoidedNodes
from placement.planning.slow_nodes import NODE_LABEL


def avoid_failing(
    views: Sequence[JobView], cluster: Cluster, avoided: AvoidedNodes
) -> tuple[Sequence[JobView], Cluster, Mapping[str, str]]:
    """The jobs and the cluster as a policy is to see them, so that nodes are left on which workers fail.

    A job whose minimum the other nodes could not run avoids none, and neither does one that has trained and finds no
    room for its minimum elsewhere now: it keeps what works. One that has yet to begin waits for other nodes.

    Returns:
        The very same objects where nothing is avoided, and by job why it is closed to which nodes.
    """
    if not avoided.by_all and not avoided.by_job:
        return views, cluster, {}
    changed, notes = list(views), dict[str, str]()
    here = {node.node_id for node in cluster.nodes}
    for index, view in enumerate(views):
        reasons = {node: why for node, why in avoided.of(view).items() if node in here}
        if reasons and NODE_LABEL not in view.label_selector and _may_avoid(view, reasons, views, cluster):
            condition = f"!in({','.join(sorted(reasons))})"
            changed[index] = dataclasses.replace(view, label_selector={**view.label_selector, NODE_LABEL: condition})
            notes[view.job] = "; ".join(reasons[node] for node in sorted(reasons))
    if not notes:
        return views, cluster, {}
    named = (dataclasses.replace(node, labels={**node.labels, NODE_LABEL: node.node_id}) for node in cluster.nodes)
    return changed, Cluster(nodes=tuple(named)), notes


def _may_avoid(view: JobView, closed: Collection[str], views: Sequence[JobView], cluster: Cluster) -> bool:
    """True if other nodes could run the job's minimum; of a job that has trained, if they have room for it now."""
    nodes = [node for node in cluster.nodes if node.node_id not in closed and node.matches(view.selector)]
    if sum(slots(node.total, view.bundle) for node in nodes) < view.min_workers:
        return False
    if not view.most_workers:
        return True
    by_id = cluster.by_id()
    held = {each.job: {n: k for n, k in each.allocation.items() if n in by_id} for each in views if each is not view}
    left = without(cluster, {job: at for job, at in held.items() if at}, {each.job: each.bundle for each in views})
    there = {node.node_id for node in nodes if not node.draining}
    return sum(node.slots(view.bundle) for node in left.nodes if node.node_id in there) >= view.min_workers
