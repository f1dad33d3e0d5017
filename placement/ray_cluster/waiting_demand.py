"""SHELL: requests for nodes for waiting jobs, sent to Ray's autoscaler if one runs.

This implements ``AllocatorConfig(autoscaling="auto")``. Ray sees no demand of waiting jobs, as they hold no groups.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping

from placement.cluster.cluster import Resources
from placement.cluster.jobs import JobView
from placement.planning.tenants import Tenant
from placement.ray_cluster import notes
from placement.ray_cluster.autoscaler_presence import may_autoscale
from placement.ray_cluster.cluster_scaler import Bundles, NodeRequests

logger = logging.getLogger("placement.nodes")

_EVERY_S = 2.0
_LOOK_AGAIN_S = 60.0  # for an autoscaler that was not there


def demand(jobs: Collection[JobView], waiting: Collection[str], tenants: Iterable[Tenant] = ()) -> Bundles:
    """Return the workers that the cluster should have room for, all at once; none while no job waits (pure).

    Each job counts with its minimum, or with the size that it is held at; with room for these no job waits. A waiting
    job that does not fit into its tenant's quota is not counted.

    Args:
        jobs: All jobs except paused ones.
        waiting: Names of the jobs that have no workers.
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
        found += [(view.bundle, view.selector)] * workers
    return found


class WaitingDemand:
    """Requests of one allocator to Ray's autoscaler. Calls of Ray block, so they run in a thread."""

    def __init__(self) -> None:
        self._requests = NodeRequests()
        self._asked: bool | None = None  # an allocator before this one may have asked for nodes
        self._looked_s = self._sought_s = float("-inf")
        self._look: asyncio.Task[None] | None = None
        self.present = False

    def look(self, bundles: Bundles) -> None:
        """Request these bundles in the background, if a request is due and the last one has finished."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _EVERY_S or (self._look is not None and not self._look.done()):
            return
        if not bundles and self._asked is False:
            return
        self._looked_s = now_s
        self._look = asyncio.get_running_loop().create_task(self._carry_out(list(bundles)))

    async def _carry_out(self, bundles: Bundles) -> None:
        try:
            await asyncio.to_thread(self._ask, bundles)
        except Exception:
            logger.exception("Ray's autoscaler was not asked for nodes; the next look follows in %g s", _EVERY_S)

    def _ask(self, bundles: Bundles) -> None:
        """Request nodes if an autoscaler runs. Without bundles, only withdraws an earlier allocator request."""
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
        """Withdraw all requests."""
        if self._look is not None:
            await asyncio.wait([self._look])
        if self._asked:
            await asyncio.to_thread(self._ask, ())
