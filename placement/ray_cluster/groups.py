"""SHELL: placement groups with one bundle per node, pinned to nodes that the allocator chose (usually just one).

If a group is removed after Ray 2.60 has set aside its resources and before the group is fulfilled, these resources are
lost until the node restarts (ray-project/ray#64693 is a similar case). This happened to four of 92 groups when seven
actors requested and gave up groups at random on a crowded machine. Groups are therefore requested only when there is
room (:class:`Room`), and unwanted ones are released after they are fulfilled (:func:`withdraw`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection

import ray
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from placement.cluster.cluster import TOLERANCE, Resources, by_node
from placement.ray_cluster.named_actors import NAMESPACE
from placement.ray_cluster.snapshot import is_dead, job_of, read_available

logger = logging.getLogger("placement.nodes")

_NEWS_S = 0.1  # what Ray sees free on its nodes changes as often
_PENDING = ("PENDING", "PREPARED")
WITHDRAWN_S = 30.0
"""For so long a group that is to be given back is waited for until it is fulfilled [s]."""

_SETTLED_S = 2.0


class Room:
    """Cache of the free resources on Ray's nodes, read once for all requests within a tenth of a second."""

    def __init__(self) -> None:
        self._read_s = -math.inf
        self._available: dict[str, dict[str, float]] = {}
        self._lock = asyncio.Lock()

    async def holds(self, bundle: Resources, place: str, count: int) -> bool:
        """True if there is room for ``count`` bundles on a node, or on every node that a unit's place spans."""
        async with self._lock:
            if time.monotonic() >= self._read_s + _NEWS_S:
                try:
                    self._available = await asyncio.to_thread(read_available)
                except Exception as error:  # the control store may be away for a moment
                    logger.warning("what is free on the nodes could not be read: %s", error)
                    self._available = {}
                self._read_s = time.monotonic()
        return all(
            self._available.get(node_id, {}).get(name, 0.0) + TOLERANCE >= count * amount
            for node_id, here in _bundles(bundle, place).items()
            for name, amount in here.items()
        )


def _bundles(bundle: Resources, place: str) -> dict[str, dict[str, float]]:
    """Return a worker's resources by node, in the order of its processes; amounts of 0 are left out."""
    return {
        node_id: {name: round(amount * share, 4) for name, amount in bundle.items() if amount > 0}
        for node_id, share in by_node({place: 1}).items()
    }


def reserve(bundle: Resources, place: str, name: str) -> PlacementGroup:
    """Request a placement group for one worker on its node, or on all nodes that a unit spans.

    Use ``ready`` to wait for the resources. The group is detached, so it outlives the process of a controller that Ray
    restarts. Its creator releases it; if the controller is gone for good, the allocator does (:func:`release_all`). The
    group stays pending while the node is full, and forever if the node is gone: :func:`withdraw` it when it is no
    longer wanted.
    """
    wanted = _bundles(bundle, place)
    if not all(wanted.values()):
        raise ValueError(f"bundle of {name} must name a resource above 0, such as {{'CPU': 1}}, but got {bundle}")
    group: PlacementGroup = placement_group(
        list(wanted.values()),
        strategy="PACK",
        name=name,
        lifetime="detached",
        bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in wanted],
    )
    return group


def release(group: PlacementGroup) -> None:
    """Release a fulfilled group's resources (Ray kills what runs there); do nothing if the group is gone."""
    remove_placement_group(group)
    internal_kv._internal_kv_del(_holder_key(group.id.hex()), namespace=NAMESPACE.encode())


def hold(group_id: str) -> None:
    """Record that the calling actor, which runs outside this placement group, uses the group. Blocks briefly."""
    actor = ray.get_runtime_context().get_actor_id() or ""
    internal_kv._internal_kv_put(_holder_key(group_id), actor.encode(), overwrite=True, namespace=NAMESPACE.encode())


def holder_lives(group_id: str) -> bool | None:
    """True if the actor that holds a placement group may be alive; None if no actor holds the group. Blocks briefly."""
    holder: bytes | None = internal_kv._internal_kv_get(_holder_key(group_id), namespace=NAMESPACE.encode())
    return None if holder is None else not is_dead(holder.decode())


def _holder_key(group_id: str) -> bytes:
    return f"holder/{group_id}".encode()


async def withdraw(group: PlacementGroup) -> None:
    """Wait up to half a minute for a group to be fulfilled, then release it, even if this coroutine is cancelled."""
    try:
        await ready(group, WITHDRAWN_S)
    finally:
        release(group)


def find(group_id: str) -> PlacementGroup:
    """Return the placement group with this hex id, which another process may have reserved."""
    return PlacementGroup(ray.PlacementGroupID.from_hex(group_id))


def of_jobs() -> dict[str, str]:
    """Return the names of elastic jobs, keyed by the hex id of each of their placement groups. Blocks briefly."""
    table = placement_group_table().items()
    living = {group_id: group["name"] for group_id, group in table if group["state"] != "REMOVED"}
    return {group_id: job for group_id, name in living.items() if (job := job_of(name)) is not None}


def release_all(job: str, *, but: Collection[str] = ()) -> int:
    """Release a job's groups except those whose hex ids are in ``but``; return the number of released groups."""
    found = [find(group_id) for group_id, owner in of_jobs().items() if owner == job and group_id not in but]
    deadline_s = time.monotonic() + _SETTLED_S
    for group in found:
        while _state(group) in _PENDING and time.monotonic() < deadline_s:
            time.sleep(_NEWS_S)
        release(group)
    return len(found)


async def ready(group: PlacementGroup, timeout_s: float) -> bool:
    """Wait until the group's resources are reserved; return False on a timeout or if the group was removed.

    Polls in a thread: ``PlacementGroup.ready()`` would start a task in the group, and with it a process.
    """
    deadline_s = time.monotonic() + timeout_s
    pause_s = 0.01
    while True:
        state = await asyncio.to_thread(_state, group)
        if state == "CREATED":
            return True
        if state == "REMOVED" or time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(min(pause_s, max(0.0, deadline_s - time.monotonic())))
        pause_s = min(2 * pause_s, 0.2)


def _state(group: PlacementGroup) -> str:
    table = placement_group_table(group)
    return str(table.get("state", "PENDING")) if table else "PENDING"
