"""Placement groups and actors on nodes of a real Ray cluster."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from elastic_ray.background import Background
from placement.ray_cluster.groups import Room, ready, release, reserve, withdraw
from placement.ray_cluster.snapshot import group_name, on_head
from tests.local_cluster import disconnect

pytestmark = pytest.mark.usefixtures("ray_nodes")


@pytest.mark.thorough
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
    with pytest.raises(ValueError, match="must name a resource above 0"):
        reserve({"GPU": 0}, node, group_name("g", "4"))


async def becomes_free(room: Room, node: str) -> None:
    deadline_s = time.monotonic() + 60.0
    while not await room.holds({"CPU": 4.0}, node, 1):
        assert time.monotonic() < deadline_s, "room that was given back is not there"
        await asyncio.sleep(0.1)


@pytest.mark.thorough
def test_what_is_not_fulfilled_is_returned_once_it_is() -> None:
    async def give_back() -> None:
        node = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU") == 4)
        room, four = Room(), {"CPU": 4.0, "GPU": 0.0}
        await becomes_free(room, node)
        assert not await room.holds(four, node, 2)
        first, second = reserve(four, node, group_name("g", "1")), reserve(four, node, group_name("g", "2"))
        assert await ready(first, 10.0)
        going = asyncio.create_task(withdraw(second))
        await asyncio.sleep(0.5)
        assert not going.done() and placement_group_table(second)["state"] == "PENDING", "Ray might lose its room"
        assert not await room.holds({"CPU": 1.0}, node, 1)
        release(first)
        await asyncio.wait_for(going, 20.0)
        await becomes_free(room, node)
        assert not await room.holds({"CPU": 1.0}, "0" * 56, 1), "a node that is gone has no room"
        withdrawals, third = Background(), reserve({"CPU": 64.0}, node, group_name("g", "3"))
        withdrawals.start(withdraw(third))
        await withdrawals.finish(0.2)
        assert placement_group_table(third)["state"] == "REMOVED", "it would be the next job's of this name"

    asyncio.run(give_back())


@pytest.mark.slow
def test_no_room_is_lost_where_many_give_up() -> None:
    """Where groups are removed before they are fulfilled, Ray loses some in a minute on a crowded machine."""

    class Asks:
        async def ask(self, seed: int, node: str, until_s: float) -> None:
            dice, room, number = random.Random(seed), Room(), 0
            while time.time() < until_s:
                number += 1
                if not await room.holds({"CPU": 1.0}, node, 1):
                    await asyncio.sleep(dice.uniform(0.0, 0.1))
                    continue
                group = reserve({"CPU": 1.0}, node, group_name(f"g{dice.random()}", str(number)))
                await asyncio.sleep(dice.uniform(0.0, 0.05))
                await withdraw(group)

    node = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU") == 4)
    actors = [ray.remote(Asks).options(num_cpus=0).remote() for _ in range(7)]
    until_s = time.time() + 60.0
    ray.get([actor.ask.remote(seed, node, until_s) for seed, actor in enumerate(actors)], timeout=180)  # type: ignore[attr-defined]
    asyncio.run(becomes_free(Room(), node))


@pytest.mark.thorough
def test_actor_stays_on_head_though_nodes_have_just_joined(ray_nodes: Any) -> None:
    class Somewhere:
        def node(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    joined = []
    for _ in range(2):
        joined.append(ray_nodes.add_node(num_cpus=0))
        actors = [ray.remote(Somewhere).options(num_cpus=0, **on_head()).remote() for _ in range(3)]
        assert set(ray.get([actor.node.remote() for actor in actors], timeout=180)) == {ray_nodes.head_node.node_id}  # type: ignore[attr-defined]
    for node in joined:
        ray_nodes.remove_node(node)
        disconnect(node)
