"""Jobs that are stopped for others, saved, and continue later: no step is lost, none is done twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_ray.events import EventKind
from placement.allocator.actor import get_or_create_allocator
from placement.allocator.config import AllocatorConfig
from placement.autoscaling.autoscaler import Autoscaling
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.cluster.node_types import NodeType
from tests.job import traced
from tests.job.jobs import kinds, start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8, resources={"slot": 2}), pytest.mark.timeout(1000)]


def last_come_first_served(jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, int]:
    """The newest job has the cluster for itself, if the others can be stopped without a loss."""
    newest = max(jobs, key=lambda view: view.submitted_s)
    stay = {view.job for view in jobs if view.allocation and view.stop_cost_s is None} or {newest.job}
    return {view.job: 2 * (view.job in stay) for view in jobs}


def check_steps_once(folder: Path, *, stopped: bool = False) -> None:
    """Every step was committed once, though the job ran in several pieces; ``stopped`` within an epoch."""
    lines = [line for line in traced.read(folder) if line["kind"] == "step" and line["rank"] == 0]
    steps = [line["step"] for line in sorted(lines, key=lambda line: line["time"])]
    assert steps == list(range(len(steps)))
    if not stopped:
        traced.account(folder)


@pytest.mark.slow
def test_a_job_stopped_for_another_continues_where_it_was(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "long").mkdir()
    (tmp_path / "short").mkdir()
    options: dict[str, Any] = {"workers": 2, "bundle": {"slot": 1.0}}
    get_or_create_allocator(last_come_first_served)
    often = {"checkpoint_interval_s": 0.5}
    long = start(tmp_path / "long", epochs=24, pause_s=0.05, elastic=often, **options)
    wait_until(lambda: long.status().step >= 10, long)
    short = start(tmp_path / "short", epochs=1, **options)
    short.result(timeout=180)
    preempted = [event for event in long.events() if event.kind is EventKind.PREEMPTED]
    assert [(event.from_workers, event.to_workers) for event in preempted] == [(2, 0)]
    assert preempted[0].pause_s < 5.0
    long.result(timeout=180)
    assert EventKind.RESTART not in kinds(long) and EventKind.FAILURE not in kinds(long)
    assert kinds(long).count(EventKind.STARTED) == 2 and EventKind.RESUMED in kinds(long)
    check_steps_once(tmp_path / "long" / "trace")


@pytest.mark.slow
def test_a_job_whose_only_node_drains_continues_elsewhere(ray_cluster: Any, tmp_path: Path) -> None:
    """And it was no failure, of which none is allowed here."""
    get_or_create_allocator("goodput")
    spot = ray_cluster.add_node(num_cpus=0, resources={"spot": 2})
    handle = start(tmp_path, workers=2, epochs=12, pause_s=0.05, bundle={"spot": 1.0})
    wait_until(lambda: handle.status().step >= 10, handle)
    ray_cluster.drain_node(spot)
    wait_until(lambda: EventKind.PREEMPTED in kinds(handle), handle, 10)
    ray_cluster.remove_node(spot)
    ray_cluster.add_node(num_cpus=0, resources={"spot": 2})
    handle.result(timeout=180)
    assert EventKind.RESTART not in kinds(handle)
    check_steps_once(tmp_path / "trace")


@pytest.mark.slow
def test_job_trains_until_the_autoscaler_replaces_its_node(ray_cluster: Any, tmp_path: Path) -> None:
    kind = NodeType(name="spot", resources={"spot": 2.0}, usd_per_h=1.0, max_nodes=2)
    get_or_create_allocator("goodput", config=AllocatorConfig(autoscaling=Autoscaling(node_types=(kind,))))
    spot = ray_cluster.add_node(num_cpus=0, resources={"spot": 2})
    often = {"checkpoint_interval_s": 0.5}
    handle = start(tmp_path, workers=2, epochs=10_000, pause_s=0.05, elastic=often, bundle={"spot": 1.0})
    wait_until(lambda: handle.status().step >= 40, handle)
    ray_cluster.drain_node(spot, deadline_s=120.0)
    wait_until(lambda: snapshot_of(handle).target == {}, handle)
    step = handle.status().step
    wait_until(lambda: handle.status().step >= step + 40, handle)
    other = ray_cluster.add_node(num_cpus=0, resources={"spot": 2})
    wait_until(lambda: [worker.node for worker in handle.workers()] == [other.node_id] * 2, handle, 60)
    ray_cluster.remove_node(spot)
    handle.stop()
    handle.result(timeout=180)
    assert not {EventKind.PREEMPTED, EventKind.FAILURE, EventKind.RESTART} & set(kinds(handle))
    check_steps_once(tmp_path / "trace", stopped=True)


def snapshot_of(handle: Any) -> Any:
    """What the allocator has decided for the job."""
    seen: Any = ray.get(get_or_create_allocator().snapshot.remote(), timeout=60)
    return seen.jobs[handle.job]
