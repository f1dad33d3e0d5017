"""A real Ray cluster of several logical nodes for the tests of the shells."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local_cluster import disconnect

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[object]:
    """A head without CPUs and two nodes of 4; loopback only, with a folder of its own."""
    environment = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with (
        pytest.MonkeyPatch.context() as patch,
        # Ray's processes may still write their last lines when the folder goes.
        tempfile.TemporaryDirectory(prefix="er", dir="/tmp", ignore_cleanup_errors=True) as folder,
    ):
        for name, value in {**environment, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "_system_config": {
                    "health_check_period_ms": 300,
                    "health_check_timeout_ms": 300,
                    "health_check_initial_delay_ms": 300,
                    "health_check_failure_threshold": 3,
                },
            },
        )
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=4)
            ray.init(address=cluster.address, namespace="tests", log_to_driver=False)
            yield cluster
        finally:
            nodes = [cluster.head_node, *cluster.worker_nodes]
            ray.shutdown()
            cluster.shutdown()
            for node in nodes:
                disconnect(node)
