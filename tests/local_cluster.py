"""A Ray cluster of this machine's own, for tests and benchmarks. Import before Ray and torch."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.loop.ports import free_port

# Before anything imports Ray or torch: both read their environment once, and workers inherit it.
RAY_TMPDIR = tempfile.mkdtemp(prefix="er-", dir="/tmp")  # short: a Unix socket's path has room for 107 bytes
_ENVIRONMENT = {
    "RAY_TMPDIR": RAY_TMPDIR,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",  # no killing by memory use on a small machine
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # as the tests themselves, whatever else runs here
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
    "ELASTIC_RAY_POOL": "off",  # a test sees what its own job leaves behind; tests of the pool turn it on
}
os.environ.update(_ENVIRONMENT)
if os.environ.get("ELASTIC_RAY_TESTS_WITH_TOKEN"):  # whatever is tested, on clusters that want a token
    # A test's own driver, in another process, has the token of that test's cluster.
    _token = Path(os.environ.get("ELASTIC_RAY_TESTS_TOKEN", f"{RAY_TMPDIR}/token"))
    if not _token.exists():
        _token.write_text(secrets.token_hex(16))
        _token.chmod(0o600)
    os.environ["ELASTIC_RAY_TESTS_TOKEN"] = str(_token)
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(_token)})
os.environ.pop("RAY_ADDRESS", None)  # never somebody else's cluster

# A dead node is found after about 0.9 s instead of 13 s; one that a busy machine lets stand still is not dead.
FAST_NODE_DEATH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
NAMESPACE = "elastic_ray"
ALLOCATOR = "allocator"


def _start(add_node: Callable[[], Any]) -> Any:
    """Add a node; again if it is not there in the 30 s that Ray gives it, whatever else the machine does."""
    import psutil

    for last in (False, False, True):
        before = set(psutil.Process().children())
        try:
            return add_node()
        except Exception as error:
            if last or "timed out during startup" not in str(error):
                raise
            for process in set(psutil.Process().children()) - before:
                process.kill()
    return None


class LocalCluster:
    """Logical Ray nodes on this machine, with the test process as a driver on the head."""

    def __init__(self, **head: Any) -> None:
        """Start the head and connect.

        Args:
            **head: the head as in ``Cluster.add_node``: ``num_cpus`` (8 unless given), ``num_gpus``,
                ``resources``, ``labels``, ``_system_config``.
        """
        import ray
        from ray.cluster_utils import Cluster

        head_args = {
            "num_cpus": 8,
            "include_dashboard": False,
            "dashboard_port": free_port(),  # bound all the same, and another Ray here may have the usual one
            "_system_config": FAST_NODE_DEATH,
            **head,
        }
        self.cluster = Cluster()
        _start(lambda: self.cluster.add_node(**head_args))
        try:
            ray.init(address=self.cluster.address, namespace="tests", log_to_driver=True)
        except BaseException:
            self.cluster.shutdown()
            raise
        self.head_id: str = self.cluster.head_node.node_id  # type: ignore[attr-defined]
        self.added: list[Any] = []

    @property
    def address(self) -> str:
        """What another driver connects to: ``ray.init(address=...)``."""
        return str(self.cluster.address)

    def add_node(self, *, num_cpus: float = 1, **node_args: Any) -> Any:
        """Add a node and wait until Ray knows it; ``.node_id`` of what is returned is Ray's hex id."""
        node = _start(lambda: self.cluster.add_node(num_cpus=num_cpus, **node_args))
        self.added.append(node)
        return node

    def remove_node(self, node: Any, *, abruptly: bool = True) -> None:
        """Take a node away with all its processes: with SIGKILL, unless not ``abruptly``."""
        if node in self.added:
            self.added.remove(node)
        self.cluster.remove_node(node, allow_graceful=not abruptly)
        disconnect(node)

    def drain_node(self, node: Any, *, deadline_s: float = 600.0) -> None:
        """Tell Ray that a node will go away, as an autoscaler or a spot notice does."""
        import time

        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # type: ignore[attr-defined]
        deadline_ms = int((time.time() + deadline_s) * 1000)
        client = GcsClient(address=self.address)
        accepted, message = client.drain_node(node.node_id, reason, "a test drains", deadline_ms)
        assert accepted, message

    def remove_added_nodes(self) -> None:
        """Back to the head alone, once Ray has noticed: it may still start an actor on a node that just died."""
        import time

        import ray

        for node in tuple(self.added):
            self.remove_node(node)
        deadline = time.monotonic() + 30.0
        while sum(node["Alive"] for node in ray.nodes()) > 1:
            assert time.monotonic() < deadline, "30 s after their end, Ray still takes nodes for alive"
            time.sleep(0.1)

    def leaks(self) -> list[str]:
        """What a job has left behind: our placement groups, and actors in our namespace but the allocator."""
        import ray
        from ray.core.generated import gcs_pb2

        found = [
            f"placement group {group['name']} ({group['state']})"
            for group in ray.util.placement_group_table().values()
            if group["name"].startswith(f"{NAMESPACE}:") and group["state"] != "REMOVED"
        ]
        accessor = ray._private.state.state._connect_and_get_accessor()
        for row in accessor.get_actor_table(None, None):
            actor = gcs_pb2.ActorTableData.FromString(row)  # type: ignore[attr-defined]
            state = gcs_pb2.ActorTableData.ActorState.Name(actor.state)  # type: ignore[attr-defined]
            if state != "DEAD" and actor.ray_namespace == NAMESPACE and actor.name != ALLOCATOR:
                found.append(f"actor {actor.name!r} of {actor.class_name} ({state}, pid {actor.pid})")
        return found

    def clear(self) -> None:
        """End named actors of ours and remove our groups, so that one test's leak does not fail the next."""
        import ray
        from ray.util.placement_group import PlacementGroup

        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == NAMESPACE and actor["name"] != ALLOCATOR:
                ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE))
        for group_id, group in ray.util.placement_group_table().items():
            if group["name"].startswith(f"{NAMESPACE}:") and group["state"] != "REMOVED":
                ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group_id)))

    def shutdown(self) -> None:
        """Disconnect and end every process of the cluster."""
        import ray

        nodes = [self.cluster.head_node, *self.added]
        ray.shutdown()
        self.cluster.shutdown()
        for node in nodes:
            disconnect(node)


def disconnect(node: Any) -> None:
    """End the thread that asks a cluster's control store: Ray keeps it to the interpreter's end, which it may crash."""
    node._gcs_client = None


def clean_up(*, failed: bool) -> None:
    """Remove Ray's logs of this process; after a failure they stay and their place is printed."""
    if not failed:
        shutil.rmtree(RAY_TMPDIR, ignore_errors=True)
    elif any(Path(RAY_TMPDIR).iterdir()):
        print(f"\nRay's logs of this run: {RAY_TMPDIR}")
    else:
        Path(RAY_TMPDIR).rmdir()
