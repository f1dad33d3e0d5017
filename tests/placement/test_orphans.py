"""Slots of workers whose controller is gone for good: kept while their processes live, up to a bound, and no longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from placement.allocator.config import AllocatorConfig
from placement.ray_cluster import groups
from placement.ray_cluster.orphans import Orphans, orphaned
from placement.ray_cluster.snapshot import group_name


def test_living_process_keeps_its_group_up_to_the_bound() -> None:
    since_s: dict[str, float] = {}

    def released(now_s: float, **lives: bool | None) -> tuple[str, ...]:
        return orphaned(lives, since_s, now_s, 300.0)

    assert released(0.0, saves=True, dead=False, starting=None) == ("dead",)
    assert released(120.0, saves=True, starting=None) == ()
    assert released(121.0, saves=True, starting=None) == ("starting",)
    assert released(300.0, saves=True) == ()
    assert released(300.5, saves=False) == ("saves",)
    assert released(301.0, saves=True) == ("saves",)
    assert released(302.0) == () and since_s == {}, "the job is known again"
    assert released(303.0, saves=True) == ()


def test_the_bound_is_a_time() -> None:
    with pytest.raises(ValueError, match=r"orphan_timeout_s must be 0 or more, but got -1\.0"):
        AllocatorConfig(orphan_timeout_s=-1.0)


class Holder:
    """A worker's process: it runs beside its group."""

    def hold(self, group: str) -> None:
        groups.hold(group)


@pytest.fixture
def node(ray_nodes: Any) -> Iterator[str]:
    yield next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU") == 4)
    for group in groups.of_jobs():
        groups.release(groups.find(group))


def reserved(node: str, *workers: str) -> dict[str, PlacementGroup]:
    found = {worker: groups.reserve({"CPU": 1.0}, node, group_name("a", worker)) for worker in workers}
    assert all(asyncio.run(groups.ready(group, 30.0)) for group in found.values())
    return found


def left(found: dict[str, PlacementGroup]) -> set[str]:
    return {worker for worker, group in found.items() if placement_group_table(group)["state"] != "REMOVED"}


def holder(group: PlacementGroup) -> Any:
    actor: Any = ray.remote(Holder).options(num_cpus=0).remote()
    ray.get(actor.hold.remote(group.id.hex()), timeout=120)
    return actor


@pytest.mark.thorough
def test_a_slot_is_free_once_its_process_is_gone(node: str) -> None:
    found = reserved(node, "w1", "w2", "w3")
    actors = {worker: holder(found[worker]) for worker in ("w1", "w2")}

    async def release() -> None:
        releasing = asyncio.create_task(Orphans(600.0).release("a"))
        for worker, stays in ((None, {"w1", "w2"}), ("w1", {"w2"}), ("w2", set())):
            if worker is not None:
                ray.kill(actors[worker])
            until_s = time.monotonic() + 60.0
            while await asyncio.to_thread(left, found) != stays:
                assert time.monotonic() < until_s, (worker, left(found))
                await asyncio.sleep(0.1)
            await asyncio.sleep(2.0)
            assert await asyncio.to_thread(left, found) == stays, "a process that lives keeps its slot"
            assert releasing.done() == (not stays)

    asyncio.run(release())


@pytest.mark.thorough
def test_a_process_that_never_ends_keeps_its_slot_bounded(node: str) -> None:
    found = reserved(node, "w1")
    actor = holder(found["w1"])
    begin_s = time.monotonic()
    asyncio.run(asyncio.wait_for(Orphans(3.0).release("a"), 120.0))
    assert time.monotonic() - begin_s >= 3.0 and not left(found)
    ray.kill(actor)


@pytest.mark.thorough
def test_allocator_that_has_never_heard_of_job_does_same(node: str) -> None:
    found = reserved(node, "w1", "w2")
    actors = {worker: holder(found[worker]) for worker in found}
    orphans = Orphans(600.0)
    asyncio.run(orphans.poll((), 100.0))
    assert left(found) == {"w1", "w2"}
    ray.kill(actors["w1"])
    until_s = time.monotonic() + 60.0
    while groups.holder_lives(found["w1"].id.hex()):
        assert time.monotonic() < until_s
        time.sleep(0.1)
    asyncio.run(orphans.poll((), 111.0))
    assert left(found) == {"w2"}
    asyncio.run(orphans.poll(("a",), 1000.0))
    assert left(found) == {"w2"}, "its job is known"
    asyncio.run(orphans.poll((), 1011.0))
    asyncio.run(orphans.poll((), 1700.0))
    assert not left(found)
    ray.kill(actors["w2"])
