"""Jobs that grow, shrink and move while they train: no restart, no lost step, every sample once, bit by bit equal."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from elastic_ray.events import EventKind
from tests.job import traced
from tests.job.jobs import kinds, start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000)]


@pytest.mark.slow
def test_random_resizes_from_one_to_eight_workers(ray_cluster: Any, tmp_path: Path) -> None:
    """Whatever sizes come: exact epochs, equal ranks, and stayers keep process and train function."""
    sizes = [3, 8, 2, 5, 1]
    random.Random(7).shuffle(sizes)
    handle = start(tmp_path, workers=(1, 8), epochs=10_000, pause_s=0.02)
    for size in sizes:
        handle.resize(size)
        wait_until(lambda size=size: handle.status().workers == size, handle, 90)
    handle.stop()
    handle.result(timeout=180)
    lines = traced.read(tmp_path / "trace")
    traced.check_identical(lines)
    resizes = [event for event in handle.events() if event.kind is EventKind.RESIZE]
    assert [event.to_workers for event in resizes][-1] == sizes[-1]
    assert EventKind.FAILURE not in kinds(handle) and EventKind.RESTART not in kinds(handle)
    # the first worker stays through all of it: one process, one run of the train function
    first = next(line for line in lines if line["kind"] == "step")
    assert all(line["pid"] == first["pid"] for line in lines if line["rank"] == 0 and line["kind"] == "step")
    # each epoch that ended is exact (the last one was cut off by stop())
    complete = max(line["epoch"] for line in lines if line["kind"] == "step")
    _check_epochs(lines, complete)


def _check_epochs(lines: list[dict[str, Any]], complete: int) -> None:
    seen: dict[int, dict[tuple[int, int], list[int]]] = {}
    newest: dict[int, int] = {}
    steps = [line for line in lines if line["kind"] == "step" and line["epoch"] < complete]
    for line in steps:
        newest[line["step"]] = max(newest.get(line["step"], 0), line["generation"])
    for line in steps:
        if line["generation"] == newest[line["step"]]:
            seen.setdefault(line["epoch"], {})[line["step"], line["rank"]] = line["indices"]
    assert sorted(seen) == list(range(complete))
    for epoch, parts in seen.items():
        drawn = sorted(index for part in parts.values() for index in part)
        assert drawn == list(range(192)), f"epoch {epoch}: not every sample exactly once"


@pytest.mark.slow
def test_leaving_workers_return_to_the_warm_pool(ray_cluster: Any, tmp_path: Path) -> None:
    """A worker that left is the process that joins next."""
    handle = start(tmp_path, workers=(1, 2), epochs=10_000, pause_s=0.02, elastic={"warm_workers_per_node": 1})
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2, handle)
    left = handle.workers()[1].pid
    handle.resize(1)
    wait_until(lambda: handle.status().workers == 1, handle)
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2, handle)
    assert handle.workers()[1].pid == left
    handle.stop()
    handle.result(timeout=180)


@pytest.mark.slow
def test_without_a_pool_leavers_end(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=(1, 2), epochs=10_000, pause_s=0.02, elastic={"warm_workers_per_node": 0})
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2, handle)
    left = handle.workers()[1].pid
    handle.resize(1)
    wait_until(lambda: handle.status().workers == 1, handle)
    wait_until(lambda: not Path(f"/proc/{left}").exists(), handle, 10)
    handle.stop()
    handle.result(timeout=180)


@pytest.mark.thorough
def test_a_removed_node_costs_no_committed_step(ray_cluster: Any, tmp_path: Path) -> None:
    node = ray_cluster.add_node(num_cpus=0, resources={"slot": 1})
    other = ray_cluster.add_node(num_cpus=0, resources={"slot": 1})
    handle = start(tmp_path, workers=(1, 2), epochs=10_000, pause_s=0.03, bundle={"slot": 1.0})
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2, handle)
    assert {worker.node for worker in handle.workers()} == {node.node_id, other.node_id}
    ray_cluster.remove_node(node)
    wait_until(lambda: EventKind.FAILURE in kinds(handle), handle, 30)
    wait_until(lambda: handle.status().workers == 1, handle, 30)
    handle.stop()
    handle.result(timeout=180)
    lines = traced.read(tmp_path / "trace")
    _check_epochs(lines, max(line["epoch"] for line in lines if line["kind"] == "step"))
    failure = next(event for event in handle.events() if event.kind is EventKind.FAILURE)
    assert failure.pause_s < 6


@pytest.mark.slow
def test_job_trains_at_full_size_until_replacements_are_ready(ray_cluster: Any, tmp_path: Path) -> None:
    """One change swaps the worker on the node that goes, which has time."""
    nodes = [ray_cluster.add_node(num_cpus=0, resources={"slot": 1}) for _ in range(2)]
    handle = start(tmp_path, workers=(1, 2), epochs=10_000, pause_s=0.03, bundle={"slot": 1.0})
    wait_until(lambda: handle.status().workers == 2, handle)
    handle.resize(2)
    spare = ray_cluster.add_node(num_cpus=0, resources={"slot": 1})
    before = len(handle.events())
    ray_cluster.drain_node(nodes[1], deadline_s=120.0)
    wait_until(lambda: {w.node for w in handle.workers()} == {nodes[0].node_id, spare.node_id}, handle, 60)
    ray_cluster.remove_node(nodes[1])
    handle.stop()
    handle.result(timeout=180)
    changes = [(e.kind, e.from_workers, e.to_workers) for e in handle.events(before) if e.from_workers and e.to_workers]
    assert [change for change in changes if change[0] is not EventKind.FINISHED] == [(EventKind.RESIZE, 2, 2)]
    lines = traced.read(tmp_path / "trace")
    traced.check_identical(lines)
    _check_epochs(lines, max(line["epoch"] for line in lines if line["kind"] == "step"))


@pytest.mark.slow
def test_a_job_moves_off_a_draining_node(ray_cluster: Any, tmp_path: Path) -> None:
    """All leave once others have come, the last one after them."""
    first = ray_cluster.add_node(num_cpus=0, resources={"slot": 2})
    handle = start(tmp_path, workers=2, epochs=10_000, pause_s=0.03, bundle={"slot": 1.0})
    wait_until(lambda: handle.status().workers == 2, handle)
    second = ray_cluster.add_node(num_cpus=0, resources={"slot": 2})
    ray_cluster.drain_node(first)
    wait_until(lambda: [w.node for w in handle.workers()] == [second.node_id] * 2, handle, 60)
    handle.stop()
    handle.result(timeout=180)
    lines = traced.read(tmp_path / "trace")
    traced.check_identical(lines)
    _check_epochs(lines, max(line["epoch"] for line in lines if line["kind"] == "step"))
    assert EventKind.FAILURE not in kinds(handle)
