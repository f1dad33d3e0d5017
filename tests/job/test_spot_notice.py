"""A spot node whose metadata server gives notice: the job is off it, by a planned resize, long before the deadline."""

from __future__ import annotations

import datetime
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ray.events import EventKind
from placement.actor import get_or_create_allocator
from placement.allocator_config import AllocatorConfig
from placement.notices import NoticeConfig
from tests.job import traced
from tests.job.jobs import kinds, start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(180)]


class Metadata(http.server.BaseHTTPRequestHandler):
    """AWS's metadata server, as far as spot instances ask it."""

    def do_PUT(self) -> None:
        self._answer("a token" if self.path == "/latest/api/token" else None)

    def do_GET(self) -> None:
        known = self.path == "/latest/meta-data/spot/instance-action"
        allowed = self.headers["X-aws-ec2-metadata-token"] == "a token"
        self._answer(self.server.notice if known and allowed else None)  # type: ignore[attr-defined]

    def _answer(self, body: str | None) -> None:
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write((body or "").encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def metadata() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.notice = None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def test_a_job_is_off_a_spot_node_before_it_goes(ray_cluster: Any, tmp_path: Path, metadata: Any) -> None:
    address = f"http://127.0.0.1:{metadata.server_port}"
    get_or_create_allocator(config=AllocatorConfig(notices=NoticeConfig(address=address, poll_s=0.2)))
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
    handle.result(timeout=30)
    assert EventKind.FAILURE not in kinds(handle) and EventKind.RESTART not in kinds(handle)
    traced.check_identical(traced.read(tmp_path / "trace"))
