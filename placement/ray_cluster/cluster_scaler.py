"""SHELL: carries out what :class:`placement.autoscaling.autoscaler.Autoscaler` decides about the cluster's nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from placement.autoscaling.autoscaler import Autoscaler, ScalingDecision
from placement.autoscaling.config import Autoscaling
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import Bill, JobView
from placement.planning.constraints import Constraints
from placement.policies.shared.base import Policy
from placement.ray_cluster import notes
from placement.ray_cluster.node_requests import NodeRequests, refusals

logger = logging.getLogger("placement.nodes")

_LOOK_S = 20.0  # longest wait for one look; it asks Ray several times, five seconds each at the most


class ClusterScaler:
    """One of the allocator: looks every ``interval_s``; a look never holds up running jobs.

    Args:
        config: node types, objective, times.
        policy: of the allocator's kind, but not its own instance: looks take place in a thread.
        constraints: the allocator's.
    """

    def __init__(self, config: Autoscaling, policy: Policy, constraints: Constraints) -> None:
        self._config = config
        self._autoscaler = Autoscaler(
            config.node_types, policy, config.chosen, config.times, constraints, most_nodes=config.max_nodes
        )
        self._requests = NodeRequests()
        self._looked_s = float("-inf")
        self._refused_s: float | None = None
        self._look: asyncio.Task[None] | None = None
        self.decision: ScalingDecision | None = None

    @property
    def spent_usd(self) -> Mapping[str, float]:
        """What each job has cost so far [USD]."""
        return self._autoscaler.spent_usd

    def bill(self, job: str) -> Bill | None:
        """What one job has cost so far; None before the first look that saw it."""
        return self._autoscaler.bill(job)

    def marked(self, cluster: Cluster) -> Cluster:
        """The cluster as jobs are to see it: a node that is given up is one that drains."""
        if self.decision is None or not self.decision.release:
            return cluster
        return cluster.draining(set(self.decision.release))

    @property
    def spot_types(self) -> frozenset[str]:
        """Node types whose nodes may be taken away."""
        return frozenset(each.name for each in self._config.node_types if each.spot)

    def look(self, views: Sequence[JobView], cluster: Cluster, now_s: float) -> None:
        """Decide anew, if it is time and the last look is over."""
        # A wall clock that is set back would stop all looks, and with them the requests that Ray lets expire.
        present_s = time.monotonic()
        if present_s - self._looked_s < self._config.interval_s or (self._look is not None and not self._look.done()):
            return
        self._looked_s = present_s
        self._look = asyncio.get_running_loop().create_task(self._carry_out(list(views), cluster, now_s))

    async def _carry_out(self, views: list[JobView], cluster: Cluster, now_s: float) -> None:
        try:
            await asyncio.to_thread(self._decide, views, cluster, now_s)
        except Exception:
            logger.exception("a look at the cluster's size failed; the next follows in %g s", self._config.interval_s)

    def _decide(self, views: list[JobView], cluster: Cluster, now_s: float) -> None:
        """Take in failed launches, decide anew, and ask Ray for the nodes; calls block, and what is new is logged."""
        if self._refused_s is None:
            self._refused_s = now_s
            self._autoscaler.resume(notes.account())
        for refusal in refusals(self._refused_s):
            self._refused_s = max(self._refused_s, refusal.at_s)
            logger.warning("no node of type %s: %s", refusal.node_type, refusal.why)
            self._autoscaler.refuse(refusal.node_type, refusal.why, now_s)
        before, decision = self.decision, self._autoscaler.decide(views, cluster, now_s)
        notes.keep_account(self._autoscaler.account)
        self._requests.ask(decision.bundles(self._config.node_types))
        if before is None or (before.nodes, before.release) != (decision.nodes, decision.release):
            for reason in decision.reasons.values():
                logger.info("nodes: %s", reason)
        for job, note in decision.notes.items():
            if before is None or before.notes.get(job) != note:
                logger.warning("job %s: %s", job, note)
        self.decision = decision

    async def withdraw(self) -> None:
        """Ask for no node any more: the allocator makes way for another one."""
        self._looked_s = time.monotonic()  # not at once again, before it has gone
        if self._look is not None:
            await asyncio.wait([self._look], timeout=_LOOK_S)
        await asyncio.wait_for(asyncio.to_thread(self._requests.withdraw), timeout=_LOOK_S)

    def forget(self, job: str) -> float:
        """The job has ended; what it has cost [USD]."""
        return self._autoscaler.forget(job)
