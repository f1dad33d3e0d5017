"""What Ray's agent serves of real jobs, read directly, and where the dashboard lies."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import elastic_ray as er
from elastic_ray.events import EventKind
from placement.instruments import Sample, counter, gauge, histogram
from placement.ray_cluster.metric_writer import FILE, MetricWriter
from tests.job.jobs import kinds, start, wait_until
from tests.observe.metrics.panels import Scraped, reports_every_second, scraped

pytestmark = [
    pytest.mark.ray_cluster(num_cpus=8),
    pytest.mark.timeout(1000),
]


@pytest.fixture(scope="module", autouse=True)
def _reports_every_second() -> Iterator[None]:
    """Before the module's cluster starts."""
    with reports_every_second():
        yield


def scrape() -> list[Scraped]:
    """What Prometheus would read of the head."""
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=180) as answer:
        return scraped(answer.read().decode())


def value(job: str, name: str, **labels: str) -> float | None:
    """The present value of a job's metric; None where it has none."""
    wanted = {"job": job, **labels}
    found = [each.value for each in scrape() if each.name == name and wanted.items() <= each.labels.items()]
    return max(found, default=None)


SHOWN = gauge("elastic_test_shown", "A gauge.", "job", "tenant")
ADDED = counter("elastic_test_added_total", "A counter.", "job", "tenant")
SEEN = histogram("elastic_test_seen", "A histogram.", (1.0, 2.0), "job", "tenant")


@ray.remote(num_cpus=0)
class Writing:
    """A process that writes metrics."""

    def __init__(self) -> None:
        self._writer = MetricWriter()

    def write(self, samples: tuple[Sample, ...]) -> None:
        self._writer(samples)


def numbers(job: str, number: float, tenant: str = "") -> tuple[Sample, ...]:
    return tuple(each for metric in (SHOWN, ADDED, SEEN) for each in metric.sample(number, job, tenant))


@pytest.mark.slow
def test_job_is_seen_grows_and_leaves_no_workers_behind(ray_cluster: Any, tmp_path: Path) -> None:
    scheduling = er.SchedulingConfig(tenant='team "\\' + "x" * 1000)
    handle = start(tmp_path, workers=(1, 2), epochs=2000, name="metered", scheduling=scheduling)
    handle.resize(1)
    wait_until(lambda: value("metered", "elastic_job_workers") == 1.0, handle)
    handle.resize(2)
    wait_until(lambda: value("metered", "elastic_job_workers") == 2.0, handle)
    wait_until(lambda: value("metered", "elastic_job_resizes_total", reason="grow") == 1.0, handle)
    wait_until(lambda: value("metered", "elastic_job_goodput") is not None, handle)
    wait_until(lambda: value("metered", "elastic_job_global_batch") == 24, handle)
    assert EventKind.RESIZE in kinds(handle)
    found = {each.name: each for each in scrape()}
    labels = found["elastic_job_workers"].labels
    assert labels["model"] == "Sequential" and 'team "\\x' in labels["tenant"] and len(labels["tenant"]) <= 128
    assert 0 < found["elastic_job_productive_ratio"].value <= 1
    assert found["elastic_slots"] and found["elastic_decisions_total"] and found["elastic_decision_seconds_bucket"]
    assert "elastic_job_cost_usd" not in found, "there are no prices, so nothing is known"
    placed = Path(ray._private.worker._global_node.get_session_dir_path()) / "metrics" / "grafana" / "dashboards" / FILE  # type: ignore[attr-defined]
    assert json.loads(placed.read_text())["uid"] == "elasticRayDashboard", "where Ray's own Grafana looks"
    handle.stop()
    handle.result(timeout=180)
    _until(lambda: not value("metered", "elastic_job_workers"))


@pytest.mark.thorough
def test_hostile_names_arrive_and_hostile_values_do_not(ray_cluster: Any) -> None:
    writer, job = Writing.remote(), '<script>"\n\\'  # type: ignore[attr-defined]
    for number in (1.5, math.nan, math.inf):
        ray.get(writer.write.remote(numbers(job, number, "x" * 1000) + numbers("other", 1.0)))
    ray.get(writer.write.remote(numbers(job, 2.5, "x" * 1000) + numbers("other", 1.0)))
    _until(lambda: value(job, "elastic_test_shown") == 2.5)
    assert value(job, "elastic_test_added_total") == 4.0
    assert value("other", "elastic_test_added_total") == 4.0, "none was lost by the others"
    assert value(job, "elastic_test_seen_count") == 2.0


@pytest.mark.thorough
def test_an_unwritten_gauge_goes_and_may_come_back(ray_cluster: Any) -> None:
    writer = Writing.remote()  # type: ignore[attr-defined]
    for samples, seen in ((numbers("back", 2.0), 2.0), ((), None), (numbers("back", 3.0), 3.0)):
        ray.get(writer.write.remote(samples))
        _until(lambda seen=seen: value("back", "elastic_test_shown") == seen)


@pytest.mark.thorough
def test_gauges_of_a_process_that_is_gone_go(ray_cluster: Any) -> None:
    writer = Writing.remote()  # type: ignore[attr-defined]
    ray.get(writer.write.remote(numbers("gone", 2.0)))
    _until(lambda: value("gone", "elastic_test_shown") == 2.0)
    ray.kill(writer)
    _until(lambda: value("gone", "elastic_test_shown") is None)
    assert value("gone", "elastic_test_added_total") == 2.0, "what was counted stays"


def test_a_label_that_ray_does_not_take_harms_nobody(ray_cluster: Any) -> None:
    writer = Writing.remote()  # type: ignore[attr-defined]
    ray.get(writer.write.remote(numbers("h\xe9", 1.0) + numbers("plain", 4.0)))
    _until(lambda: value("plain", "elastic_test_shown") == 4.0)


def _until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for something to come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.1)
