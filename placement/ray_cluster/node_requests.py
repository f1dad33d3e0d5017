"""SHELL: nodes are asked for here, of Ray's autoscaler, by its coordinator where Ray Data or Ray Train run one.

``request_resources`` is one list for the whole cluster, and the coordinator, an actor that merges the lists of all its
users, sends its own again every 20 s: a direct call of Ray beside it is undone, and undoes the others. So the
coordinator is looked for with every call. Its class is private; actor name and methods are used as Ray Train does.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from placement.cluster.cluster import Resources

logger = logging.getLogger("placement.nodes")

_COORDINATOR = "AutoscalingCoordinator"  # name and namespace
_REQUESTER = "elastic_ray"
_EXPIRES_S = 180.0
_REPEAT_S = 20.0
_ANSWER_S = 5.0

Bundles = Sequence[tuple[Resources, Mapping[str, str]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A launch that failed: when [s since the epoch], of which node type, and what the provider said."""

    node_type: str
    at_s: float
    why: str


class NodeRequests:
    """The nodes that the cluster should have, told to Ray whenever they change and every 20 s. Calls block shortly."""

    def __init__(self) -> None:
        self._told: list[tuple[dict[str, float], dict[str, str]]] | None = None
        self._at_s = 0.0
        self._by_coordinator = False

    def ask(self, bundles: Bundles) -> None:
        """Ask for nodes that hold these bundles, all of them at once; what is there already counts.

        Args:
            bundles: resources and labels of each node.
        """
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
        """Ask for nothing any more: what Ray was told outlives the process that told it."""
        self.ask(())


def refusals(since_s: float) -> tuple[Refusal, ...]:
    """Launches that failed after this time [s since the epoch]; none where Ray's autoscaler (v2) does not tell."""
    try:
        from ray.autoscaler.v2.sdk import get_cluster_status

        status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=int(_ANSWER_S))
    except Exception:  # a read-only or older autoscaler; time-outs of our own take its place
        return ()
    return tuple(found for found in map(refusal, status.failed_launches) if found.at_s > since_s)


def refusal(launch: Any) -> Refusal:
    """What Ray's ``LaunchRequest`` tells of a failed launch; its details may be missing, blank, or of many lines."""
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
    """The coordinator's pending answer (an object reference) to asking for these nodes, or for none any more."""
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
