"""Placement groups and actors on nodes of a real Ray cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from placement.ray_cluster.groups import ready, release, reserve
from placement.ray_cluster.snapshot import group_name, on_head
from tests.local_cluster import disconnect

pytestmark = pytest.mark.usefixtures("ray_nodes")


def test_groups_are_pinned_pend_and_can_be_withdrawn() -> None:
    node = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU") == 4)
    first = [reserve({"CPU": 2.0, "GPU": 0.0}, node, group_name("g", str(i))) for i in range(2)]
    assert all(asyncio.run(ready(group, 10.0)) for group in first)
    assert {placement_group_table(group)["bundles_to_node_id"][0] for group in first} == {node}
    pending = reserve({"CPU": 1.0}, node, group_name("g", "2"))
    assert not asyncio.run(ready(pending, 0.5))
    release(first[0])
    assert asyncio.run(ready(pending, 10.0))
    for group in (pending, first[1]):
        release(group)
    withdrawn = reserve({"CPU": 64.0}, node, group_name("g", "3"))
    release(withdrawn)
    assert not asyncio.run(ready(withdrawn, 5.0))
    with pytest.raises(ValueError, match="must name a resource above 0"):
        reserve({"GPU": 0}, node, group_name("g", "4"))


def test_an_actor_stays_on_the_head_though_nodes_have_just_joined(ray_nodes: Any) -> None:
    class Somewhere:
        def node(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    joined = []
    for _ in range(2):
        joined.append(ray_nodes.add_node(num_cpus=0))
        actors = [ray.remote(Somewhere).options(num_cpus=0, **on_head()).remote() for _ in range(3)]
        assert set(ray.get([actor.node.remote() for actor in actors], timeout=180)) == {ray_nodes.head_node.node_id}
    for node in joined:
        ray_nodes.remove_node(node)
        disconnect(node)
