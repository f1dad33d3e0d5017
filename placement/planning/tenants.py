"""Tenants: users or teams with quotas and weighted shares of the cluster; others may borrow unused shares."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from placement.arguments import NamesArguments
from placement.checks import check_kind, check_number, plain_numbers
from placement.cluster.cluster import TOLERANCE, Allocation, Cluster, Node, Resources, add_amounts, slots, used_on_nodes
from placement.cluster.jobs import JobView, worker_kind
from placement.cluster.packing import FreeResources
from placement.planning.problem import Plan, Problem, Solver, by_precedence, minimums, secured, serve, usable
from placement.reasons import Cause, Reason

_Limits: TypeAlias = Mapping[frozenset[str], Mapping[str, Resources]] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tenant(NamesArguments):
    """User or team whose jobs together get one share of the cluster.

    Attributes:
        name: Name of the tenant, as in ``JobView.tenant``.
        weight: Weight of the tenant. Its share is this weight divided by the weights of all tenants that have jobs.
        quota: Upper limits on some resources, such as ``{"GPU": 16}``; they also apply to borrowed resources.

    Examples:
        >>> from placement import Tenant
        >>> Tenant(name="vision", weight=2.0, quota={"GPU": 16.0}).weight
        2.0
    """

    name: str
    weight: float = 1.0
    quota: Resources = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name of a tenant must be text, but got {self.name!r}")
        check_number(f"weight of tenant {self.name!r}", self.weight, above=0, finite=True)
        check_kind(f"quota of tenant {self.name!r}", self.quota, Mapping, "a mapping such as {'GPU': 16}")
        for resource, amount in self.quota.items():
            check_kind(f"each resource in the quota of tenant {self.name!r}", resource, str, "text")
            check_number(f"quota[{resource!r}] of tenant {self.name!r}", amount, least=0)
        plain_numbers(self)


def check_tenants(tenants: Sequence[Tenant]) -> None:
    """Raise an error unless all elements are tenants with distinct names."""
    check_kind("tenants", tenants, tuple | list, "a tuple of Tenant(...)")
    names = set()
    for tenant in tenants:
        if not isinstance(tenant, Tenant):
            raise TypeError(f"tenants must hold Tenant(name=..., weight=..., quota=...), but got {tenant!r}")
        if tenant.name in names:
            raise ValueError(f"tenants' names must be unique, but {tenant.name!r} occurs twice")
        names.add(tenant.name)


def left_over(tenants: Sequence[Tenant], used: Mapping[str, Resources]) -> tuple[Tenant, ...]:
    """Return the tenants with each quota reduced by the resources in use: ``used``, keyed by tenant."""

    def left(tenant: Tenant) -> Resources:
        return {r: max(most - used.get(tenant.name, {}).get(r, 0.0), 0.0) for r, most in tenant.quota.items()}

    return tuple(dataclasses.replace(tenant, quota=left(tenant)) for tenant in tenants)


def by_tenant(problem: Problem, solve: Solver, tenants: Mapping[str, Tenant]) -> Plan:
    """Run the policy for each tenant (a user or team) within its share, then offer unused resources within quotas.

    Shares are computed by ``share_out``. Tenants whose jobs fit on only a few nodes come first. The remaining resources
    are offered first to the tenant that uses the least relative to its weight.
    """
    names = sorted({view.tenant for view in problem.views})
    known = {name: tenants.get(name) or _as_declared(name, problem.views) for name in names}
    if len(names) <= 1 and not any(tenant.quota for tenant in known.values()):
        return solve(problem)
    ceilings, floors = share_out(problem, known)
    kept = minimums(problem.only(floors))
    jobs = {name: [view for view in problem.views if view.tenant == name] for name in names}
    room = FreeResources(problem.cluster)
    reach = {name: sum(int(room.slots(view).sum()) * room.share(view) for view in jobs[name]) for name in names}
    plan = Plan(allocation={}, reasons={})
    waiting = sorted(names, key=lambda name: (reach[name], name))
    while waiting:
        name = waiting.pop(0)
        later = {view.job: kept[view.job] for each in waiting for view in jobs[each] if view.job in kept}
        mine = problem.beside(plan.allocation, later).only(view.job for view in jobs[name])
        plan = plan.plus(solve(within(mine, ceilings[name], kept)))
    return _lend(problem, solve, known, jobs, plan)


def _as_declared(name: str, views: Sequence[JobView]) -> Tenant:
    """Return a tenant that is not in the cluster's configuration, with the weight that its jobs declare."""
    told = [view.tenant_weight for view in views if view.tenant == name and view.tenant_weight is not None]
    return Tenant(name=name, weight=max(told, default=1.0))


def _lend(
    problem: Problem, solve: Solver, tenants: Mapping[str, Tenant], jobs: Mapping[str, Sequence[JobView]], plan: Plan
) -> Plan:
    """Query the policy again for each tenant that could use remaining room."""
    totals = _totals(problem.cluster)

    def has(name: str) -> float:
        used = _used(jobs[name], plan.allocation)
        share = max((amount / totals[r] for r, amount in used.items() if totals.get(r)), default=0.0)
        return share / tenants[name].weight

    for name in sorted(tenants, key=lambda name: (has(name), name)):
        others = {view.job: plan.allocation.get(view.job, {}) for view in problem.views if view.tenant != name}
        mine = problem.beside({job: place for job, place in others.items() if place})
        used = _used(jobs[name], plan.allocation)  # above the quota only by what may not be stopped
        ceiling = {r: max(amount, used.get(r, 0.0)) for r, amount in tenants[name].quota.items()}
        mine = within(mine.only(view.job for view in jobs[name]), ceiling, plan.allocation)
        if _could_use_more(mine, plan.allocation):
            part = solve(mine)
            plan = Plan(
                allocation={**{job: place for job, place in others.items() if place}, **part.allocation},
                reasons={**plan.reasons, **part.reasons},
            )
    return plan.noted(_notes(problem, tenants, jobs, plan))


def _could_use_more(problem: Problem, allocation: Allocation) -> bool:
    """True if there is room for some waiting job's minimum, or for one more worker that a job could use."""
    room = FreeResources(
        problem.beside({v.job: allocation[v.job] for v in problem.views if v.job in allocation}).cluster
    )
    for view in problem.views:
        has = sum(allocation.get(view.job, {}).values())
        fits = int(room.slots(view).sum())
        if fits >= (1 if has else view.min_workers) and has < (view.held_at or view.useful_workers):
            return True
    return False


def _notes(
    problem: Problem, tenants: Mapping[str, Tenant], jobs: Mapping[str, Sequence[JobView]], plan: Plan
) -> dict[str, Reason]:
    """Return notes for jobs that are kept small by their tenant's limits."""
    room = FreeResources(problem.beside(plan.allocation).cluster)
    notes: dict[str, Reason] = {}
    for name, tenant in tenants.items():
        used = _used(jobs[name], plan.allocation)
        for view in jobs[name]:
            has = sum(plan.allocation.get(view.job, {}).values())
            more = 1 if has else view.min_workers
            if has >= (view.held_at or view.useful_workers):
                continue
            full = [r for r, q in tenant.quota.items() if used.get(r, 0.0) + more * view.bundle.get(r, 0.0) > q]
            if full:
                notes[view.job] = Reason(Cause.QUOTA, (name, tenant.quota[full[0]], full[0]))
            elif int(room.slots(view).sum()) < more:
                notes[view.job] = Reason(Cause.SHARE, (name, tenant.weight))
    return notes


def entitlements(demands: Mapping[str, Resources], weights: Mapping[str, float], totals: Resources) -> dict[str, float]:
    """Return weighted max-min fair dominant shares (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011).

    All shares rise together, each in proportion to its weight. A tenant's share stops rising when its demand is met or
    a resource that it needs is exhausted; the other shares continue to rise.

    Returns each tenant's dominant share: the largest fraction that it gets of any resource.
    """
    full = {
        name: max((amount / totals[r] for r, amount in demand.items() if totals.get(r, 0.0) > 0), default=0.0)
        for name, demand in demands.items()
    }
    share = dict.fromkeys(demands, 0.0)
    rising = {name for name, each in full.items() if each > 0}
    left = dict(totals)
    while rising:
        pace = {
            r: sum(weights[name] * demands[name].get(r, 0.0) / full[name] for name in sorted(rising)) for r in totals
        }
        steps = [left[r] / each for r, each in pace.items() if each > 0]
        step = min([*steps, *((full[name] - share[name]) / weights[name] for name in rising)])
        for name in rising:
            share[name] += step * weights[name]
        left = {r: max(amount - step * pace[r], 0.0) for r, amount in left.items()}
        spent = {r for r, amount in left.items() if pace[r] > 0 and amount <= TOLERANCE * max(1.0, totals[r])}
        met = {name for name in rising if share[name] >= full[name] * (1 - 1e-9)}
        stuck = {name for name in rising if any(demands[name].get(r, 0.0) > 0 for r in spent)}
        if not met and not stuck:
            break  # rounding
        rising -= met | stuck
    return share


def share_out(problem: Problem, tenants: Mapping[str, Tenant]) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Return each tenant's first-round share of resources, in whole workers, and the job minimums included in it.

    Resources are assigned in this order: minimums of jobs that must not be stopped; workers within each tenant's
    entitlement; and the remainder, which is lent. All tenants' minimums come before any growth. Each turn goes to the
    tenant that uses the least relative to its weight or, among equals, to one with a job that would otherwise be
    stopped. Jobs that can run only on some nodes are entitled to these nodes as if no other nodes or jobs existed;
    their turns come before other jobs' turns.

    Returns amounts keyed by tenant and resource, and minimums [workers] keyed by job.
    """
    filling = _Filling(problem, tenants, _totals(problem.cluster))
    filling.secure(problem.kept)
    own = {frozenset(node.node_id for node in part.cluster.nodes): _owned(part, tenants) for part in _parts(problem)}
    for limits in (own, None):
        filling.climb(limits, starts=True)
        filling.climb(limits, starts=False)
    return filling.used, filling.floors


def _owned(part: Problem, tenants: Mapping[str, Tenant]) -> dict[str, dict[str, float]]:
    """Return each tenant's entitlement to a part of the cluster, as amounts by resource."""
    totals = _totals(part.cluster)
    demands = {name: _demand(part, tenant) for name, tenant in tenants.items()}
    share = entitlements(demands, {name: tenant.weight for name, tenant in tenants.items()}, totals)
    return {name: {r: share[name] * total for r, total in totals.items()} for name in tenants}


def _parts(problem: Problem) -> list[Problem]:
    """Return the whole problem, and its parts limited to the nodes that some job's labels allow, with their jobs."""
    nodes = problem.cluster.nodes
    reach = {
        view.job: frozenset(node.node_id for node in nodes if node.matches(view.selector)) for view in problem.views
    }
    found = [problem]
    for allowed in sorted(set(reach.values()) - {frozenset(node.node_id for node in nodes)}, key=sorted):
        part = Cluster(nodes=tuple(node for node in nodes if node.node_id in allowed))
        bound = problem.only(job for job, own in reach.items() if own <= allowed)
        found.append(dataclasses.replace(bound, cluster=part))
    return found


class _Filling:
    """Trial distribution of workers, one worker or one minimum at a time, to see how much each tenant may use."""

    def __init__(self, problem: Problem, tenants: Mapping[str, Tenant], totals: Resources) -> None:
        self._order = by_precedence(problem)
        self._tenants, self._totals = tenants, totals
        self._room = FreeResources(problem.cluster)
        self._counts: dict[str, int] = {}
        self._running: dict[str, int] = {}  # by tenant, running jobs that have not had their turn in a climb
        nodes = problem.cluster.nodes
        self._reach = {v.job: frozenset(n.node_id for n in nodes if n.matches(v.selector)) for v in problem.views}
        self._parts = {*self._reach.values(), frozenset(node.node_id for node in nodes)}
        self._used_by: dict[tuple[str, frozenset[str]], dict[str, float]] = {}  # jobs that these nodes alone can hold
        self.floors: dict[str, int] = {}
        self.used: dict[str, dict[str, float]] = {name: dict.fromkeys(totals, 0.0) for name in tenants}

    def secure(self, kept: Collection[str]) -> None:
        """Reserve the minimums of jobs that may not be stopped, regardless of their tenant's share or quota."""
        for view in self._order:
            if (secured(view) or view.job in kept) and serve(view, self._room):
                self._count(view, view.min_workers)
                self.floors[view.job] = view.min_workers

    def climb(self, limits: Mapping[frozenset[str], Mapping[str, Resources]] | None, *, starts: bool) -> None:
        """Distribute all jobs' minimums, or workers one by one, up to the limits (and never above a quota).

        Args:
            starts: True to distribute minimums, False for single workers.
        """
        for reach in sorted(set(self._reach.values()), key=lambda nodes: (len(nodes), sorted(nodes))):
            queues = {name: collections.deque(self._of(name, reach, started=not starts)) for name in self._tenants}
            self._running = {name: sum(1 for view in queue if view.workers) for name, queue in queues.items()}
            heap = [(self._turn(name), name) for name in self._tenants]
            heapq.heapify(heap)
            while heap:
                _, name = heapq.heappop(heap)
                give = self._start if starts else self._grow
                if self._step(queues[name], lambda view, give=give: give(view, limits), again=not starts):  # type: ignore[misc]
                    heapq.heappush(heap, (self._turn(name), name))

    def _of(self, name: str, reach: frozenset[str], *, started: bool) -> Iterable[JobView]:
        mine = (view for view in self._order if view.tenant == name and self._reach[view.job] == reach)
        return [view for view in mine if (view.job in self._counts) == started]

    def _turn(self, name: str) -> tuple[float, bool]:
        used = self.used[name]
        share = max((used[r] / total for r, total in self._totals.items() if total > 0), default=0.0)
        return round(share / self._tenants[name].weight, 9), not self._running[name]

    @staticmethod
    def _step(queue: collections.deque[JobView], give: Callable[[JobView], bool], *, again: bool) -> bool:
        """Serve the first job in the queue that fits; drop the jobs before it."""
        while queue:
            view = queue.popleft()
            if give(view):
                if again:
                    queue.append(view)
                return True
        return False

    def _start(self, view: JobView, limits: _Limits) -> bool:
        self._running[view.tenant] -= view.workers > 0
        if self._give(view, view.min_workers, limits):
            self.floors[view.job] = view.min_workers
            return True
        return False

    def _grow(self, view: JobView, limits: _Limits) -> bool:
        most = view.held_at if view.held_at is not None else view.useful_workers
        return self._counts[view.job] < most and self._give(view, 1, limits)

    def _give(self, view: JobView, workers: int, limits: _Limits) -> bool:
        """True if the workers fit within quota, limits (if not None) and room; they are then counted."""
        used, quota = self.used[view.tenant], self._tenants[view.tenant].quota
        if _exceeds(used, view, workers, {r: quota.get(r, math.inf) for r in view.bundle}):
            return False
        for nodes, limit in limits.items() if limits is not None else ():
            if self._reach[view.job] <= nodes:
                used = self._used_by.get((view.tenant, nodes), {})
                if _exceeds(used, view, workers, limit[view.tenant]):
                    return False
        if not self._room.add(view, workers):
            return False
        self._count(view, workers)
        return True

    def _count(self, view: JobView, workers: int) -> None:
        for nodes in self._parts:
            if self._reach[view.job] <= nodes:
                add_amounts(self._used_by.setdefault((view.tenant, nodes), {}), view.bundle, workers)
        add_amounts(self.used[view.tenant], view.bundle, workers)
        self._counts[view.job] = self._counts.get(view.job, 0) + workers


def _exceeds(used: Mapping[str, float], view: JobView, workers: int, limit: Resources) -> bool:
    return any(used.get(r, 0.0) + workers * need > limit.get(r, 0.0) + TOLERANCE for r, need in view.bundle.items())


def _demand(problem: Problem, tenant: Tenant) -> dict[str, float]:
    """Return the resources that the tenant's jobs could use in the whole cluster, within its quota."""
    room = FreeResources(problem.cluster)
    wanted: dict[str, float] = {}
    for view in problem.views:
        if view.tenant == tenant.name:
            add_amounts(wanted, view.bundle, usable(view, room))
    part = min((tenant.quota[r] / amount for r, amount in wanted.items() if r in tenant.quota and amount), default=1.0)
    return {r: amount * min(part, 1.0) for r, amount in wanted.items()}


def _totals(cluster: Cluster) -> dict[str, float]:
    totals: dict[str, float] = {}
    for node in cluster.nodes:
        add_amounts(totals, node.free if not node.draining else {}, 1)
    return totals


def _used(views: Sequence[JobView], allocation: Allocation) -> dict[str, float]:
    used: dict[str, float] = {}
    for view in views:
        add_amounts(used, view.bundle, sum(allocation.get(view.job, {}).values()))
    return used


def within(problem: Problem, ceiling: Resources, first: Allocation) -> Problem:
    """Return the problem restricted to a part of the cluster with no more resources than ``ceiling``.

    Resources that ``ceiling`` omits are not limited. The part is chosen in this order: the placements ``first``, other
    workers that the jobs already hold, more workers on the same nodes, and then the nodes with the most room.
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
    """Return the nodes that some job can use, those with the most of the jobs' workers first, then the roomiest."""
    room = FreeResources(problem.cluster)
    fits = dict.fromkeys(room.node_ids, 0)
    for view in {worker_kind(view): view for view in problem.views}.values():
        for node_id, workers in zip(room.node_ids, room.slots(view).tolist(), strict=True):
            fits[node_id] = max(fits[node_id], workers)
    here: dict[str, int] = {}
    for view in problem.views:
        for node_id, workers in view.allocation.items():
            here[node_id] = here.get(node_id, 0) + workers
    usable = [node for node in problem.cluster.nodes if fits.get(node.node_id)]
    return sorted(usable, key=lambda node: (-here.get(node.node_id, 0), -fits[node.node_id], node.node_id))


class _Partition:
    """Part of the cluster that is being cut out, up to a ceiling."""

    def __init__(self, cluster: Cluster, ceiling: Resources) -> None:
        self._cluster = cluster
        self._left = dict(ceiling)
        self._taken: dict[str, dict[str, float]] = {
            node.node_id: {r: 0.0 for r in ceiling if r in node.free} for node in cluster.nodes
        }

    def take(self, node: Node, amounts: Mapping[str, float]) -> None:
        """Reserve these amounts on a node, as far as they are free and the ceiling allows."""
        taken = self._taken[node.node_id]
        for r in taken.keys() & amounts.keys():
            more = max(min(amounts[r], node.free[r] - taken[r], self._left[r]), 0.0)
            taken[r] += more
            self._left[r] -= more

    def fill(self, node: Node, bundle: Resources | None) -> None:
        """Reserve the rest of a node; with a bundle, only a whole number of bundles."""
        taken = self._taken[node.node_id]
        goal = {r: taken[r] + min(node.free[r] - taken[r], self._left[r]) for r in taken}
        if bundle is not None:
            workers = slots(goal, {r: bundle.get(r, 0.0) for r in taken})
            goal = {r: workers * bundle.get(r, 0.0) for r in taken}
        self.take(node, {r: goal[r] - taken[r] for r in taken})

    def cluster(self) -> Cluster:
        """Return the part as a cluster with the same nodes."""
        return Cluster(
            nodes=tuple(
                dataclasses.replace(node, free={**node.free, **self._taken[node.node_id]})
                for node in self._cluster.nodes
            )
        )
