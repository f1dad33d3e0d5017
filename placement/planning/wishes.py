"""Sizes requested by jobs' own policies (wishes), granted from slots that the allocation policy leaves unused.

The allocation policy sees neither the wishes nor the workers granted for them: it decides as if these slots were free.
A wish therefore takes no worker from another job. Granted workers are withdrawn as soon as the policy has a use for
their slots, by its own measure of goodput.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from placement.cluster.cluster import GPU_TYPE_LABEL, TOLERANCE, Allocation, Resources
from placement.cluster.jobs import JobView
from placement.cluster.packing import FreeResources
from placement.planning.problem import Plan, Problem
from placement.planning.tenants import Tenant
from placement.reasons import Cause, Reason
from placement.text import count


def without_wish(view: JobView, granted: Mapping[str, int]) -> JobView:
    """Return the job as the allocation policy should see it, without workers granted for its wish.

    A wish is the size that the job's own adaptation policy requests. The job keeps the workers that the allocation
    policy gave it, and at least its minimum if it has that many.
    """
    if not granted:
        return view if view.wished is None else dataclasses.replace(view, wished=None)
    place, spare = dict(view.allocation), max(view.workers - view.min_workers, 0)
    for node_id, workers in sorted(granted.items()):
        less = min(workers, place.get(node_id, 0), spare)
        if less:
            spare -= less
            place[node_id] -= less
    allocation = {node_id: workers for node_id, workers in place.items() if workers}
    return dataclasses.replace(view, wished=None, allocation=allocation)


def grant(problem: Problem, plan: Plan, tenants: Collection[Tenant]) -> Plan:
    """Return the plan plus workers that jobs' own policies request (wishes), in slots that the plan leaves free.

    Only running jobs whose size their user has not fixed are served, by priority and arrival. Granted workers stay in
    place while their slots are free, and are on nodes of the job's GPU type. They respect quotas, the preference for
    whole nodes and, if required, the rule of one multi-node job per node.
    """
    wishing = [v for v in problem.views if v.wished is not None and v.held_at is None and v.job in plan.allocation]
    if not wishing:
        return plan
    quotas = {tenant.name: tenant.quota for tenant in tenants if tenant.quota}
    slots = _FreeSlots(problem, plan.allocation, quotas)
    granted: dict[str, dict[str, int]] = {}
    notes: dict[str, Reason] = {}
    for view in sorted(wishing, key=lambda view: (-view.priority, view.arrival)):
        own = sum(plan.allocation[view.job].values())
        wanted = view.wished_workers
        given = slots.give(view, wanted - own)
        more = sum(given.values())
        if not view.sizes.allow(own + more):
            slots.take_back(view, given, own + more - max(view.sizes.at_most(own + more), own))
            more = sum(given.values())
        if given:
            granted[view.job] = given
        if own + more < wanted:
            notes[view.job] = Reason(Cause.WISH_IN_PART, (count(wanted), own + more))
        elif more:
            notes[view.job] = Reason(Cause.WISH, (count(wanted), more))
    return dataclasses.replace(plan.noted(notes), allocation=slots.allocation, granted=granted)


class _FreeSlots:
    """Free slots beside a plan, while they are assigned to jobs."""

    def __init__(self, problem: Problem, allocation: Allocation, quotas: Mapping[str, Resources]) -> None:
        self._room = FreeResources(problem.beside(allocation).cluster)
        self._views = {view.job: view for view in problem.views}
        self._quotas = quotas
        self._apart = problem.apart
        self._gpus = {node.node_id: node.labels.get(GPU_TYPE_LABEL) for node in problem.cluster.nodes}
        self.allocation: dict[str, dict[str, int]] = {job: dict(place) for job, place in allocation.items()}

    def give(self, view: JobView, most: int) -> dict[str, int]:
        """Reserve up to ``most`` slots for a job; return the number on each node."""
        given: dict[str, int] = {}
        place = self.allocation[view.job]
        for _ in range(most):
            node_id = self._next(view, place)
            if node_id is None:
                break
            index = self._room.index(node_id)
            assert index is not None, f"node {node_id} has a free slot"
            self._room.take(view, index, 1)
            place[node_id] = place.get(node_id, 0) + 1
            given[node_id] = given.get(node_id, 0) + 1
        return given

    def take_back(self, view: JobView, given: dict[str, int], workers: int) -> None:
        """Release this many of the workers given to a job, so that other jobs can use their slots."""
        place = self.allocation[view.job]
        for node_id in reversed(list(given)):
            less = min(given[node_id], workers)
            index = self._room.index(node_id)
            assert index is not None, f"node {node_id} had a free slot"
            self._room.take(view, index, -less)
            workers -= less
            for counts in (given, place):
                counts[node_id] -= less
                if not counts[node_id]:
                    del counts[node_id]

    def _next(self, view: JobView, place: Mapping[str, int]) -> str | None:
        """Return the node for the job's next worker: one with a worker to keep, another of its nodes, or the fullest.

        None if no node is available.
        """
        if self._quota_is_used(view):
            return None
        free = dict(zip(self._room.node_ids, self._room.slots(view).tolist(), strict=True))
        kinds = {self._gpus.get(node_id) for node_id in place}
        open_nodes = [
            node_id
            for node_id, fits in free.items()
            if fits and self._gpus.get(node_id) in kinds and not self._is_closed(view, place, node_id)
        ]
        present = view.allocation
        return min(
            open_nodes, key=lambda n: (place.get(n, 0) >= present.get(n, 0), n not in place, free[n], n), default=None
        )

    def _quota_is_used(self, view: JobView) -> bool:
        quota = self._quotas.get(view.tenant, {})
        used = dict.fromkeys(quota, 0.0)
        for job, place in self.allocation.items():
            other = self._views[job]
            for resource in used if other.tenant == view.tenant else ():
                used[resource] += sum(place.values()) * other.bundle.get(resource, 0.0)
        return any(used[r] + view.bundle.get(r, 0.0) > quota[r] + TOLERANCE for r in quota if view.bundle.get(r))

    def _is_closed(self, view: JobView, place: Mapping[str, int], node_id: str) -> bool:
        """True if the node is closed to the job, by a preference for whole nodes or by another multi-node job."""
        others = self._others(view, node_id)
        if node_id not in place and any(view.whole_nodes or other.whole_nodes for other in others):
            return True
        nodes = {*place, node_id}
        if not self._apart or len(nodes) == 1:
            return False
        return any(len(self.allocation[other.job]) > 1 for each in nodes for other in self._others(view, each))

    def _others(self, view: JobView, node_id: str) -> Sequence[JobView]:
        return [self._views[job] for job, at in self.allocation.items() if node_id in at and job != view.job]
