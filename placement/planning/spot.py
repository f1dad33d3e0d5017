"""Jobs that keep their minimum off spot nodes (``JobView.spot`` = ``mixed``), enforced around every policy.

``avoid`` is a condition on each node (``JobView.selector``), which policies and packing check anyway. ``mixed`` is a
condition on the whole placement: at least ``min_workers`` on on-demand nodes. A policy decides how many workers a job
gets and where; workers are then swapped between nodes of one GPU type until every mixed job has its minimum on
on-demand nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from placement.cluster.cluster import GPU_TYPE_LABEL, MARKET_LABEL, SPOT, Allocation, Cluster, Node, without
from placement.cluster.jobs import JobView
from placement.cluster.packing import FreeResources, pack
from placement.planning.multi_node import shared
from placement.planning.problem import Plan, Problem, Solver, by_precedence
from placement.reasons import Cause, Reason


def on_demand_workers(place: Mapping[str, int], nodes: Mapping[str, Node]) -> int:
    """Return how many workers of a placement (workers keyed by node id) are on on-demand nodes."""
    return sum(workers for node_id, workers in place.items() if node_id in nodes and not nodes[node_id].spot)


def with_minimums_on_demand(
    problem: Problem, solve: Solver, least: Mapping[str, int], running: Collection[str]
) -> Plan:
    """Return the policy's plan, changed so that each mixed job (``JobView.spot``) has its minimum on demand.

    If that is impossible, a waiting job does not start. A running job continues, and its reason says so, since stopping
    it would cost more than running on a spot node that may be reclaimed.

    Args:
        running: Jobs that have workers. ``problem`` may show an earlier round's outcome, in which more jobs run.
    """
    mixed = {view.job: view for view in problem.views if view.job in least}
    if not mixed or not any(node.spot for node in problem.cluster.nodes):
        return solve(problem)
    order = [view.job for view in by_precedence(problem)]
    shut = _shut_out(problem, least)
    waits = {job: Reason(Cause.ON_DEMAND, (least[job],)) for job in shut}
    while True:
        plan = solve(problem.only(job for job in order if job not in shut))
        wanted = {job: least[job] for job in order if job in mixed and job in plan.allocation}
        settled, unsettled = _swap(plan, problem, wanted)
        late = _giving_way(plan, problem, unsettled, least, running) if unsettled else {}
        if not late:
            break
        shut |= late.keys()
        waits |= late
    notes = {job: Reason(Cause.ON_SPOT, (least[job],)) for job in unsettled}
    return settled.noted(notes).plus(Plan(allocation={}, reasons=waits))


def _shut_out(problem: Problem, least: Mapping[str, int]) -> set[str]:
    """Return waiting mixed jobs whose minimum does not fit on on-demand nodes beside minimums of higher precedence."""
    staying = Cluster(nodes=tuple(node for node in problem.cluster.nodes if not node.spot))
    free = FreeResources(staying)
    shut = set()
    for view in by_precedence(problem):
        served = view.spot == "prefer" or free.add(_off_spot_nodes(view), least.get(view.job, view.min_workers))
        if not served and view.spot == "mixed" and not view.workers:
            shut.add(view.job)
    return shut


def _giving_way(
    plan: Plan, problem: Problem, unsettled: Sequence[str], least: Mapping[str, int], running: Collection[str]
) -> dict[str, Reason]:
    """Return jobs that must not start, with reasons, for others' minimums on demand; empty if none can give way."""
    # What fitted beside minimums may not fit beside what the policy gave to others. A job that starts gives way.
    present = {view.job for view in problem.views if view.workers}
    starting = [job for job in unsettled if job not in present]
    if starting:
        return {job: Reason(Cause.ON_DEMAND, (least[job],)) for job in starting}
    first = unsettled[-1]
    late = _newcomers(plan, problem, first)
    if late:
        return {late[-1]: Reason(Cause.ON_DEMAND_KEPT, (first,))}
    # What an earlier round has started does not run yet: it gives way as well.
    return {job: Reason(Cause.ON_DEMAND, (least[job],)) for job in [job for job in unsettled if job not in running][:1]}


def _newcomers(plan: Plan, problem: Problem, first: str) -> list[str]:
    """Return jobs after ``first`` in precedence that this plan starts on on-demand nodes."""
    nodes = problem.cluster.by_id()
    order = by_precedence(problem)
    behind = order[[view.job for view in order].index(first) :]
    waiting = [view.job for view in behind if not view.workers]
    return [job for job in waiting if on_demand_workers(plan.allocation.get(job, {}), nodes)]


def _swap(plan: Plan, problem: Problem, least: Mapping[str, int]) -> tuple[Plan, list[str]]:
    """Return the plan with workers swapped so that these jobs have their minimums on demand.

    The second value lists the jobs that cannot have theirs, lowest precedence first. ``least`` is in the order of
    precedence: the last job gives way first.
    """
    nodes = problem.cluster.by_id()
    views = {view.job: view for view in problem.views}
    lacking = [job for job, workers in least.items() if on_demand_workers(plan.allocation[job], nodes) < workers]
    unsettled: list[str] = []
    while lacking:
        wanted = {job: workers for job, workers in least.items() if job not in unsettled}
        better = _exchanged(plan.allocation, views, problem.cluster, wanted)
        if better is not None and not (problem.apart and shared(better)):
            return dataclasses.replace(plan, allocation=better), unsettled
        unsettled.append(lacking.pop())  # one after the other gives way until the rest can be had
    return plan, unsettled


def _exchanged(
    allocation: Allocation, views: Mapping[str, JobView], cluster: Cluster, least: Mapping[str, int]
) -> Allocation | None:
    """Return the allocation with these jobs' minimums on demand, with smaller sizes if needed; None if impossible."""
    nodes = cluster.by_id()
    bundles = {job: view.bundle for job, view in views.items()}
    kept = {}
    for job in least:
        held = {node: workers for node, workers in allocation[job].items() if not nodes[node].spot}
        view = _of_type(_off_spot_nodes(views[job]), allocation[job], nodes)
        kept[job] = dataclasses.replace(view, min_workers=1, max_workers=view.max_workers, held_at=None).placed(held)
    first = pack(least, list(kept.values()), cluster)
    if first.short:
        return None
    counts = {job: sum(place.values()) for job, place in allocation.items()}
    minimums = {job: views[job].min_workers for job in allocation}
    # What others have beyond their minimum gives way to a minimum, as everywhere: these come first if one is at stake.
    for stages in ((counts,), (minimums, counts)):
        found: dict[str, dict[str, int]] = {job: dict(first.allocation.get(job, {})) for job in allocation}
        for sizes in stages:
            missing = {job: max(workers - sum(found[job].values()), 0) for job, workers in sizes.items()}
            rest = [_missing_part(views[job], place, found[job], nodes) for job, place in allocation.items()]
            more = pack(missing, rest, without(cluster, found, bundles)).allocation
            found = {job: _sum(place, more.get(job, {})) for job, place in found.items()}
        if all(sum(place.values()) >= minimums[job] for job, place in found.items()):
            return found
    return None


def _missing_part(
    view: JobView, place: Mapping[str, int], has: Mapping[str, int], nodes: Mapping[str, Node]
) -> JobView:
    """Return the job reduced to its missing workers, restricted to the GPU type of its placement."""
    low = max(view.min_workers - sum(has.values()), 1)
    left = {node: workers - has.get(node, 0) for node, workers in place.items()}
    part = dataclasses.replace(_of_type(view, place, nodes), min_workers=low, held_at=None)
    return part.placed({node: workers for node, workers in left.items() if workers > 0})


def _off_spot_nodes(view: JobView) -> JobView:
    """Return the job with spot nodes excluded."""
    if view.spot == "avoid":
        return view
    return dataclasses.replace(view, spot="avoid", label_selector={**view.label_selector, MARKET_LABEL: f"!{SPOT}"})


def _of_type(view: JobView, place: Mapping[str, int], nodes: Mapping[str, Node]) -> JobView:
    """Return the job restricted to the GPU type of its placement, if that is a single named type."""
    types = {nodes[node].gpu_type for node in place}
    if len(types) != 1 or "" in types:
        return view
    return dataclasses.replace(view, label_selector={**view.label_selector, GPU_TYPE_LABEL: types.pop()})


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {node: one.get(node, 0) + other.get(node, 0) for node in {**one, **other}}
