"""Jobs whose units are larger than any node, on clusters of small nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import elastic_ray as er
from elastic_ray.events import EventKind
from elastic_ray.faults import Faults
from elastic_ray.observe.process_look import inspect_process
from placement.cluster.cluster import parts
from tests.job import unit_jobs
from tests.job.jobs import kinds, wait_until
from tests.job.unit_jobs import check_close, parameters

pytestmark = [pytest.mark.ray_cluster(num_cpus=2), pytest.mark.timeout(600), pytest.mark.slow]


def submit(folder: Path, kind: str, workers: Any, unit: Any, **config: Any) -> er.JobHandle:
    return unit_jobs.submit(folder, kind, workers, unit, resource="slot", **config)


def add_small_nodes(cluster: Any, count: int) -> list[Any]:
    return [cluster.add_node(num_cpus=0, resources={"slot": 1}) for _ in range(count)]


def test_units_span_nodes_and_one_node_dies(ray_cluster: Any, tmp_path: Path) -> None:
    """A unit trains on two nodes of one slot; a second one joins on two more, and is lost with one of them."""
    nodes = add_small_nodes(ray_cluster, 2)
    wanted = parameters(submit(tmp_path / "whole", "plain", 1, 1, epochs=60))
    until = tmp_path / "done"
    handle = submit(tmp_path / "units", "tp", (2, 4), er.Unit(tp=2), epochs=60, until=str(until))
    wait_until(lambda: handle.status().workers == 1 and handle.status().step > 3, handle)
    (warning,) = [event.reason for event in handle.events() if event.kind is EventKind.WARNING]
    assert warning == "a unit spans 2 nodes: none has room for its 2 workers"
    nodes += add_small_nodes(ray_cluster, 2)
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2, handle)
    places = [worker.node for worker in handle.workers()]
    assert sorted(name for place in places for name in parts(place)) == sorted(node.node_id for node in nodes)
    assert "train" in inspect_process(handle.workers()[0], "stack"), "of its first process, on the node of that"
    last = next(node for node in nodes if node.node_id in parts(places[-1]))
    ray_cluster.remove_node(last)
    wait_until(lambda: EventKind.FAILURE in kinds(handle), handle, 60)
    wait_until(lambda: handle.status().workers == 1, handle, 60)
    until.touch()
    check_close(parameters(handle), wanted)
    assert EventKind.RESTART not in kinds(handle)


def test_meshes_of_two_dimensions_span_nodes(ray_cluster: Any, tmp_path: Path) -> None:
    """Groups that user code makes later meet as well; a worker of the unit dies, and the next one starts over."""
    for slots in (3, 1):
        ray_cluster.add_node(num_cpus=0, resources={"slot": slots})
    wanted = parameters(submit(tmp_path / "whole", "plain", 1, 1))
    faults = Faults().kill(rank=0, step=9, moment="backward")
    elastic = {"faults": faults, "checkpoint_interval_s": 0.5}
    handle = submit(tmp_path / "units", "both", 4, er.Unit(shard=2, tp=2), elastic=elastic)
    check_close(parameters(handle), wanted)


def test_units_that_no_nodes_hold_are_refused(ray_cluster: Any, tmp_path: Path) -> None:
    add_small_nodes(ray_cluster, 1)
    with pytest.raises(er.errors.ImpossibleResourcesError, match="one unit needs 2 slot"):
        submit(tmp_path / "units", "tp", 2, 2)
