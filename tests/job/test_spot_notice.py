"""A spot node whose metadata server gives notice: the job is off it, by a planned resize, long before the deadline."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ray.events import EventKind
from placement.allocator.actor import get_or_create_allocator
from placement.allocator.config import AllocatorConfig
from placement.ray_cluster.notices import NoticeConfig
from tests.job import traced
from tests.job.jobs import kinds, start, wait_until
from tests.metadata_server import MetadataServer

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000)]


@pytest.fixture
def metadata() -> Iterator[MetadataServer]:
    with MetadataServer("aws") as server:
        yield server


@pytest.mark.slow
def test_job_is_off_a_spot_node_before_it_goes(ray_cluster: Any, tmp_path: Path, metadata: MetadataServer) -> None:
    get_or_create_allocator(config=AllocatorConfig(notices=NoticeConfig(address=metadata.address, poll_s=0.2)))
    spot = ray_cluster.add_node(num_cpus=0, resources={"slot": 2}, labels={"ray.io/market-type": "spot"})
    handle = start(tmp_path, workers=2, epochs=10_000, pause_s=0.03, bundle={"slot": 1.0})
    wait_until(lambda: handle.status().workers == 2, handle)
    stays = ray_cluster.add_node(num_cpus=0, resources={"slot": 2}, labels={"ray.io/market-type": "on-demand"})
    time.sleep(1.0)  # nothing moves without a notice
    assert {worker.node for worker in handle.workers()} == {spot.node_id}

    end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=120)
    metadata.notice = json.dumps({"action": "terminate", "time": end.strftime("%Y-%m-%dT%H:%M:%SZ")})
    wait_until(lambda: {worker.node for worker in handle.workers()} == {stays.node_id}, handle, 60)
    handle.stop()
    handle.result(timeout=180)
    assert EventKind.FAILURE not in kinds(handle) and EventKind.RESTART not in kinds(handle)
    traced.check_identical(traced.read(tmp_path / "trace"))
