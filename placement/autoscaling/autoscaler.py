"""Autoscaler: a state machine over jobs, node types and the current cluster, without a clock.

An objective decides how many workers each job should have (``placement.autoscaling.objectives``), and
``placement.autoscaling.fleet`` chooses nodes for these workers. The allocator's own policy is then queried to check
that it would use the nodes. The result is a ``ScalingDecision``; the caller requests and releases the nodes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from placement.arguments import NamesArguments
from placement.autoscaling.cluster_file import read_cluster_file
from placement.autoscaling.fleet import Fleet, build
from placement.autoscaling.objectives.base import Demand, Objective, WantedSize, offers, within_utilities
from placement.autoscaling.objectives.registry import make_objective
from placement.checks import check_kind, check_number, check_whole, plain_numbers
from placement.cluster.cluster import Allocation, Cluster, Node, Resources, by_node
from placement.cluster.jobs import Account, Bill, JobView
from placement.cluster.node_types import NodeType, check_types, obtainable, type_of
from placement.cluster.price_table import PriceTable
from placement.goodput.speeds import GoodputCache, foreseen
from placement.planning.constraints import Constraints
from placement.planning.plan import NO_CONSTRAINTS, make_plan
from placement.planning.wishes import without_wish
from placement.policies.shared.base import Policy
from placement.reasons import Cause, Reason
from placement.text import clipped, count

_MOST_HOURS = 1.0
_ACCOUNT_H = 24.0  # spending is averaged over so many hours, fading


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerConfig(NamesArguments):
    """Timing of the autoscaler [s].

    Attributes:
        linger_s: Time that a node is kept after the last job stops needing it, in case a job needs it again.
        launch_timeout_s: Time allowed beyond a node type's start-up time before a launch counts as failed and another
            type (for example, on-demand instead of spot) is requested.
        retry_s: Time after which a failed type is requested again. It doubles with each failure, up to 8 x.

    Examples:
        >>> from placement import AutoscalerConfig
        >>> AutoscalerConfig(linger_s=300.0).linger_s
        300.0
    """

    linger_s: float = 120.0
    launch_timeout_s: float = 120.0
    retry_s: float = 450.0

    def __post_init__(self) -> None:
        for field in ("linger_s", "launch_timeout_s", "retry_s"):
            check_number(field, getattr(self, field), least=0, unit="seconds")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """Decision about the cluster's nodes: those to add, keep and release, with reasons."""

    nodes: Mapping[str, int]  # by type, how many there should be; those that are there and stay included
    add: Mapping[str, int]  # by type, how many of these are not there yet; 0 is left out
    # ids of nodes that are given up: they get no workers, those on them move, and once empty they go
    release: tuple[str, ...]
    # ids of nodes that will be given up when what replaces them is there, or has not been needed for long
    leaving: tuple[str, ...]
    reasons: Mapping[str, Reason]  # by type, of each that changes or is closed
    wants: Mapping[str, WantedSize]  # by job, the workers that it should have, and why
    # by job, what its user must be told now: a deadline or budget that cannot be met, nodes that are short
    notes: Mapping[str, tuple[Reason, ...]]
    usd_per_h: float  # price of these nodes [USD/h]

    def note(self, job: str) -> str:
        """Return the messages for a job's user (such as an unreachable deadline) as one text, which may be empty."""
        return "; ".join(map(str, self.notes.get(job, ())))

    def explained(self, job: str) -> str:
        """Return a detailed explanation of a job's wanted size, with any messages for its user; it may be empty."""
        want = self.wants.get(job)
        said = (*((want.reason,) if want is not None else ()), *self.notes.get(job, ()))
        return "; ".join(each.explained for each in said)

    def bundles(self, types: Sequence[NodeType]) -> tuple[tuple[Resources, Mapping[str, str]], ...]:
        """Return the wanted nodes in the format of Ray's autoscaler: a resource bundle and label selector per node."""
        return tuple(
            (dict(each.resources), dict(each.labels)) for each in types for _ in range(self.nodes.get(each.name, 0))
        )


class Autoscaler:
    """Autoscaler with soft state: a new instance treats the nodes of a running cluster as already requested.

    Args:
        policy: The allocator's policy. Nodes that the policy would not use are not requested.
    """

    def __init__(
        self,
        types: Sequence[NodeType],
        policy: Policy,
        objective: str | Objective = "cost_per_progress",
        config: AutoscalerConfig | None = None,
        constraints: Constraints = NO_CONSTRAINTS,
        most_nodes: int | None = None,
    ) -> None:
        check_types(types)
        self._most_nodes = most_nodes
        self._types = tuple(types)
        self._policy = policy
        self._objective = make_objective(objective)
        self._config = config or AutoscalerConfig()
        self._constraints = constraints
        self._launches = Launches(types, timeout_s=self._config.launch_timeout_s, retry_s=self._config.retry_s)
        self._lifetimes = Lifetimes(types)
        self._cache = GoodputCache()
        self._wanted: Mapping[str, int] = {}
        self._released: tuple[str, ...] = ()
        self._targets: collections.deque[tuple[float, Mapping[str, int]]] = collections.deque()
        self._bills: dict[str, Bill] = {}
        self._forgotten: set[str] = set()
        self.account = Account()  # recent cost of all nodes and mean number of jobs, for the objective "budget"
        self._counted_s: float | None = None

    @property
    def spent_usd(self) -> Mapping[str, float]:
        """Cost of each job so far [USD]: its share of the cost of the nodes its workers ran on."""
        return {job: bill.usd for job, bill in tuple(self._bills.items())}

    def resume(self, account: Account) -> None:
        """Continue from the recent costs that an earlier autoscaler kept in its ``account``."""
        self.account = account

    def bill(self, job: str) -> Bill | None:
        """Return the costs charged to a job so far; None if the job is unknown. Fast enough for each heartbeat."""
        return self._bills.get(job)

    def discard(self, job: str) -> float:
        """Remove a job that has ended and return its cost [USD]; safe while ``decide`` is running in another thread."""
        self._forgotten.add(job)
        return self._bills.pop(job, Bill()).usd

    def refuse(self, name: str, why: str, now_s: float) -> None:
        """Record that the provider cannot supply nodes of type ``name`` now, so that other types are requested."""
        self._launches.refuse(name, why, now_s)

    def decide(self, views: Sequence[JobView], cluster: Cluster, now_s: float) -> ScalingDecision:
        """Decide which nodes the cluster should have."""
        there = self._there(cluster)
        present = {name: len(nodes) for name, nodes in there.items()}
        self._lifetimes.watch(cluster, self._released, now_s)
        self._launches.watch(self._wanted, present, now_s)
        self._count_costs(views, cluster)
        self._keep_account(len(views), cluster, now_s)
        lasts_h = {each.name: self._lifetimes.hours(each.name) for each in self._types}
        limited = self._limited(present, now_s)
        # A node that is asked for now is there for the batches of then.
        coming = self._foreseen(views, cluster)
        demand = within_utilities(self._demand(coming, cluster, limited, lasts_h), now_s)
        wants = self._objective.decide(demand, now_s)
        static = [node for node in cluster.nodes if type_of(node, self._types) is None]
        fleet = build(wants, demand.jobs, limited, static, present, lasts_h, self._most_nodes)
        order = self._order(there, views)
        surplus = {node.node_id for name, nodes in order.items() for node in nodes[fleet.nodes[name] :]}
        target = self._used(fleet.nodes, there, coming, cluster.draining(surplus), now_s)
        keep = self._kept(target, present, now_s)
        release = self._give_up(keep, target, order, views, cluster, now_s)
        leaving = tuple(sorted(surplus - set(release)))
        return self._decided(target, release, leaving, fleet, wants, there, now_s)

    def _there(self, cluster: Cluster) -> dict[str, list[Node]]:
        """Return existing nodes by type, without draining ones."""
        there: dict[str, list[Node]] = {each.name: [] for each in self._types}
        for node in cluster.nodes:
            name = type_of(node, self._types)
            if name is not None and not node.draining:
                there[name].append(node)
        return there

    def _order(self, there: Mapping[str, Sequence[Node]], views: Sequence[JobView]) -> dict[str, list[Node]]:
        """Return nodes by type, best to keep first: those not released before, then those with the most workers."""
        load: collections.defaultdict[str, float] = collections.defaultdict(float)
        for view in views:
            for node_id, workers in by_node(view.allocation).items():
                load[node_id] += workers
        return {
            name: sorted(nodes, key=lambda n: (n.node_id in self._released, -load[n.node_id], n.node_id))
            for name, nodes in there.items()
        }

    def _limited(self, present: Mapping[str, int], now_s: float) -> tuple[NodeType, ...]:
        """Return the types; a closed type is limited to its existing nodes."""
        return tuple(
            each
            if self._launches.closed(each.name, now_s) is None
            else dataclasses.replace(
                each, max_nodes=present[each.name], min_nodes=min(each.min_nodes, present[each.name])
            )
            for each in self._types
        )

    def _foreseen(self, views: Sequence[JobView], cluster: Cluster) -> list[JobView]:
        """Return the jobs with the batches that they will have once new nodes have started."""
        gpus = {node.node_id: node.gpu_type for node in cluster.nodes}
        start_s = max(each.startup_s for each in self._types)
        return [
            view
            if view.forecast is None and view.noise_growth == 1.0
            else foreseen(view, gpus.get(next(iter(view.allocation), ""), ""), start_s, self._cache)
            for view in views
        ]

    def _demand(
        self, views: Sequence[JobView], cluster: Cluster, types: Sequence[NodeType], lasts_h: Mapping[str, float]
    ) -> Demand:
        """Return the objective's input: jobs by arrival, their options on these types, and current GPU types."""
        gpus = {node.node_id: node.gpu_type for node in cluster.nodes}
        jobs = tuple(sorted(views, key=lambda view: view.arrival))
        return Demand(
            jobs=jobs,
            offers={view.job: offers(view, types, lasts_h, self._cache) for view in jobs},
            spent_usd=self.spent_usd,
            gpus={view.job: next((gpus[node] for node in view.allocation if node in gpus), None) for view in jobs},
            account=self.account,
        )

    def _keep_account(self, jobs: int, cluster: Cluster, now_s: float) -> None:
        """Add the cost of the nodes since the last call. If the clock jumps ahead, at most one hour is counted."""
        hours = 0.0 if self._counted_s is None else min(max(now_s - self._counted_s, 0.0) / 3600.0, _MOST_HOURS)
        prices = {each.name: each.usd_per_h for each in self._types}
        usd_per_h = sum(prices.get(type_of(node, self._types) or "", 0.0) for node in cluster.nodes)
        self.account = self.account.after(hours, usd_per_h, jobs, _ACCOUNT_H)
        self._counted_s = now_s

    def _count_costs(self, views: Sequence[JobView], cluster: Cluster) -> None:
        """Charge each job for its workers' share of their nodes since the last call, at current prices.

        A job that no longer has workers pays for those it had at the last call. A job seen for the first time brings
        its bill from the previous allocator.

        The job reports the elapsed time from a monotonic clock. If this process's clock were used, setting a machine's
        clock ten hours ahead would charge each job for ten hours.

        The views may predate a job's end, and charging the job would bring it back for good. A job that was discarded
        since the last call is therefore skipped; a new job with the same name pays for that time in the next call.
        """
        forgotten = frozenset(self._forgotten)
        for job in forgotten:
            self._bills.pop(job, None)
        types = {each.name: each for each in self._types}
        of = {node.node_id: types.get(type_of(node, self._types) or "") for node in cluster.nodes}
        for view in views:
            if view.job in forgotten:
                continue
            usd_per_h = 0.0
            for node, workers in by_node(view.allocation).items():
                kind = of.get(node)
                usd_per_h += 0.0 if kind is None else kind.usd_per_h * kind.share(view, workers)
            bill = self._bills.get(view.job) or view.bill or Bill()
            held_s = max(view.attained_s - bill.attained_s, 0.0)  # a controller that is started anew counts from 0
            price = usd_per_h / view.workers if view.workers else bill.worker_usd_per_h
            usd = bill.usd + price * held_s / 3600.0
            self._bills[view.job] = Bill(usd=usd, attained_s=view.attained_s, worker_usd_per_h=price)
        self._forgotten -= forgotten

    def _used(
        self,
        target: Mapping[str, int],
        there: Mapping[str, Sequence[Node]],
        views: Sequence[JobView],
        cluster: Cluster,
        now_s: float,
    ) -> dict[str, int]:
        """Return the target without new nodes that would get no worker after surplus nodes are gone."""
        left = dict(target)
        while True:
            fresh = {
                f"{each.name}~{i}": each
                for each in self._types
                for i in range(len(there[each.name]), left[each.name])
                if i >= each.min_nodes
            }
            nodes = (*cluster.nodes, *(each.node(node_id) for node_id, each in fresh.items()))
            plan = self._plan(views, Cluster(nodes=nodes), now_s) if fresh else {}
            used = {node for place in plan.values() for node in by_node(place)}
            unused = [each for node_id, each in fresh.items() if node_id not in used]
            if not unused:
                return left
            for each in unused:  # without them the allocator may use others, so it is asked again
                left[each.name] -= 1

    def _kept(self, target: Mapping[str, int], present: Mapping[str, int], now_s: float) -> dict[str, int]:
        """Return how many existing nodes of each type to keep: the most that were wanted in the last ``linger_s``."""
        if not self._targets:  # made anew beside jobs that it has yet to hear of: nothing goes at once
            self._targets.append((now_s, present))
        self._targets.append((now_s, target))
        while self._targets[0][0] < now_s - self._config.linger_s:
            self._targets.popleft()
        return {name: min(n, max(past[name] for _, past in self._targets)) for name, n in present.items()}

    def _give_up(
        self,
        keep: Mapping[str, int],
        target: Mapping[str, int],
        order: Mapping[str, Sequence[Node]],
        views: Sequence[JobView],
        cluster: Cluster,
        now_s: float,
    ) -> tuple[str, ...]:
        """Return the nodes to release, out of those that exceed ``keep``.

        While requested nodes are still missing, only empty nodes are released, because the missing nodes may be needed
        to take over workers. No node is released if some running job would have to stop.
        """
        busy = {node for view in views for node in by_node(view.allocation)}
        waits = any(target[name] > len(nodes) for name, nodes in order.items())
        surplus = [node.node_id for name, nodes in order.items() for node in nodes[keep[name] :]]
        empty = [node for node in surplus if node not in busy]
        # An empty one too may be what lets a job run: without it a waiting one may start where that job is.
        for release in (empty if waits else surplus, empty):
            plan = self._plan(views, cluster.draining(release), now_s) if release else {}
            if not release or all(view.job in plan for view in views if view.workers):
                return tuple(sorted(release))
        return ()

    def _plan(self, views: Sequence[JobView], cluster: Cluster, now_s: float) -> Allocation:
        asked = [without_wish(view, {}) for view in views]  # a wish is for slots that are there
        return make_plan(self._policy, asked, cluster, now_s, self._constraints).allocation

    def _decided(
        self,
        target: Mapping[str, int],
        release: tuple[str, ...],
        leaving: tuple[str, ...],
        fleet: Fleet,
        wants: Mapping[str, WantedSize],
        there: Mapping[str, Sequence[Node]],
        now_s: float,
    ) -> ScalingDecision:
        """Return the decision, with reasons by node type and notes by job, and start waiting for its nodes."""
        gone = set(release)
        stay = {name: sum(1 for node in nodes if node.node_id not in gone) for name, nodes in there.items()}
        nodes = {name: max(target[name], n) for name, n in stay.items()}
        add = {name: n - stay[name] for name, n in nodes.items() if n > stay[name]}
        reasons: dict[str, Reason] = {}
        for each in self._types:
            name, closed = each.name, self._launches.closed(each.name, now_s)
            changes = name in add or len(there[name]) != stay[name]
            said = _why(fleet.users[name], wants).because(closed) if changes else closed
            if said is not None:
                reasons[name] = said.with_figures(f"{len(there[name])} -> {count(nodes[name], 'node')}")
        notes = {job: (want.note,) for job, want in wants.items() if want.note is not None}
        for job, short in fleet.short.items():
            notes[job] = (*notes.get(job, ()), Reason(Cause.NO_NODE, (short, wants[job].workers)))
        self._wanted, self._released = nodes, release
        self._launches.watch(nodes, {name: len(each) for name, each in there.items()}, now_s)  # counts from now
        return ScalingDecision(
            nodes=nodes,
            add=add,
            release=release,
            leaving=leaving,
            reasons=reasons,
            wants=wants,
            notes=notes,
            usd_per_h=sum(each.usd_per_h * nodes[each.name] for each in self._types),
        )


def _why(users: Sequence[str], wants: Mapping[str, WantedSize]) -> Reason:
    """Return why nodes of this type are needed, naming the job that wants the most workers on them."""
    if not users:
        return Reason(Cause.UNUSED)
    first = max(users, key=lambda job: wants[job].workers)
    who = f"job {first}" if len(users) == 1 else f"job {first} (+{len(users) - 1})"
    return Reason(Cause.NEEDED, (who, wants[first].reason.words), wants[first].reason.figures)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling(NamesArguments):
    """Configuration that lets the allocator choose the number of nodes of each type; Ray starts and stops the nodes.

    Attributes:
        node_types: Node types that may be requested; :meth:`from_file` reads them from a cluster file.
        max_nodes: Maximum total number of nodes, across all types; None for no limit.
        objective: An objective object, or a name: "budget", "cost_per_progress", "utility_band", "utility_cost",
            "throughput_efficiency".
        budget_usd_per_h: Limit on the total cost of all nodes, averaged over a day [USD/h]; only for the objective
            "budget".
        times: Timing of node requests and releases.
        interval_s: Time between two decisions [s].

    Examples:
        >>> from placement import Autoscaling, NodeType
        >>> node = NodeType(name="t4", resources={"CPU": 8.0, "GPU": 4.0}, usd_per_h=2.0, max_nodes=8)
        >>> Autoscaling(node_types=(node,)).objective
        'cost_per_progress'
    """

    node_types: tuple[NodeType, ...]
    max_nodes: int | None = None
    objective: str | Objective = "cost_per_progress"
    times: AutoscalerConfig = dataclasses.field(default_factory=AutoscalerConfig)
    interval_s: float = 2.0
    budget_usd_per_h: float | None = None

    def __post_init__(self) -> None:
        check_types(self.node_types)
        make_objective(self.objective, self.budget_usd_per_h)
        if self.max_nodes is not None:
            check_whole("max_nodes", self.max_nodes, least=1)
        check_kind("times", self.times, AutoscalerConfig, "AutoscalerConfig(...)")
        check_number("interval_s", self.interval_s, above=0, unit="seconds")
        plain_numbers(self)

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        prices: PriceTable | None = None,
        objective: str | Objective = "cost_per_progress",
        budget_usd_per_h: float | None = None,
    ) -> Autoscaling:
        """Return the configuration for the cluster described by a ``ray up`` file or a KubeRay manifest.

        Args:
            path: Path of the file.
            prices: Prices keyed by instance type; None uses built-in approximate prices.
            objective: As in :class:`Autoscaling`.
            budget_usd_per_h: As in :class:`Autoscaling`.

        Raises:
            InputError: The file has no worker type, or an instance type that is not in the price table.
        """
        file = read_cluster_file(path, prices)
        return cls(
            node_types=file.types, max_nodes=file.max_nodes, objective=objective, budget_usd_per_h=budget_usd_per_h
        )

    @property
    def chosen(self) -> Objective:
        """Objective object: ``objective`` itself, or the object that it names."""
        return make_objective(self.objective, self.budget_usd_per_h)

    @property
    def obtainable(self) -> tuple[Node, ...]:
        """Every node that could be requested, up to the maximum of each type."""
        return obtainable(self.node_types)


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """Nodes of one type that were requested and have not arrived yet."""

    since_s: float
    present: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Failed:
    """Consecutive failed launches of one type, with the fewest nodes of that type seen since the last failure."""

    times: int
    fewest: int


class Launches:
    """Tracker of node launches: a type whose nodes do not arrive is closed for a while, and others are requested.

        requested --(arrives)--> present
        requested --(nothing arrives for startup + timeout)--> closed for retry x 2^failures --> open again

    If the provider reports that it has no more nodes of a type (``refuse``), the type is closed at once. A closed type
    keeps its existing nodes and gets no more. The failure count is reset only when a new node arrives.

    Args:
        timeout_s: Time allowed beyond the start-up time before a launch counts as failed [s].
        retry_s: Time until a closed type is requested again [s]. It doubles with each failure, up to 8 x.
    """

    def __init__(self, types: Sequence[NodeType], *, timeout_s: float, retry_s: float) -> None:
        self._types = {each.name: each for each in types}
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._asked: dict[str, _Asked] = {}
        self._closed: dict[str, tuple[float, str]] = {}
        self._failed: dict[str, _Failed] = {}
        self._present: Mapping[str, int] = {}

    def watch(self, wanted: Mapping[str, int], present: Mapping[str, int], now_s: float) -> None:
        """Close node types whose launches have failed; ``wanted`` and ``present`` are numbers of nodes keyed by type.

        No more nodes of a closed type are requested until it opens again.
        """
        self._present = present
        for name, each in self._types.items():
            there, asked, failed = present.get(name, 0), self._asked.get(name), self._failed.get(name)
            if failed is not None and there > failed.fewest:
                del self._failed[name]
            elif failed is not None:
                self._failed[name] = dataclasses.replace(failed, fewest=there)
            if there >= wanted.get(name, 0):
                self._asked.pop(name, None)
            elif asked is None or there > asked.present:
                self._asked[name] = _Asked(since_s=now_s, present=there)
            elif now_s - asked.since_s >= each.startup_s + self._timeout_s:
                missing = wanted[name] - there
                waited_s = now_s - asked.since_s
                self.refuse(name, f"{missing} x {name} did not come in {waited_s:.0f} s", now_s)
            else:
                self._asked[name] = dataclasses.replace(asked, present=min(asked.present, there))

    def refuse(self, name: str, why: str, now_s: float) -> None:
        """Close a node type (request no more for a while) that the provider cannot supply; ``why`` is its message."""
        if name in self._types and self.closed(name, now_s) is None:
            failed = self._failed.get(name)
            times = 0 if failed is None else failed.times
            self._failed[name] = _Failed(times=times + 1, fewest=self._present.get(name, 0))
            self._closed[name] = now_s + self._retry_s * 2 ** min(times, 3), clipped(why)
        self._asked.pop(name, None)

    def closed(self, name: str, now_s: float) -> Reason | None:
        """Return the reason why no more nodes of this type are requested; None if the type is open."""
        until_s, why = self._closed.get(name, (float("-inf"), ""))
        return None if now_s >= until_s else Reason(Cause.CLOSED, (why,), f"asked again in {until_s - now_s:.0f} s")


class Lifetimes:
    """Expected node lifetime per type, estimated from observed hours and losses with a prior of one loss.

        lasts = (hours seen + expected) / (losses seen + 1)

    ``expected`` is ``NodeType.lasts_h``. This is a Gamma prior of weight one on the loss rate, so that a single unlucky
    or lucky hour does not dominate.
    """

    def __init__(self, types: Sequence[NodeType]) -> None:
        self._types = {each.name: each for each in types}
        self._hours = dict.fromkeys(self._types, 0.0)
        self._losses = dict.fromkeys(self._types, 0)
        self._seen: dict[str, str] = {}
        self._seen_s: float | None = None
        self._leaving: frozenset[str] = frozenset()

    def watch(self, cluster: Cluster, given_up: Collection[str], now_s: float) -> None:
        """Update the observed node hours, and count nodes that the cloud has reclaimed.

        Args:
            given_up: Ids of nodes that the last decision released, except draining ones. The loss of a released node
                does not count, even if the node was draining in the meantime.
        """
        ours = self._leaving.union(given_up)
        here = {n.node_id: kind for n in cluster.nodes if (kind := type_of(n, tuple(self._types.values()))) is not None}
        if self._seen_s is not None:
            for node_id, kind in self._seen.items():
                self._hours[kind] += max(now_s - self._seen_s, 0.0) / 3600.0
                if node_id not in here and node_id not in ours:
                    self._losses[kind] += 1
        self._leaving = frozenset(n.node_id for n in cluster.nodes if n.draining and n.node_id in ours)
        self._seen, self._seen_s = here, now_s

    def hours(self, name: str) -> float:
        """Return the mean time until a node of this type is reclaimed [h]; infinity if that never happens."""
        expected = self._types[name].lasts_h
        if expected == float("inf"):
            return expected
        return (self._hours[name] + expected) / (self._losses[name] + 1)
