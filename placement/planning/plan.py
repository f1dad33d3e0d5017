"""Plan of one decision: query the policy, apply the rules, and place the workers (pure)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

from placement.checks import is_whole
from placement.cluster.cluster import TOLERANCE, Allocation, AllocationError, Cluster, Node, check, slots, without
from placement.cluster.jobs import JobView, WorkerKind, worker_kind
from placement.cluster.packing import FreeResources, Packing, pack
from placement.planning.constraints import Constraints, decide, without_idle_spot
from placement.planning.failing_nodes import avoid_slow
from placement.planning.multi_node import held_up, keep_apart, shared
from placement.planning.problem import Plan, Problem
from placement.planning.spans import Use, per_process, plan_with_spans, room_for, spans_nodes
from placement.planning.tenants import left_over
from placement.planning.wishes import grant, without_wish
from placement.policies.shared.base import Policy, Target, as_targets
from placement.reasons import Cause, Reason
from placement.text import count, describe

_ROUNDS = 4  # counts that do not fit onto nodes are decided again with what did fit as a limit


NO_CONSTRAINTS = Constraints()


def make_plan(
    policy: Policy,
    views: Sequence[JobView],
    cluster: Cluster,
    now_s: float,
    constraints: Constraints = NO_CONSTRAINTS,
    guaranteed: Collection[str] = (),
    granted: Allocation | None = None,
) -> Plan:
    """Return a plan: query the policy for each job's number of workers, check its answer, and place the workers.

    All constraints apply. Units (multi-process workers) that do not fit on any node span several
    (``placement.planning.spans``).

    Raises AllocationError: the policy violated a rule; the caller must not change anything.
    """

    def solve(views: Sequence[JobView], cluster: Cluster, used: Use) -> Plan:
        left = dataclasses.replace(constraints, tenants=left_over(constraints.tenants, used)) if used else constraints
        return _on_nodes(policy, views, cluster, now_s, left, guaranteed, granted)

    return plan_with_spans(solve, views, cluster)


def _on_nodes(
    policy: Policy,
    views: Sequence[JobView],
    cluster: Cluster,
    now_s: float,
    constraints: Constraints,
    guaranteed: Collection[str],
    granted: Allocation | None,
) -> Plan:
    """Return the plan for jobs whose workers fit on single nodes."""
    if constraints.one_multi_node_job_per_node is None:
        # Sharing links slows jobs down, and waiting stops them: as below, who would run otherwise decides.
        rule = functools.partial(dataclasses.replace, constraints)
        plan_under = functools.partial(_on_nodes, policy, views, cluster, now_s, guaranteed=guaranteed, granted=granted)
        anyway = plan_under(constraints=rule(one_multi_node_job_per_node=False))
        if not held_up(views) or not shared(anyway.allocation):
            return anyway
        plan = plan_under(constraints=rule(one_multi_node_job_per_node=True))
        return plan if _running(plan) >= _running(anyway) else anyway
    if not constraints.avoid_slow_nodes:
        return _with_wishes(policy, views, cluster, now_s, constraints, guaranteed, granted or {})
    left_views, left_cluster = avoid_slow(views, cluster)
    plan = _with_wishes(policy, left_views, left_cluster, now_s, constraints, guaranteed, granted or {})
    if left_views is views and left_cluster is cluster:
        return plan
    # A slow worker does some work, and a job without any does none: who would run otherwise decides.
    anyway = _with_wishes(policy, views, cluster, now_s, constraints, guaranteed, granted or {})
    return plan if _running(plan) >= _running(anyway) else anyway


def _running(plan: Plan) -> int:
    return sum(1 for nodes in plan.allocation.values() if nodes)


def _with_wishes(
    policy: Policy,
    views: Sequence[JobView],
    cluster: Cluster,
    now_s: float,
    constraints: Constraints,
    guaranteed: Collection[str],
    granted: Allocation,
) -> Plan:
    """Return a plan for the given nodes; jobs' wishes are served from slots that the policy leaves free."""
    whole = Problem(views=views, cluster=cluster, apart=bool(constraints.one_multi_node_job_per_node))
    wishes = bool(granted) or any(view.wished is not None for view in views)
    asked = [without_wish(view, granted.get(view.job, {})) for view in views] if wishes else views
    problem, solve = dataclasses.replace(whole, views=asked), functools.partial(_ask_policy, policy, now_s=now_s)
    plan = None if problem.apart or constraints.concern(asked) else solve(problem)
    stops = plan is not None and any(view.workers and view.job not in plan.allocation for view in asked)
    if plan is None or (stops and without_idle_spot(problem) is not None):
        plan = decide(problem, solve, constraints, now_s, guaranteed)
        check(plan.allocation, {view.job: view.bundle for view in views}, cluster)
    if wishes:
        plan = grant(whole, plan, constraints.tenants)
        check(plan.allocation, {view.job: view.bundle for view in views}, cluster)
    return plan


def _ask_policy(policy: Policy, problem: Problem, now_s: float) -> Plan:
    """Query a policy, check its answer, and place it.

    Bundles of different sizes may leave gaps that no bundle fits into, so that counts within the cluster's totals
    cannot be placed. The policy is then queried again with those jobs limited to the workers that did fit, so that
    others may use the rest.
    """
    cluster = problem.cluster
    asked = {view.job: view for view in problem.views}
    reasons: dict[str, Reason] = {}
    packing = Packing(allocation={}, short={})
    for _ in range(_ROUNDS):
        order = sorted(asked.values(), key=lambda view: view.arrival)
        targets = as_targets(policy.name, policy.decide(order, cluster, now_s))
        check_targets(targets, order, cluster)
        reasons.update({job: target.reason for job, target in targets.items() if isinstance(target.reason, Reason)})
        packing = _place(targets, order, cluster)
        if problem.apart:
            packing = keep_apart(packing, order, cluster, problem.multi_node_nodes)
        if not packing.short:
            break
        alone = "on nodes that no other job spans" if problem.apart else "on nodes with room for whole bundles"
        for job, short in packing.short.items():
            fits = targets[job].workers - short
            reasons[job] = Reason(Cause.SCATTERED, (fits, targets[job].workers), alone)
            view = asked.pop(job)
            if fits >= view.min_workers:
                asked[job] = view.at_most(fits)
    check(packing.allocation, {view.job: view.bundle for view in problem.views}, cluster)
    return Plan(allocation=packing.allocation, reasons=reasons)


def _place(targets: Mapping[str, Target], views: Sequence[JobView], cluster: Cluster) -> Packing:
    """Return the placements that the policy specifies; pack the other jobs into the remaining room."""
    named = {job: target.nodes for job, target in targets.items() if target.nodes is not None and target.workers}
    if not named:
        return pack({job: target.workers for job, target in targets.items()}, views, cluster)
    bundles = {view.job: view.bundle for view in views}
    check(named, bundles, cluster)
    left = [view for view in views if view.job not in named and targets[view.job].workers]
    if not left:
        return Packing(allocation={job: dict(nodes) for job, nodes in named.items()}, short={})
    packing = pack({view.job: targets[view.job].workers for view in left}, left, without(cluster, named, bundles))
    return Packing(allocation={**packing.allocation, **named}, short=packing.short)


def check_targets(targets: Mapping[str, Target], views: Sequence[JobView], cluster: Cluster) -> None:
    """Check a policy's answer against the rules that do not depend on placement."""
    known = {view.job: view for view in views}
    for job in targets:
        if job not in known:
            raise AllocationError("known job", f"a target for {job!r}, which is not one of {sorted(known)}")
    room = FreeResources(cluster)
    fits: dict[WorkerKind, int] = {}
    used: dict[str, float] = {}
    nodes = cluster.by_id()
    for job, view in known.items():
        if job not in targets:
            raise AllocationError("every job", f"no target for job {job!r}; assign 0 workers to make it wait")
        workers = targets[job].workers
        _check_count(view, workers)
        _check_nodes(view, targets[job], nodes)
        if not workers:
            continue
        kind = worker_kind(view)
        if kind not in fits:
            fits[kind] = int(room.slots(view).sum())
        if workers > fits[kind]:
            fit = f"{fits[kind]} x {describe(view.bundle)} fit onto all nodes"
            raise AllocationError("capacity", f"job {job!r} was given {count(workers)}, but {fit}")
        for name, need in view.bundle.items():
            used[name] = used.get(name, 0.0) + workers * need
    for name, amount in sorted(used.items()):
        free = sum(node.free.get(name, 0.0) for node in cluster.nodes if not node.draining)
        if amount > free + TOLERANCE * max(1.0, free):
            raise AllocationError("capacity", f"all targets together use {amount:g} {name}, but {free:g} are free")


def _check_count(view: JobView, workers: int) -> None:
    """Raise AllocationError unless the count is 0, or a whole number from the job's minimum to its maximum."""
    if not is_whole(workers):
        raise AllocationError("whole number", f"job {view.job!r} was given {workers!r} workers")
    if 0 < workers < view.min_workers:
        raise AllocationError(
            "minimum", f"job {view.job!r} was given {workers}, but runs with {view.min_workers} at least"
        )
    if workers > view.max_workers:
        raise AllocationError("maximum", f"job {view.job!r} was given {workers}, but wants {view.max_workers} at most")


def _check_nodes(view: JobView, target: Target, nodes: Mapping[str, Node]) -> None:
    """Raise AllocationError if named nodes do not add up to the count, or lack labels that the job requires."""
    if target.nodes is None:
        return
    if sum(target.nodes.values()) != target.workers:
        raise AllocationError(
            "nodes", f"job {view.job!r} was given {count(target.workers)}, but placed as {dict(target.nodes)}"
        )
    if view.selector:
        for node_id in target.nodes:
            if node_id in nodes and not nodes[node_id].matches(view.selector):
                raise AllocationError(
                    "nodes", f"job {view.job!r} is placed on {node_id!r}, but wants {dict(view.selector)}"
                )


def possible_nodes(view: JobView, cluster: Cluster) -> list[Node]:
    """Return the nodes that, if empty, could run a worker for the job, or part of a unit that spans nodes."""
    need = per_process(view) if spans_nodes(view, cluster) else view.bundle
    return [node for node in cluster.nodes if node.matches(view.selector) and slots(node.total, need)]


def unsatisfiable(view: JobView, cluster: Cluster) -> Reason | None:
    """Return why the job's minimum could not run even on an empty cluster; None if it could or no node is known."""
    if not cluster.nodes:
        return None
    selector = view.selector
    nodes = [node for node in cluster.nodes if node.matches(selector)]
    if not nodes:
        have = {f"{key}={node.labels[key]}" for node in cluster.nodes for key in selector if key in node.labels}
        why = f"no node has the labels {dict(selector)}, there are {', '.join(sorted(have)) or 'none of these keys'}"
        way_out = (
            "change ScalingConfig(label_selector) or SchedulingConfig(spot), or start nodes with `ray start --labels`"
        )
        return Reason(Cause.IMPOSSIBLE, (why,), way_out)
    empty = Cluster(nodes=tuple(dataclasses.replace(node, draining=False) for node in nodes))
    across = room_for(view, empty, view.min_workers) if spans_nodes(view, empty) else 0  # units on several nodes
    if across == view.min_workers:
        return None
    where = f" with the labels {dict(selector)}" if selector else ""
    for name, need in sorted(view.bundle.items()):
        most = max(node.total.get(name, 0.0) for node in nodes)
        if need > most + TOLERANCE and not across:
            why = f"one worker needs {need:g} {name}, but the largest node{where} has {most:g}"
            options = "use_gpu, resources_per_worker, accelerator_type"
            return Reason(Cause.IMPOSSIBLE, (why,), f"change ScalingConfig({options}) or add a node with {name}")
    possible = across or sum(slots(node.total, view.bundle) for node in nodes)
    if possible >= view.min_workers:
        return None
    if possible == 0:
        why = f"no single node{where} has {describe(view.bundle)} together"
        return Reason(Cause.IMPOSSIBLE, (why,), "change ScalingConfig(resources_per_worker) or add such a node")
    why = f"it needs {view.min_workers} x {describe(view.bundle)}, but the empty cluster{where} holds {possible}"
    fewer = view.sizes.at_most(possible)
    way_out = (
        f"lower ScalingConfig(num_workers), for example to ({fewer * view.unit}, {view.min_workers * view.unit})"
        if fewer
        else f"SchedulingConfig({view.sizes}) allows none so small: change it, if it asks for too much"
    )
    return Reason(Cause.IMPOSSIBLE, (why,), f"{way_out}, or add nodes")
