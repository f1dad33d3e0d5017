"""Problem that a policy solves, its solution, and the division of a large problem into smaller ones.

Constraints that policies are not aware of (priorities, tenants...) are enforced by querying a policy about some of the
jobs on part of the cluster, one group of jobs after another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from placement.cluster.cluster import Allocation, Cluster, without
from placement.cluster.jobs import JobView
from placement.cluster.packing import FreeResources, pack
from placement.planning.multi_node import keep_apart
from placement.reasons import Cause, Reason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan that assigns each job's workers to nodes, with a reason for every job."""

    allocation: Allocation  # workers per job and node
    reasons: Mapping[str, Reason]  # why, per job
    guaranteed: frozenset[str] = frozenset()  # jobs whose deadline will be met
    # workers per job and node that the jobs' own policies asked for (``placement.planning.wishes``)
    granted: Allocation = dataclasses.field(default_factory=dict)

    def plus(self, other: Plan) -> Plan:
        """Return the allocations and reasons of this plan and ``other``; for a job in both, ``other`` wins."""
        return Plan(allocation={**self.allocation, **other.allocation}, reasons={**self.reasons, **other.reasons})

    def noted(self, notes: Mapping[str, Reason]) -> Plan:
        """Return the plan with ``notes`` as its jobs' reasons; former reasons become the notes' figures."""
        said = {job: reason.because(notes[job]) for job, reason in self.reasons.items() if job in notes}
        return dataclasses.replace(self, reasons={**self.reasons, **said})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Jobs to decide about, with the part of the cluster that they share."""

    views: Sequence[JobView]
    cluster: Cluster  # the room that is theirs
    # nodes that carry a job which spans several nodes and is not one of these
    multi_node_nodes: frozenset[str] = frozenset()
    guaranteed: frozenset[str] = frozenset()  # those of the jobs whose minimum was raised to what their deadline needs
    apart: bool = False  # whether two jobs that span several nodes may share none of them
    kept: frozenset[str] = frozenset()  # running jobs that nodes which have come since must not stop

    def only(self, jobs: Iterable[str]) -> Problem:
        """Return the problem restricted to the jobs with these names, on the same cluster."""
        wanted = set(jobs)
        return dataclasses.replace(self, views=[view for view in self.views if view.job in wanted])

    def beside(self, decided: Allocation, reserved: Allocation | None = None) -> Problem:
        """Return the problem on the resources left after subtracting the workers of two allocations."""
        bundles = {view.job: view.bundle for view in self.views}
        cluster = without(self.cluster, decided, bundles)
        places = [*decided.values(), *(reserved or {}).values()]
        multi_node_nodes = self.multi_node_nodes.union(*(nodes for nodes in places if len(nodes) > 1))
        return dataclasses.replace(
            self,
            cluster=without(cluster, reserved, bundles) if reserved else cluster,
            multi_node_nodes=multi_node_nodes,
        )


Solver: TypeAlias = Callable[[Problem], Plan]


def secured(view: JobView) -> bool:
    """True if no other job can claim the job's minimum: the job is running and not preemptible."""
    return not view.preemptible and view.workers >= view.min_workers


def stays(view: JobView, problem: Problem) -> bool:
    """True if the job must keep its minimum: it may not be stopped at all, or not in this decision (``kept``)."""
    return secured(view) or view.job in problem.kept


def by_precedence(problem: Problem) -> list[JobView]:
    """Return the jobs in the order that their minimums are served.

    Running jobs that must not be stopped come first; the others are sorted by priority, guaranteed deadline, running
    before waiting, and arrival.
    """
    guaranteed = problem.guaranteed
    return sorted(
        problem.views,
        key=lambda v: (not stays(v, problem), -v.priority, v.job not in guaranteed, v.workers == 0, v.arrival),
    )


def serve(view: JobView, room: FreeResources) -> bool:
    """Reserve room for the job's minimum, preferably on its current nodes; return False if it does not fit."""
    taken: list[tuple[int, int]] = []
    missing = view.min_workers
    fits = room.slots(view) if view.allocation else None
    for node_id, workers in sorted(view.allocation.items(), key=lambda item: (-item[1], item[0])):
        index = room.index(node_id)
        here = 0 if index is None or fits is None else min(workers, missing, int(fits[index]))
        if index is not None and here:
            room.take(view, index, here)
            taken.append((index, here))
            missing -= here
    if missing == 0 or room.add(view, missing):
        return True
    for index, here in taken:
        room.take(view, index, -here)
    return False


def minimums(problem: Problem) -> Allocation:
    """Return placements of the minimum workers for as many jobs as fit, by precedence; running workers stay put."""
    served = _served(problem)
    while True:
        packing = pack({view.job: view.min_workers for view in served}, served, problem.cluster)
        if problem.apart:
            packing = keep_apart(packing, served, problem.cluster, problem.multi_node_nodes)
        if not packing.short:
            return packing.allocation
        served.pop()  # scattered room: the last one gives way


def _served(problem: Problem) -> list[JobView]:
    """Return jobs whose minimums fit together, by precedence.

    A job that fits on many nodes makes way on nodes that are the only ones another job's labels allow.
    """
    nodes = problem.cluster.nodes
    room = FreeResources(problem.cluster)
    reach = {view.job: sum(node.matches(view.selector) for node in nodes) for view in problem.views}
    # Mixed jobs want nodes that their labels do not name (``planning.spot``): these stay as they come.
    bound = any(count < len(nodes) for count in reach.values()) and all(v.spot != "mixed" for v in problem.views)
    served: list[JobView] = []
    for view in by_precedence(problem):
        if serve(view, room):
            served.append(view)
        elif bound:
            again = FreeResources(problem.cluster)
            together = sorted([*served, view], key=lambda each: reach[each.job])
            if all(serve(each, again) for each in together):
                served, room = [*served, view], again
    return served


def usable(view: JobView, room: FreeResources) -> int:
    """Return the number of workers that the job could use in this room; 0 if its minimum does not fit."""
    most = view.held_at if view.held_at is not None else view.useful_workers
    fits = min(most, int(room.slots(view).sum()))
    return fits if fits >= view.min_workers else 0


def guard(problem: Problem, solve: Solver) -> Plan:
    """Query the policy for a plan, and enforce each job's guaranteed minimum.

    If the answer leaves such a job without workers, the policy is queried again for only those jobs whose minimums fit
    together, by precedence. A running job that still gets nothing keeps its minimum on its current nodes.
    """
    plan = solve(problem)
    safe = [view for view in problem.views if stays(view, problem) or view.job in problem.guaranteed]
    if all(view.job in plan.allocation for view in safe):
        return plan
    kept = minimums(problem)
    why = Reason(Cause.NOT_BESIDE)
    waits = Plan(allocation={}, reasons={view.job: why for view in problem.views if view.job not in kept})
    stay: dict[str, Mapping[str, int]] = {}
    while True:
        plan = solve(problem.beside(stay).only(set(kept) - set(stay)))
        lost = [v.job for v in safe if stays(v, problem) and v.job in kept and v.job not in {*stay, *plan.allocation}]
        if not lost:
            break
        stay.update({job: kept[job] for job in lost})
    held = Plan(allocation=stay, reasons=dict.fromkeys(stay, Reason(Cause.SECURED)))
    return waits.plus(plan).plus(held)


def by_priority(problem: Problem, solve: Solver) -> Plan:
    """Return a plan made by querying the policy for one priority after another, highest first.

    Minimums are reserved first, in order of precedence. Jobs of a higher priority may then grow into all the room that
    lower priorities' minimums leave free, and jobs of the next priority into the rest.
    """
    levels = sorted({view.priority for view in problem.views}, reverse=True)
    if len(levels) <= 1:
        return guard(problem, solve)
    kept = minimums(problem)
    plan = Plan(allocation={}, reasons={})
    for level in levels:
        later = {view.job: kept[view.job] for view in problem.views if view.priority < level and view.job in kept}
        mine = [view.job for view in problem.views if view.priority == level]
        part = guard(problem.beside(plan.allocation, later).only(mine), solve)
        if level < levels[0]:
            has = {job: sum(place.values()) for job, place in part.allocation.items()}
            own = problem.only(mine).views
            short = [v.job for v in own if has.get(v.job, 0) < (v.held_at or v.useful_workers)]
            part = part.noted(dict.fromkeys(short, Reason(Cause.PRIORITY, (level,))))
        plan = plan.plus(part)
    return plan
