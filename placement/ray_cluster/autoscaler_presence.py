"""SHELL: Ray's nodes, and a check for an autoscaler that may add nodes, for use before a job is submitted."""

from __future__ import annotations

import json
import time
from typing import Any

import ray

from placement.cluster.cluster import Node

_MONITOR_REPORT_S = 3.0


def living_nodes() -> tuple[Node, ...]:
    """Return all living nodes, with all their resources counted as free."""
    return tuple(
        Node(
            node_id=node["NodeID"],
            total=dict(node["Resources"]),
            free=dict(node["Resources"]),
            labels=dict(node.get("Labels") or {}),
        )
        for node in _alive()
    )


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def may_autoscale() -> bool:
    """True if an autoscaler may add nodes, or if Ray does not reveal whether one exists.

    Ray has no direct answer: a cluster without an autoscaler runs the same monitor process with a "read-only"
    provider, which names the type of each node ``node_<node id>``. Measured with Ray 2.60:

    - autoscaler v1: the status that the monitor stores lists every living node under such a name exactly when
      the provider is read-only; a real provider lists its own types ("ray.head.default", or none yet).
    - autoscaler v2: a node of a real provider has the provider's instance id (v2 requires
      RAY_CLOUD_INSTANCE_ID on every node, including the head); under the read-only provider no node has one.

    Both interfaces are private. An exception or a missing answer counts as True: a futile wait is better than a wrong
    refusal.
    """
    try:
        from ray.autoscaler.v2.utils import is_autoscaler_v2

        return _v2_has_provider() if is_autoscaler_v2(fetch_from_server=True) else _v1_has_provider()
    except Exception:
        return True


def _v1_has_provider() -> bool:
    """True if Ray's autoscaler v1 is running with a node provider."""
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.experimental.internal_kv import _internal_kv_get

    give_up = time.monotonic() + _MONITOR_REPORT_S  # a cluster just started: the monitor has not reported yet
    while True:
        status = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
        report = json.loads(status).get("autoscaler_report") if status else None
        if report is not None:
            read_only = {f"node_{node['NodeID']}" for node in _alive()}
            if read_only & set(report["active_nodes"]):
                return False
        if time.monotonic() > give_up:
            return True
        time.sleep(0.1)


def _v2_has_provider() -> bool:
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=int(_MONITOR_REPORT_S))
    nodes = [*status.active_nodes, *status.idle_nodes]
    return not nodes or any(node.instance_id for node in nodes)
