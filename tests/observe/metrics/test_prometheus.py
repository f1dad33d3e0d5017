"""Every panel of the Grafana dashboard has data: a real Prometheus scrapes a real cluster with real jobs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import elastic_ray as er
from elastic_ray.events import EventKind
from placement.allocator.actor import get_or_create_allocator
from placement.allocator.config import AllocatorConfig
from placement.autoscaling.autoscaler import Autoscaling
from placement.cluster.cluster import MARKET_LABEL, SPOT
from placement.cluster.node_types import NodeType
from tests.job.jobs import kinds, start, wait_until
from tests.observe.metrics.panels import queries, reports_every_second
from tests.observe.metrics.prometheus import Prometheus, missing, prometheus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.ray_cluster(
        num_cpus=8,
        include_dashboard=True,  # it tells Prometheus whom to scrape
    ),
    pytest.mark.timeout(1000),
]


@pytest.fixture(scope="module", autouse=True)
def _reports_every_second() -> Iterator[None]:
    """Before the module's cluster starts."""
    with reports_every_second():
        yield


def discovery() -> Path:
    """Ray's file of what is to be scraped; it is written when the dashboard has come up."""
    found = Path(ray._private.worker._global_node.get_session_dir_path()) / "prom_metrics_service_discovery.json"  # type: ignore[attr-defined]
    until(found.exists, 60.0)
    return found


def until(condition: Callable[[], bool], timeout_s: float = 180.0) -> None:
    """Wait for something to come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.2)


def empty(server: Prometheus, since_s: float) -> list[str]:
    """Queries of the panels that have had no data since then."""
    return [
        f"{title}: {expression}"
        for title, expressions in queries().items()
        for expression in expressions
        if not server.over(expression, since_s)
    ]


def grown(folder: Path, name: str, **options: Any) -> er.JobHandle:
    """A job of a batch that may change, which has one worker and then two."""
    folder.mkdir()
    handle = start(
        folder,
        name=name,
        workers=(1, 2),
        epochs=5000,
        adapt={"max_batch_size": 96, "local_bsz_bounds": (8, 48), "gradient_accumulation": True},
        **options,
    )
    handle.resize(1)
    wait_until(lambda: handle.status().workers == 1 and handle.status().step > 3, handle)
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2, handle)
    return handle


def test_no_panel_is_without_data(ray_cluster: Any, tmp_path: Path) -> None:
    since_s = time.time()
    kind = NodeType(name="four", resources={"CPU": 4.0}, labels={MARKET_LABEL: SPOT}, usd_per_h=1.0, max_nodes=1)
    get_or_create_allocator(config=AllocatorConfig(autoscaling=Autoscaling(node_types=(kind,), interval_s=0.5)))
    with prometheus(tmp_path, discovery()) as server:
        until(server.ready)
        handle = grown(tmp_path / "one", "one", scheduling=er.SchedulingConfig(tenant="vision"))
        wait_until(lambda: handle.status().goodput is not None, handle)
        wait_until(lambda: not empty(server, since_s), handle)
        present = server.at_once('ray_elastic_job_workers{exported_job="one", tenant="vision"}')
        assert [each["value"][1] for each in present] == ["2"]
        wanted = 'ray_elastic_nodes_wanted{type="four", market="spot"}'
        for query in (wanted, 'ray_elastic_job_cost_usd{exported_job="one"}', "ray_elastic_slot_price >= 0"):
            assert server.at_once(query), query
        os.kill(handle.workers()[1].pid, signal.SIGKILL)
        wait_until(lambda: EventKind.FAILURE in kinds(handle), handle)
        lost = 'ray_elastic_job_failures_total{exported_job="one", cause="workers_lost"}'
        wait_until(lambda: bool(server.at_once(lost)), handle)
        handle.stop()
        handle.result(timeout=180)
        until(lambda: not server.at_once("ray_elastic_job_goodput > 0"))
        until(lambda: not server.at_once("ray_elastic_job_workers > 0"))
        assert empty(server, since_s) == []


def test_a_prometheus_that_goes_down_costs_a_job_nothing(ray_cluster: Any, tmp_path: Path) -> None:
    with prometheus(tmp_path, discovery(), honor_labels=True) as server:
        until(server.ready)
        handle = grown(tmp_path / "two", "two")
        until(lambda: bool(server.at_once('ray_elastic_job_workers{job="two"}')))
    step = handle.status().step
    wait_until(lambda: handle.status().step > step + 20, handle)
    handle.stop()
    assert handle.result(timeout=180).error is None
