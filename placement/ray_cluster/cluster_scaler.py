"""SHELL: node requests to Ray, based either on decisions by ``Autoscaler`` or only on waiting jobs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import ray

from placement.autoscaling.autoscaler import Autoscaler, Autoscaling, ScalingDecision
from placement.cluster.cluster import Cluster, Resources, by_node, is_split
from placement.cluster.jobs import JobView
from placement.planning.constraints import Constraints
from placement.planning.tenants import Tenant
from placement.policies.shared.base import Policy
from placement.ray_cluster import notes
from placement.ray_cluster.autoscaler_presence import may_autoscale

logger = logging.getLogger("placement.nodes")

_COORDINATOR = "AutoscalingCoordinator"  # name and namespace
_REQUESTER = "elastic_ray"
_EXPIRES_S = 180.0
_REPEAT_S = 20.0
_ANSWER_S = 5.0
_LOOK_S = 20.0  # longest wait for one look; it asks Ray several times, five seconds each at the most
_EVERY_S = 2.0  # between two looks at the demand of waiting jobs
_LOOK_AGAIN_S = 60.0  # for an autoscaler that was not there
Bundles = Sequence[tuple[Resources, Mapping[str, str]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Failed launch of a node: its time [s since the epoch], the node type, and the provider's message."""

    node_type: str
    at_s: float
    why: str


# `request_resources` is one list for the whole cluster, and the coordinator, an actor that merges the lists of all
# its users, sends its own again every 20 s: a direct call of Ray beside it is undone, and undoes the others. So the
# coordinator is looked for with every call. Its class is private; actor name and methods are used as Ray Train does.
class NodeRequests:
    """Node requests that are sent to Ray on every change and repeated every 20 s; the calls block briefly."""

    def __init__(self) -> None:
        self._told: list[tuple[dict[str, float], dict[str, str]]] | None = None
        self._at_s = 0.0
        self._by_coordinator = False

    def ask(self, bundles: Bundles) -> None:
        """Request that the cluster have room for all of these bundles at once, including room on existing nodes."""
        wanted = [(dict(resources), dict(labels)) for resources, labels in bundles]
        coordinator = _coordinator()
        due = time.monotonic() - self._at_s > _REPEAT_S
        if wanted == self._told and not due and self._by_coordinator == (coordinator is not None):
            return
        if coordinator is not None:
            ray.get(_through(coordinator, wanted), timeout=_ANSWER_S)
        else:  # also the first time and with nothing: the list of an allocator before this one outlives it
            from ray.autoscaler.sdk import request_resources  # 4 MB that most allocators, and all controllers, need not

            resources = [resources for resources, _ in wanted]
            request_resources(bundles=resources, bundle_label_selectors=[labels for _, labels in wanted])
        if wanted != self._told:
            logger.info("nodes asked for: %s", _shown(wanted))
        self._told, self._at_s, self._by_coordinator = wanted, time.monotonic(), coordinator is not None

    def withdraw(self) -> None:
        """Withdraw all requests, since Ray's requests outlive the process that made them."""
        self.ask(())


def refusals(since_s: float) -> tuple[Refusal, ...]:
    """Return node launches that failed after ``since_s`` [s since the epoch], as only autoscaler v2 reports them."""
    try:
        from ray.autoscaler.v2.sdk import get_cluster_status

        status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=int(_ANSWER_S))
    except Exception:  # a read-only or older autoscaler; time-outs of our own take its place
        return ()
    return tuple(found for found in map(refusal, status.failed_launches) if found.at_s > since_s)


def refusal(launch: Any) -> Refusal:
    """Return the refusal that Ray's ``LaunchRequest`` reports; its details may be missing, blank or span many lines."""
    lines = (launch.details or "").strip().splitlines()
    return Refusal(
        node_type=launch.ray_node_type_name,
        at_s=float(launch.failed_ts_s or launch.request_ts_s),
        why=lines[0] if lines else "the launch failed",
    )


def _coordinator() -> Any | None:
    try:
        return ray.get_actor(_COORDINATOR, namespace=_COORDINATOR)
    except ValueError:
        return None


def _through(coordinator: Any, wanted: Sequence[tuple[dict[str, float], dict[str, str]]]) -> Any:
    """Return an object reference to the coordinator's answer to a request for these nodes, or to a withdrawal."""
    if not wanted:
        return coordinator.cancel_request.remote(_REQUESTER)
    from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import ResourceRequestPriority

    return coordinator.request_resources.remote(
        requester_id=_REQUESTER,
        resources=[resources for resources, _ in wanted],
        label_selectors=[labels for _, labels in wanted],
        expire_after_s=_EXPIRES_S,
        priority=ResourceRequestPriority.HIGH,  # as Ray Train's: data jobs get what is left
    )


def _shown(wanted: Sequence[tuple[dict[str, float], dict[str, str]]]) -> str:
    counts: dict[str, int] = {}
    for resources, labels in wanted:
        key = f"{resources}" + (f" with {labels}" if labels else "")
        counts[key] = counts.get(key, 0) + 1
    return ", ".join(f"{n} x {key}" for key, n in counts.items()) or "none"


class ClusterScaler:
    """Scaler of the cluster for one allocator, which decides every ``interval_s`` without delaying running jobs."""

    def __init__(self, config: Autoscaling, policy: Policy, constraints: Constraints) -> None:
        self._config = config
        self.autoscaler = Autoscaler(
            config.node_types, policy, config.chosen, config.times, constraints, most_nodes=config.max_nodes
        )
        self._requests = NodeRequests()
        self._looked_s = float("-inf")
        self._refused_s: float | None = None
        self._poll: asyncio.Task[None] | None = None
        self.decision: ScalingDecision | None = None

    def marked(self, cluster: Cluster) -> Cluster:
        """Return a copy of the cluster with nodes to be released marked as draining, so that jobs leave them."""
        if self.decision is None or not self.decision.release:
            return cluster
        return cluster.draining(set(self.decision.release))

    @property
    def spot_types(self) -> frozenset[str]:
        """Names of node types whose nodes the cloud may reclaim."""
        return frozenset(each.name for each in self._config.node_types if each.spot)

    def is_due(self) -> bool:
        """True if a decision is due and the last one has finished."""
        # A wall clock that is set back would stop all looks, and with them the requests that Ray lets expire.
        waits = time.monotonic() - self._looked_s < self._config.interval_s
        return not waits and (self._poll is None or self._poll.done())

    def poll(self, views: Sequence[JobView], cluster: Cluster, now_s: float) -> None:
        """Start a new decision in the background; call this only if ``is_due``."""
        self._looked_s = time.monotonic()
        self._poll = asyncio.get_running_loop().create_task(self._carry_out(list(views), cluster, now_s))

    async def _carry_out(self, views: list[JobView], cluster: Cluster, now_s: float) -> None:
        try:
            await asyncio.to_thread(self._decide, views, cluster, now_s)
        except Exception:
            logger.exception("a look at the cluster's size failed; the next follows in %g s", self._config.interval_s)

    def _decide(self, views: list[JobView], cluster: Cluster, now_s: float) -> None:
        """Process failed launches, make a new decision, and request the nodes from Ray. Blocks; changes are logged."""
        if self._refused_s is None:
            self._refused_s = now_s
            self.autoscaler.resume(notes.account())
        for refusal in refusals(self._refused_s):
            self._refused_s = max(self._refused_s, refusal.at_s)
            logger.warning("no node of type %s: %s", refusal.node_type, refusal.why)
            self.autoscaler.refuse(refusal.node_type, refusal.why, now_s)
        before, decision = self.decision, self.autoscaler.decide(views, cluster, now_s)
        notes.keep_account(self.autoscaler.account)
        self._requests.ask(decision.bundles(self._config.node_types))
        if before is None or (before.nodes, before.release) != (decision.nodes, decision.release):
            for name, reason in decision.reasons.items():
                logger.info("nodes of type %s: %s", name, reason.explained)
        for job in decision.notes:
            if before is None or before.note(job) != decision.note(job):
                logger.warning("job %s: %s", job, decision.note(job))
        self.decision = decision

    async def withdraw(self) -> None:
        """Withdraw all requests for nodes, because another allocator will replace this one."""
        self._looked_s = time.monotonic()  # not at once again, before it has gone
        if self._poll is not None:
            await asyncio.wait([self._poll], timeout=_LOOK_S)
        await asyncio.wait_for(asyncio.to_thread(self._requests.withdraw), timeout=_LOOK_S)


def demand(jobs: Collection[JobView], waiting: Collection[str], tenants: Iterable[Tenant] = ()) -> Bundles:
    """Return (resources, labels) for each worker that should find room; empty if no job is waiting (pure).

    Each job counts with its minimum, or with the size at which it is held, so that no job waits if all bundles fit. A
    waiting job that does not fit into its tenant's quota is not counted.
    """
    if not waiting:
        return ()
    quotas: Mapping[str, Resources] = {each.name: each.quota for each in tenants}
    used: dict[tuple[str, str], float] = {}
    found: list[tuple[Resources, Mapping[str, str]]] = []
    for view in sorted(jobs, key=lambda view: (view.job in waiting, -view.priority, view.arrival)):
        workers = view.held_at or view.min_workers
        needs = {(view.tenant, name): workers * amount for name, amount in view.bundle.items()}
        quota = quotas.get(view.tenant, {})
        within = all(used.get(key, 0.0) + need <= quota.get(key[1], need + 1e18) for key, need in needs.items())
        if view.job in waiting and not within:
            continue
        used |= {key: used.get(key, 0.0) + need for key, need in needs.items()}
        # The parts of units that span nodes: no node type may hold one, and Ray then meets no part of a request.
        wide = [place for place, units in view.allocation.items() if is_split(place) for _ in range(units)][:workers]
        shares = [share for place in wide for share in by_node({place: 1}).values()]
        found += [({name: n * share for name, n in view.bundle.items()}, view.selector) for share in shares]
        found += [(view.bundle, view.selector)] * (workers - len(wide))
    return found


class WaitingDemand:
    """One allocator's requests to Ray's autoscaler for waiting jobs; the calls to Ray run in a thread."""

    def __init__(self) -> None:
        self._requests = NodeRequests()
        self._asked: bool | None = None  # an allocator before this one may have asked for nodes
        self._looked_s = self._sought_s = float("-inf")
        self._poll: asyncio.Task[None] | None = None
        self.present = False

    def poll(self, bundles: Bundles) -> None:
        """Request these bundles in the background, if a request is due and the last one has finished."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _EVERY_S or (self._poll is not None and not self._poll.done()):
            return
        if not bundles and self._asked is False:
            return
        self._looked_s = now_s
        self._poll = asyncio.get_running_loop().create_task(self._carry_out(list(bundles)))

    async def _carry_out(self, bundles: Bundles) -> None:
        try:
            await asyncio.to_thread(self._ask, bundles)
        except Exception:
            logger.exception("Ray's autoscaler was not asked for nodes; the next look follows in %g s", _EVERY_S)

    def _ask(self, bundles: Bundles) -> None:
        """Request nodes if an autoscaler is running; without bundles, only withdraw an earlier request."""
        if self._asked is None:
            self._asked = notes.asks_for_nodes()
        if not bundles and not self._asked:  # a list that a user has asked Ray for is not to be overwritten
            return
        if not self.present and time.monotonic() - self._sought_s > _LOOK_AGAIN_S:
            self._sought_s = time.monotonic()
            self.present = may_autoscale()
        if self.present:
            if bool(bundles) != self._asked:
                notes.keep_asks_for_nodes(bool(bundles))
            self._requests.ask(bundles)
            self._asked = bool(bundles)

    async def withdraw(self) -> None:
        """Withdraw all requests for nodes from Ray's autoscaler."""
        if self._poll is not None:
            await asyncio.wait([self._poll])
        if self._asked:
            await asyncio.to_thread(self._ask, ())
