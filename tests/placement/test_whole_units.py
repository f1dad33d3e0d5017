"""Units of several workers are placed as wholes: by packing, by every policy, on nodes that an autoscaler brings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobHeartbeat, NodesChanged
from placement.autoscaling.autoscaler import Autoscaler, AutoscalerConfig
from placement.autoscaling.objectives import OBJECTIVES
from placement.cluster.cluster import Allocation, Cluster, by_node, check
from placement.cluster.jobs import JobView
from placement.cluster.node_types import NodeType
from placement.cluster.packing import pack
from placement.planning.plan import make_plan
from placement.policies import POLICIES, make_policy
from placement.reasons import Cause, Reason
from tests.placement.views import AT_ONCE, cluster, view

every = pytest.mark.parametrize("name", sorted(POLICIES))
clusters = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(lambda cpus: cluster(*cpus))


@st.composite
def units(draw: st.DrawFn) -> list[JobView]:
    """Jobs of one to eight workers a unit, each worker with a CPU."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        size, least = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 2))
        most = draw(st.integers(least, 5))
        job = view(f"j{number}", bundle={"CPU": float(size)}, unit=size, min_workers=least, max_workers=most)
        found.append(dataclasses.replace(job, submitted_s=float(number)))
    return found


def free(views: Sequence[JobView], nodes: Cluster, allocation: Allocation) -> dict[str, float]:
    """CPUs that no unit has, by node."""
    cpus = {view.job: view.bundle["CPU"] for view in views}
    left = {node.node_id: node.total["CPU"] for node in nodes.nodes}
    for job, places in allocation.items():
        for node_id, count in by_node(places).items():
            left[node_id] -= count * cpus[job]
    return left


@settings(max_examples=200, deadline=None)
@given(views=units(), nodes=clusters, wanted=st.lists(st.integers(0, 5), min_size=5, max_size=5))
def test_packing_splits_no_unit(views: list[JobView], nodes: Cluster, wanted: list[int]) -> None:
    counts = {job.job: count for job, count in zip(views, wanted, strict=False) if count >= job.min_workers}
    packing = pack(counts, views, nodes)
    assert all(cpus >= 0 for cpus in free(views, nodes, packing.allocation).values()), "a unit has another node's CPUs"
    for job, count in counts.items():
        assert sum(packing.allocation.get(job, {}).values()) + packing.short.get(job, 0) == count
    alone = views[0]
    room = sum(int(node.total["CPU"] // alone.bundle["CPU"]) for node in nodes.nodes)
    found = pack({alone.job: 5}, [dataclasses.replace(alone, min_workers=1)], nodes)
    assert sum(found.allocation.get(alone.job, {}).values()) == min(room, 5), "a unit is left out that a node holds"


@every
@settings(max_examples=30, deadline=None)
@given(views=units(), nodes=clusters)
def test_every_policy_gives_whole_units(name: str, views: list[JobView], nodes: Cluster) -> None:
    plan = make_plan(make_policy(name), views, nodes, 0.0)
    check(plan.allocation, {job.job: job.bundle for job in views}, nodes)
    assert all(cpus >= -1e-6 for cpus in free(views, nodes, plan.allocation).values())
    for job in views:
        count = sum(plan.allocation.get(job.job, {}).values())
        assert count == 0 or job.min_workers <= count <= job.max_workers


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@settings(max_examples=10, deadline=None)
@given(size=st.integers(1, 8), least=st.integers(1, 3), there=st.integers(0, 3))
def test_autoscaler_brings_nodes_that_hold_a_unit(name: str, size: int, least: int, there: int) -> None:
    """However cheap the small nodes are: together they have the CPUs, alone none of them has."""
    types = [
        NodeType(name="small", resources={"CPU": 2.0}, usd_per_h=0.1, max_nodes=16),
        NodeType(name="large", resources={"CPU": 8.0}, usd_per_h=4.0, max_nodes=4),
    ]
    nodes = Cluster(nodes=tuple(types[0].node(f"s{number}") for number in range(there)))
    policy, job = make_policy("goodput"), view("a", bundle={"CPU": float(size)}, unit=size, min_workers=least)
    decision = Autoscaler(types, policy, OBJECTIVES[name](), AutoscalerConfig()).decide([job], nodes, 1000.0)
    if size > 2:
        assert not decision.add.get("small") and decision.add.get("large")
    grown = [each.node(f"{each.name}~{n}") for each in types for n in range(decision.add.get(each.name, 0))]
    there_then = Cluster(nodes=(*nodes.nodes, *grown))
    assert make_plan(policy, [job], there_then, 1000.0).allocation.get("a")


def test_reasons_speak_of_units() -> None:
    core = AllocatorCore(make_policy("goodput"), AT_ONCE, settling=False)
    core.handle(NodesChanged(cluster=cluster(4)), 0.0)
    core.handle(JobHeartbeat(view=view("a", bundle={"CPU": 2.0}, unit=2, max_workers=3)), 1.0)
    reason = core.snapshot().jobs["a"].reason
    assert "2 units" in str(reason) and "worker" not in str(reason)
    assert "a unit is 2 workers, on one node if one has room" in reason.explained
    core.handle(JobHeartbeat(view=view("b", bundle={"CPU": 8.0}, unit=4)), 2.0)
    assert "one unit needs 8 CPU" in core.snapshot().jobs["b"].reason.explained


def test_words_of_policies_stay_theirs() -> None:
    """What a user's own policy says is not changed."""
    assert str(Reason(Cause.POLICY, ("mine", "few workers"), unit=2)) == "mine: few workers"
