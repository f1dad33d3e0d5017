"""A part of the cluster, of which a tenant may use so much and no more."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from placement.cluster.cluster import Allocation, Cluster, Node, Resources, slots, used_on_nodes
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView, worker_kind
from placement.planning.problem import Problem


def within(problem: Problem, ceiling: Resources, first: Allocation) -> Problem:
    """The same problem with so much of the cluster at most; resources that are not named are not limited.

    The part consists of the given places, then of what the jobs' workers hold beyond them, then of more on these
    nodes, then of the roomiest others.

    Args:
        problem: the jobs and their room.
        ceiling: amounts by resource.
        first: places that must be in it, as far as they are these jobs'.
    """
    if not ceiling:
        return problem
    bundles = {view.job: view.bundle for view in problem.views}
    places = {view.job: first.get(view.job, {}) for view in problem.views}
    beyond = {
        view.job: {node: max(n - places[view.job].get(node, 0), 0) for node, n in view.allocation.items()}
        for view in problem.views
    }
    order = _order(problem)
    part = _Partition(problem.cluster, ceiling)
    for allocation in (places, beyond):
        used = used_on_nodes(allocation, bundles)
        for node in order:
            part.take(node, used.get(node.node_id, {}))
    # With workers of one kind, whole ones only: room for half a worker is of more use on another node.
    alike = len({tuple(sorted(bundle.items())) for bundle in bundles.values()}) == 1
    for node in order:
        part.fill(node, problem.views[0].bundle if alike else None)
    return dataclasses.replace(problem, cluster=part.cluster())


def _order(problem: Problem) -> list[Node]:
    """Nodes that some job can use: those with most of the jobs' workers, then the roomiest."""
    room = FreeResources(problem.cluster)
    fits = dict.fromkeys(room.node_ids, 0)
    for view in _kinds(problem.views):
        for node_id, workers in zip(room.node_ids, room.slots(view).tolist(), strict=True):
            fits[node_id] = max(fits[node_id], workers)
    here: dict[str, int] = {}
    for view in problem.views:
        for node_id, workers in view.allocation.items():
            here[node_id] = here.get(node_id, 0) + workers
    usable = [node for node in problem.cluster.nodes if fits.get(node.node_id)]
    return sorted(usable, key=lambda node: (-here.get(node.node_id, 0), -fits[node.node_id], node.node_id))


def _kinds(views: Sequence[JobView]) -> list[JobView]:
    """One job of each bundle and label selector."""
    return list({worker_kind(view): view for view in views}.values())


class _Partition:
    """What has been cut out of the cluster so far."""

    def __init__(self, cluster: Cluster, ceiling: Resources) -> None:
        self._cluster = cluster
        self._left = dict(ceiling)
        self._taken: dict[str, dict[str, float]] = {
            node.node_id: {r: 0.0 for r in ceiling if r in node.free} for node in cluster.nodes
        }

    def take(self, node: Node, amounts: Mapping[str, float]) -> None:
        """Take so much of a node, as far as it is there and below the ceiling."""
        taken = self._taken[node.node_id]
        for r in taken.keys() & amounts.keys():
            more = max(min(amounts[r], node.free[r] - taken[r], self._left[r]), 0.0)
            taken[r] += more
            self._left[r] -= more

    def fill(self, node: Node, bundle: Resources | None) -> None:
        """Take all of a node, of a given bundle a whole number."""
        taken = self._taken[node.node_id]
        goal = {r: taken[r] + min(node.free[r] - taken[r], self._left[r]) for r in taken}
        if bundle is not None:
            workers = slots(goal, {r: bundle.get(r, 0.0) for r in taken})
            goal = {r: workers * bundle.get(r, 0.0) for r in taken}
        self.take(node, {r: goal[r] - taken[r] for r in taken})

    def cluster(self) -> Cluster:
        """The part, as a cluster of the same nodes."""
        return Cluster(
            nodes=tuple(
                dataclasses.replace(node, free={**node.free, **self._taken[node.node_id]})
                for node in self._cluster.nodes
            )
        )
