"""What no node could ever offer is found before a job waits for it."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from elastic_ray.driver.trainer import impossible
from placement.cluster.cluster import Node
from placement.cluster.sizes import AllowedSizes, MemoryNeed


def node(name: str, labels: Mapping[str, str] | None = None, **total: float) -> Node:
    return Node(node_id=name, total=total, free={}, labels=labels or {})


NODES = (node("a", CPU=8), node("b", {"zone": "x"}, CPU=2, GPU=2))


@pytest.mark.parametrize(
    "bundle, workers, labels, message",
    [
        ({"TPU": 1}, 1, {}, r"a worker needs 1 TPU, but no node has more than 0; .*or add a node with TPU"),
        ({"GPU": 4}, 1, {}, "needs 4 GPU, but no node has more than 2"),
        ({"CPU": 4, "GPU": 1}, 1, {}, r"needs \{CPU: 4, GPU: 1\} on one node"),
        ({"CPU": 3}, 3, {}, r"at least 3 workers of \{CPU: 3\} .*room for 2; lower .*\(2, 3\)"),
        ({"CPU": 1}, 3, {"zone": "x"}, r"1 node\(s\) with the labels .*room for 2"),
        ({"CPU": 4}, 1, {"zone": "x"}, "needs 4 CPU, but no node with the labels .* more than 2"),
        ({"CPU": 1}, 1, {"zone": "y"}, "no node has the labels .*there are zone=x"),
    ],
)
def test_the_missing_resource_is_named(
    bundle: dict[str, float], workers: int, labels: dict[str, str], message: str
) -> None:
    reason = impossible(bundle, workers, labels, NODES)
    assert reason is not None
    assert re.search(message, reason), reason


@pytest.mark.parametrize(
    "bundle, workers, labels",
    [({"CPU": 1}, 10, {}), ({"GPU": 0.1}, 20, {}), ({"CPU": 8}, 1, {}), ({"GPU": 1}, 2, {"zone": "x"})],
)
def test_what_fits_exactly_is_possible(bundle: dict[str, float], workers: int, labels: dict[str, str]) -> None:
    assert impossible(bundle, workers, labels, NODES) is None


def test_advice_keeps_to_sizes_that_the_job_may_have() -> None:
    need = MemoryNeed(available_bytes=50, sharded_bytes=300)  # fits from 12 workers on
    reason = impossible({"CPU": 1}, 12, {}, NODES, AllowedSizes(memory=need))
    assert re.search(r"room for 10; SchedulingConfig\(memory=<from 12 on>\) allows none so small", str(reason))
    reason = impossible({"CPU": 1}, 12, {}, NODES, AllowedSizes(multiple_of=4))
    assert "room for 10; lower ScalingConfig(num_workers), for example to (8, 12)" in str(reason)


def test_a_cluster_without_nodes() -> None:
    assert "no living node" in str(impossible({"CPU": 1}, 1, {}, ()))
