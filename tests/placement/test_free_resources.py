"""What is left of a cluster, counted while it is taken from."""

from __future__ import annotations

import numpy as np
import pytest

from placement.cluster.cluster import Cluster, Node, slots
from placement.cluster.packing import FreeResources
from tests.placement.views import view

BUNDLES = ({"GPU": 1.0}, {"GPU": 0.5, "CPU": 1.0}, {"CPU": 3.0})


@pytest.mark.parametrize("seed", range(5))
def test_slots_are_those_of_what_is_left_after_changes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    amounts = [{"GPU": float(rng.integers(1, 9)), "CPU": float(rng.integers(4, 64))} for _ in range(6)]
    zones = [("a", "b")[i % 2] for i in range(6)]
    nodes = [Node(node_id=f"n{i}", total=each, free=each, labels={"zone": zones[i]}) for i, each in enumerate(amounts)]
    room, left = FreeResources(Cluster(nodes=tuple(nodes))), [dict(each) for each in amounts]
    kinds = [view(f"j{i}", bundle=b, label_selector={"zone": "a"} if i == 1 else {}) for i, b in enumerate(BUNDLES)]
    for _ in range(40):
        for _ in range(int(rng.choice([1, 3, 30]))):
            kind, at = kinds[rng.integers(3)], int(rng.integers(6))
            workers = int(rng.integers(-1, max(int(room.slots(kind)[at]), 0) + 1))
            room.take(kind, at, workers)
            for name, need in kind.bundle.items():
                left[at][name] -= workers * need
        asked = kinds[rng.integers(3)]
        allowed = [not asked.label_selector or zone == "a" for zone in zones]
        expected = [max(slots(each, asked.bundle), 0) if ok else 0 for each, ok in zip(left, allowed, strict=True)]
        assert room.slots(asked).tolist() == expected


def test_slots_are_the_callers_own() -> None:
    node = Node(node_id="n", total={"GPU": 4.0}, free={"GPU": 4.0})
    room, job = FreeResources(Cluster(nodes=(node,))), view("j", bundle={"GPU": 1.0})
    room.slots(job)[0] = 99
    assert room.slots(job).tolist() == [4]
