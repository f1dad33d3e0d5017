"""Jobs on nodes: what is left follows from who is where."""

from __future__ import annotations

import numpy as np
import pytest

from placement.cluster.cluster import Cluster
from placement.cluster.packing import FreeResources, FreeSlots, Occupancy, best_fit, mask, worst_fit
from tests.placement.views import node, view


@pytest.mark.parametrize("seed", range(5))
def test_what_is_put_and_lifted_is_what_is_missing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = rng.integers(1, 9, 6)
    occupied, places = Occupancy(FreeSlots(slots)), dict[int, dict[int, int]]()
    for _ in range(60):
        job, index = int(rng.integers(8)), int(rng.integers(6))
        fits = int(occupied.slots(job)[index])
        if rng.random() < 0.3:
            assert occupied.lift(job) == places.pop(job, {})
        elif fits:
            workers = int(rng.integers(1, fits + 1))
            occupied.put(job, index, workers)
            place = places.setdefault(job, {})
            place[index] = place.get(index, 0) + workers
        used = [sum(place.get(i, 0) for place in places.values()) for i in range(6)]
        assert occupied.slots(0).tolist() == (slots - used).tolist()
        assert [occupied.on(i) for i in range(6)] == [
            {j for j, place in places.items() if i in place} for i in range(6)
        ]
        assert occupied.multi_node_nodes() == {i for place in places.values() if len(place) > 1 for i in place}
        assert all(occupied.workers(j) == sum(places.get(j, {}).values()) for j in range(8))


def test_a_job_does_not_stand_in_its_own_way() -> None:
    free = FreeResources(Cluster(nodes=(node("a", 4.0), node("b", 4.0))))
    occupied, wide = Occupancy(free), view("wide")
    occupied.put_all(wide, {0: 3, 1: 1})
    assert occupied.multi_node_nodes() == occupied.multi_node_nodes(view("other")) == {0, 1}
    assert occupied.multi_node_nodes(wide) == set()
    assert free.slots(wide).tolist() == [1, 3]
    assert mask({1}, 2).tolist() == [False, True]


def test_best_fit_is_the_tightest_worst_fit_the_roomiest() -> None:
    fits = np.array([0, 5, 3, 3, 5])
    assert [best_fit(fits, wanted) for wanted in (1, 3, 4, 6)] == [2, 2, 1, None]
    assert worst_fit(fits) == 1
    assert worst_fit(np.zeros(3, dtype=np.int64)) is None and worst_fit(np.zeros(0, dtype=np.int64)) is None
