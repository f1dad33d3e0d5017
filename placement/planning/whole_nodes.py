"""A preference for whole nodes: sizes that fill them, and no other job on them. Nothing is left idle for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from placement.cluster.cluster import Allocation, Cluster, slots
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView
from placement.cluster.packing import pack
from placement.planning.multi_node import shared
from placement.planning.problem import Plan, Problem, Solver


def in_whole_nodes(problem: Problem, solve: Solver, worth: Mapping[str, int]) -> Plan:
    """Ask, and once more with such sizes rounded down to whole nodes if they are not; taken if nothing idles for it.

    Args:
        problem: the jobs and their room.
        solve: answers.
        worth: workers that a whole node holds, of each job that prefers whole nodes.
    """
    plan = solve(problem)
    limits: dict[str, int] = {}
    for view in problem.views:
        node, workers = worth.get(view.job, 0), sum(plan.allocation.get(view.job, {}).values())
        if node and workers > node and workers % node and view.held_at is None:
            rounded = workers - workers % node
            if rounded >= view.min_workers:
                limits[view.job] = rounded
    if not limits:
        return plan
    views = [
        dataclasses.replace(view, max_workers=limits[view.job]) if view.job in limits else view
        for view in problem.views
    ]
    rounded_plan = solve(dataclasses.replace(problem, views=views))
    room = FreeResources(problem.beside(rounded_plan.allocation).cluster)
    idle = any(room.slots(view).any() for view in views if view.job in limits)
    return plan if idle else rounded_plan


def node_worth(view: JobView, cluster: Cluster) -> int:
    """How many of the job's workers the largest node that it may use holds when it is empty."""
    fitting = [node for node in cluster.nodes if not node.draining and node.matches(view.selector)]
    return max((slots(node.total, view.bundle) for node in fitting), default=0)


def on_nodes_of_their_own(problem: Problem, plan: Plan, *, apart: bool) -> Plan:
    """The same sizes with no other job on the nodes of jobs that prefer whole nodes, if all workers find a place so."""
    shy = [view for view in problem.views if view.whole_nodes and view.job in plan.allocation]
    if not any(_shares(view.job, plan.allocation) for view in shy):
        return plan
    sizes = {job: sum(place.values()) for job, place in plan.allocation.items()}
    places: dict[str, Mapping[str, int]] = {}
    left = problem.cluster
    for view in sorted(shy, key=lambda view: view.arrival):
        here = dataclasses.replace(view, allocation=plan.allocation[view.job])
        packing = pack({view.job: sizes[view.job]}, [here], left)
        if packing.short:
            return plan
        places.update(packing.allocation)
        left = Cluster(nodes=tuple(node for node in left.nodes if node.node_id not in packing.allocation[view.job]))
    others = [
        dataclasses.replace(view, allocation=plan.allocation[view.job])
        for view in problem.views
        if view.job in plan.allocation and view.job not in places
    ]
    packing = pack(sizes, others, left)
    found: Allocation = {**packing.allocation, **places}
    if packing.short or (apart and shared(found)):
        return plan
    return dataclasses.replace(plan, allocation=found)


def _shares(job: str, allocation: Allocation) -> bool:
    return any(node in place for node in allocation[job] for other, place in allocation.items() if other != job)
