"""Constraints in real clusters that no policy handles itself; they are enforced around every policy.

From the outermost to the innermost: a job gets only sizes that it can train with; deadlines raise minimums; a worker
costs no more than it adds to its job's utility; mixed jobs have their minimum on on-demand nodes; tenants get their
shares; within a tenant, higher priorities are served first; jobs that may not be stopped keep their minimum; jobs that
prefer whole nodes get whole nodes. Each constraint queries the policy about some of the jobs on part of the cluster.
Since tenants come before priorities, a tenant cannot get more of the cluster by raising its jobs' priorities.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from placement.cluster.cluster import Allocation, Cluster, slots
from placement.cluster.jobs import JobView
from placement.cluster.packing import FreeResources, pack
from placement.goodput.remaining import seconds_to_end
from placement.goodput.step_time import Floats
from placement.planning.multi_node import check_apart, shared
from placement.planning.problem import Plan, Problem, Solver, by_precedence, by_priority, secured
from placement.planning.spot import with_minimums_on_demand
from placement.planning.tenants import Tenant, by_tenant, check_tenants
from placement.reasons import Cause, Reason
from placement.text import count


def minimum_satisfactory_share(view: JobView, slots: Sequence[int], now_s: float) -> int | str:
    """Return the fewest workers expected to meet the job's deadline, or a message saying why it cannot be met.

        remaining work x M0 / goodput(k) <= deadline - now,    less the cost of a change if k is above its current size

    with M0 the initial batch size and the remaining work estimated by ``seconds_to_end``.
    """
    assert view.deadline_s is not None, f"job {view.job} has no deadline"
    left_s = view.deadline_s - now_s
    if left_s <= 0:
        return "has passed"
    takes_s = seconds_to_end(view, slots)
    if takes_s is None:
        return "not known yet how long the job takes"
    takes_s[view.workers :] += view.resize_cost_s
    enough = np.flatnonzero(takes_s[view.min_workers - 1 :] <= left_s)
    if not len(enough):
        return f"cannot be met, not with {count(max(len(takes_s), view.min_workers))} either"
    workers = view.min_workers + int(enough[0])
    return view.sizes.at_least(workers) or workers


def guarantee(
    views: Sequence[JobView], cluster: Cluster, before: Collection[str], now_s: float, refused: Mapping[str, str]
) -> tuple[Problem, dict[str, Reason]]:
    """Raise each job's minimum to the number of workers needed to meet its deadline, if it can be met.

    Jobs with deadlines are considered after jobs that may not be stopped and jobs of higher priority, but before other
    jobs of the same priority; those that already had a guarantee come first. A job that does not fit beside the other
    jobs' shares gets no guarantee, and runs with whatever workers it gets.

    Returns the problem with these minimums, and a note for each job with a deadline, to be added to its reason.
    """
    dated = {view.job for view in views if view.deadline_s is not None}
    if not dated:
        return Problem(views=views, cluster=cluster), {}
    empty, room = FreeResources(cluster), FreeResources(cluster)
    order = by_precedence(Problem(views=views, cluster=cluster, guaranteed=frozenset(dated)))
    safe = {view.job for view in order if secured(view) and room.add(view, view.min_workers)}
    raised: dict[str, JobView] = {}
    notes: dict[str, Reason] = {}
    for view in sorted(order, key=lambda v: (-v.priority, v.job not in dated, v.job not in before)):
        has = view.min_workers if view.job in safe else 0
        if view.job in dated:
            need = _need(view, empty.slots(view).tolist(), now_s, refused)
            if isinstance(need, int) and room.add(view, need - has):
                raised[view.job] = dataclasses.replace(view, min_workers=need)
                notes[view.job] = Reason(Cause.DEADLINE, (count(need),))
                continue
            if isinstance(need, int):
                need = f"{count(need)} would meet it, but not beside what others are promised"
            notes[view.job] = Reason(Cause.NO_DEADLINE, (need,), "it runs as well as it can")
        room.add(view, view.min_workers - has)
    problem = Problem(
        views=[raised.get(view.job, view) for view in views], cluster=cluster, guaranteed=frozenset(raised)
    )
    return problem, notes


def _need(view: JobView, slots: Sequence[int], now_s: float, refused: Mapping[str, str]) -> int | str:
    if view.job in refused:
        return refused[view.job]
    return "its user holds it at a size" if view.held_at is not None else minimum_satisfactory_share(view, slots, now_s)


def paying_size(view: JobView, slots: list[int], now_s: float) -> int | None:
    """Return the largest number of workers justified by the job's utility; None if it cannot be computed.

    The result is None if the job has no utility, a size fixed by its user, or an unknown remaining time. The price per
    worker comes from the job's bill. Without known prices, workers cost nothing, and the result is a number of workers
    that lets the job end before its utility falls. ``slots`` is the number of its workers that fit on each node.
    """
    left_s = seconds_to_end(view, slots) if view.held_at is None else None
    if view.utility is None or left_s is None:
        return None
    stays = np.arange(1, len(left_s) + 1) == view.workers
    left_s = left_s + np.where(stays, 0.0, view.resize_cost_s)
    usd_per_h: Floats = np.arange(1.0, len(left_s) + 1) * (0.0 if view.bill is None else view.bill.worker_usd_per_h)
    age_s = max(now_s - view.submitted_s, 0.0)
    return view.utility.best_size(age_s, left_s, usd_per_h, view.min_workers, view.workers)


def limit_by_utility(problem: Problem, now_s: float) -> Problem:
    """Return the problem with each job limited to the workers justified by its own utility."""
    if all(view.utility is None for view in problem.views):
        return problem
    empty, views = FreeResources(problem.cluster), []
    for view in problem.views:
        best = paying_size(view, empty.slots(view).tolist(), now_s)
        if best is not None and best < view.max_workers:
            view = dataclasses.replace(view, max_workers=best)
        views.append(view)
    return dataclasses.replace(problem, views=views)


def utility_notes(problem: Problem, limited: Problem, allocation: Allocation) -> dict[str, Reason]:
    """Return a note, keyed by job, for each job kept from using more workers by its utility limit in ``limited``."""
    return {
        less.job: Reason(Cause.UTILITY, (count(less.max_workers),))
        for view, less in zip(problem.views, limited.views, strict=True)
        if less.max_workers < view.useful_workers and sum(allocation.get(less.job, {}).values()) == less.max_workers
    }


# What a job gives back may let others grow into sizes of theirs that are not allowed either; more than two are rare.
_SIZE_ROUNDS = 4


def in_allowed_sizes(problem: Problem, solve: Solver) -> Plan:
    """Return a plan that gives every job a size that the job allows (``JobView.sizes``).

    If the policy's answer has other sizes, the policy is queried again with each limited to the next smaller allowed
    size. After a few rounds, the remaining disallowed sizes are reduced on the jobs' own nodes.
    """
    views = {view.job: view for view in problem.views}
    for _ in range(_SIZE_ROUNDS):
        plan = solve(dataclasses.replace(problem, views=list(views.values())))
        limits = _limits(problem, plan)
        if not limits:
            return plan
        for job, most in limits.items():
            if most:
                views[job] = views[job].at_most(most)
    return _cut(problem, plan, _limits(problem, plan))


def _limits(problem: Problem, plan: Plan) -> dict[str, int]:
    """Return the next smaller allowed size for each job whose size is not allowed; 0 if none exists."""
    found: dict[str, int] = {}
    for view in problem.views:
        workers = sum(plan.allocation.get(view.job, {}).values())
        if workers and not view.sizes.allow(workers):
            found[view.job] = view.sizes.at_most(workers)
    return found


def _cut(problem: Problem, plan: Plan, limits: Mapping[str, int]) -> Plan:
    """Return the plan with these jobs cut to fewer workers, starting with the nodes that have the fewest."""
    allocation = {job: dict(place) for job, place in plan.allocation.items()}
    reasons = dict(plan.reasons)
    sizes = {view.job: view.sizes for view in problem.views}
    for job, most in limits.items():
        place = allocation[job]
        reasons[job] = Reason(Cause.SIZES, (most, sum(place.values())), f"it trains with {sizes[job]} workers")
        for node, workers in sorted(place.items(), key=lambda item: (item[1], item[0])):
            less = min(workers, sum(place.values()) - most)
            place[node] -= less
        allocation[job] = {node: workers for node, workers in place.items() if workers}
    return dataclasses.replace(
        plan, allocation={job: place for job, place in allocation.items() if place}, reasons=reasons
    )


def in_whole_nodes(problem: Problem, solve: Solver, worth: Mapping[str, int]) -> Plan:
    """Return a plan that gives whole nodes to jobs that prefer them, unless this leaves slots idle.

    The policy is queried twice. In the second query, sizes above one node are limited to a whole number of nodes. The
    second answer is used unless it leaves slots idle that the limited jobs could use.

    Args:
        worth: Number of workers that fill a whole node, for each job that prefers whole nodes.
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
    """Return the number of the job's workers that fit on its largest usable node when the node is empty."""
    fitting = [node for node in cluster.nodes if not node.draining and node.matches(view.selector)]
    return max((slots(node.total, view.bundle) for node in fitting), default=0)


def on_nodes_of_their_own(problem: Problem, plan: Plan, *, apart: bool) -> Plan:
    """Return the plan, changed so that jobs that prefer whole nodes share none; unchanged if that is impossible."""
    shy = [view for view in problem.views if view.whole_nodes and view.job in plan.allocation]
    counts = collections.Counter(node for place in plan.allocation.values() for node in place)
    if all(counts[node] == 1 for view in shy for node in plan.allocation[view.job]):
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


_ROUNDS = 8  # a decision is repeated from its own outcome until it stays; more than two are rare


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Rules that apply to the whole cluster. Rules for a single job are in its ``JobView``."""

    tenants: tuple[Tenant, ...] = ()  # weights and quotas; a tenant that is not named has weight 1 and no quota
    # no node holds workers of two jobs that both span several nodes; None keeps that rule while links hold two jobs up
    # (``placement.planning.multi_node.held_up``), unless it would stop a job
    one_multi_node_job_per_node: bool | None = False
    # jobs leave nodes on which they have seen slow steps (``placement.planning.failing_nodes``)
    avoid_slow_nodes: bool = True

    def __post_init__(self) -> None:
        check_tenants(self.tenants)

    def concern(self, views: Sequence[JobView]) -> bool:
        """True if any constraint affects a decision about these jobs. This is rare, so the test must be cheap."""
        if not views:
            return False
        tenant, priority = views[0].tenant, views[0].priority
        if any(each.quota for each in self.tenants):
            return True
        return any(
            view.priority != priority
            or view.tenant != tenant
            or not view.preemptible
            or view.deadline_s is not None
            or view.utility is not None
            or view.whole_nodes
            or view.spot == "mixed"
            or not view.sizes.free
            for view in views
        )


def decide(
    problem: Problem, solve: Solver, constraints: Constraints, now_s: float, guaranteed: Collection[str] = ()
) -> Plan:
    """Return a plan that satisfies all constraints and is stable: solving again from its outcome changes nothing.

    Policies weigh the cost of a change against the jobs' current workers, so the outcome of a plan may itself call for
    another change. The decision is therefore repeated from its own outcome until it is stable. If it returns to an
    earlier outcome, that outcome is used.

    Args:
        guaranteed: Jobs whose deadlines the last decision guaranteed.
    """
    plans: list[Plan] = []
    running = {view.job for view in problem.views if view.workers}
    if left := without_idle_spot(problem):  # whose arrival must stop nobody
        settled = decide(left, solve, constraints, now_s, guaranteed)
        problem = dataclasses.replace(problem, kept=frozenset(running & settled.allocation.keys()))
    present = problem
    seen = [_places({view.job: view.allocation for view in problem.views})]
    for _ in range(_ROUNDS):
        once = functools.partial(
            _decide_once, solve=solve, constraints=constraints, now_s=now_s, guaranteed=guaranteed, running=running
        )
        plan = in_allowed_sizes(present, once)
        plans.append(plan)
        places = _places(plan.allocation)
        if places in seen:
            break
        seen.append(places)
        guaranteed = plan.guaranteed
        present = dataclasses.replace(problem, views=[v.placed(plan.allocation.get(v.job, {})) for v in problem.views])
    if left and problem.kept - plans[-1].allocation.keys():  # they fit, but not as workers are placed beside others
        return settled
    return _with_first_reasons(plans)


def without_idle_spot(problem: Problem) -> Problem | None:
    """Return the problem without idle spot nodes; None if there are none, or if no job is running."""
    used = {node for view in problem.views for node, workers in view.allocation.items() if workers}
    left = tuple(node for node in problem.cluster.nodes if not node.spot or node.node_id in used)
    if not used or len(left) == len(problem.cluster.nodes):
        return None
    return dataclasses.replace(problem, cluster=Cluster(nodes=left))


def _decide_once(
    problem: Problem,
    solve: Solver,
    constraints: Constraints,
    now_s: float,
    guaranteed: Collection[str],
    running: Collection[str],
) -> Plan:
    """Return the plan under all constraints; if a guaranteed job gets nothing, ask again without its guarantee."""
    worth = {v.job: node_worth(v, problem.cluster) for v in problem.views if v.whole_nodes}
    tenants = {tenant.name: tenant for tenant in constraints.tenants}
    inner: Solver = functools.partial(in_whole_nodes, solve=solve, worth=worth) if worth else solve
    refused: dict[str, str] = {}
    least = {view.job: view.min_workers for view in problem.views if view.spot == "mixed"}
    while True:
        raised, notes = guarantee(problem.views, problem.cluster, guaranteed, now_s, refused)
        asked = raised
        raised = dataclasses.replace(
            limit_by_utility(raised, now_s),
            multi_node_nodes=problem.multi_node_nodes,
            apart=problem.apart,
            kept=problem.kept,
        )
        within = functools.partial(by_tenant, solve=functools.partial(by_priority, solve=inner), tenants=tenants)
        plan = with_minimums_on_demand(raised, within, least, running)
        failed = [job for job in sorted(raised.guaranteed) if job not in plan.allocation]
        if not failed:
            break
        # Counted together they fit, but not in the policy's own shapes or within the tenant's share.
        refused.update(dict.fromkeys(failed, "what would meet it is not to be had now"))
    apart = problem.apart
    plan = on_nodes_of_their_own(raised, plan, apart=apart) if worth else plan
    if apart:
        check_apart(plan.allocation)
    notes = {**utility_notes(asked, raised, plan.allocation), **notes}
    return dataclasses.replace(plan.noted(notes), guaranteed=raised.guaranteed)


def _with_first_reasons(plans: Sequence[Plan]) -> Plan:
    """Return the last plan, giving each job the reason from the first plan with its final placement."""
    last = plans[-1]
    reasons = dict(last.reasons)
    for plan in reversed(plans):
        same = (job for job in plan.reasons if plan.allocation.get(job) == last.allocation.get(job))
        reasons.update({job: plan.reasons[job] for job in same})
    return dataclasses.replace(last, reasons=reasons)


def _places(allocation: Allocation) -> frozenset[tuple[str, tuple[tuple[str, int], ...]]]:
    return frozenset((job, tuple(sorted(place.items()))) for job, place in allocation.items() if place)
