"""Units that no node has room for span nodes: as few as possible, of one domain, and no unit besides them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.allocator.core import AllocatorCore
from placement.allocator.events import Allocate, Instruction, JobHeartbeat, NodesChanged
from placement.cluster.cluster import DOMAIN_LABEL, GPU_TYPE_LABEL, Cluster, Node, by_node, check, parts
from placement.cluster.jobs import JobView
from placement.planning.constraints import Constraints
from placement.planning.plan import make_plan, possible_nodes, unsatisfiable
from placement.planning.spans import find_places
from placement.planning.tenants import Tenant
from placement.policies import POLICIES, make_policy
from placement.ray_cluster.cluster_scaler import demand
from placement.simulator.results.outlook import outlook
from tests.placement.views import AT_ONCE, cluster, view


def node(name: str, cpus: float, domain: str = "", gpu: str = "") -> Node:
    labels = {key: value for key, value in ((DOMAIN_LABEL, domain), (GPU_TYPE_LABEL, gpu)) if value}
    return Node(node_id=name, total={"CPU": cpus}, free={"CPU": cpus}, labels=labels)


def job(unit: int, name: str = "a", least: int = 1, most: int = 3, **fields: object) -> JobView:
    bundle = {"CPU": float(unit)}
    return dataclasses.replace(view(name, bundle=bundle, unit=unit, min_workers=least, max_workers=most), **fields)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    rooms = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    name = draw(st.sampled_from(["n", "R&D+A100*2~"]))  # node types are named by people
    return Cluster(
        nodes=tuple(
            node(f"{name}{i}", float(cpus), draw(st.sampled_from(["", "r1", "r2"])), draw(st.sampled_from(["", "T4"])))
            for i, cpus in enumerate(rooms)
        )
    )


def fewest(nodes: list[Node], unit: int) -> int | None:
    """The fewest of these nodes that have room for a unit, found by trying all."""
    sizes = range(1, len(nodes) + 1)
    return next(
        (n for n in sizes if any(sum(x.free["CPU"] for x in s) >= unit for s in itertools.combinations(nodes, n))), None
    )


@settings(max_examples=200, deadline=None)
@given(nodes=clusters(), unit=st.integers(1, 9), most=st.integers(1, 4))
def test_places_use_fewest_nodes_of_one_domain(nodes: Cluster, unit: int, most: int) -> None:
    left = {each.node_id: each for each in nodes.nodes}
    found = find_places(job(unit), nodes, most)
    for number in range(len(found) + 1):
        domains = [
            [n for n in left.values() if (n.gpu_type, n.domain) == key]
            for key in {(n.gpu_type, n.domain) for n in left.values()}
        ]
        types = [[n for n in left.values() if n.gpu_type == gpu] for gpu in {n.gpu_type for n in left.values()}]
        near = [n for group in domains if (n := fewest(group, unit)) is not None]
        far = [n for group in types if (n := fewest(group, unit)) is not None]
        if number == len(found):
            assert number == most or not far, "a unit is left out that nodes of one type hold"
            break
        chosen = parts(found[number])
        assert len(chosen) == min(near or far)
        assert len({nodes.by_id()[name].gpu_type for name in chosen}) == 1
        assert not near or len({nodes.by_id()[name].domain for name in chosen}) == 1
        taken = {name: count if len(chosen) > 1 else unit for name, count in chosen.items()}
        assert sum(taken.values()) == unit
        for name, count in taken.items():
            cpus = left[name].free["CPU"] - count
            assert cpus >= 0
            left[name] = dataclasses.replace(left[name], free={"CPU": cpus})


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=30, deadline=None)
@given(nodes=clusters(), units=st.lists(st.integers(1, 9), min_size=1, max_size=3), data=st.data())
def test_policies_split_only_what_fits_nowhere(
    name: str, nodes: Cluster, units: list[int], data: st.DataObject
) -> None:
    views = [job(unit, f"j{i}", 1, data.draw(st.integers(1, 3)), submitted_s=float(i)) for i, unit in enumerate(units)]
    plan = make_plan(make_policy(name), views, nodes, 0.0)
    check(plan.allocation, {each.job: each.bundle for each in views}, nodes)
    for each in views:
        held = plan.allocation.get(each.job, {})
        assert not held or each.min_workers <= sum(held.values()) <= each.max_workers
        if any(n.total["CPU"] >= each.unit for n in nodes.nodes):
            assert all(len(parts(place)) == 1 for place in held), "a unit is split that a node is large enough for"
        assert all(sum(parts(place).values()) == each.unit for place in held if len(parts(place)) > 1)
    again = [each.placed(plan.allocation.get(each.job, {})) for each in views]
    later = make_plan(make_policy(name), again, nodes, 0.0).allocation
    for each in views:
        before = {place for place in plan.allocation.get(each.job, {}) if len(parts(place)) > 1}
        assert not before or before & later.get(each.job, {}).keys(), "all units have moved without a cause"


@settings(max_examples=100, deadline=None)
@given(nodes=clusters(), unit=st.integers(2, 9))
def test_lone_job_runs_where_its_unit_fits(nodes: Cluster, unit: int) -> None:
    alone = job(unit, most=1)
    could = bool(find_places(alone, nodes, 1))
    assert bool(make_plan(make_policy("goodput"), [alone], nodes, 0.0).allocation) == could
    assert (unsatisfiable(alone, nodes) is None) == could


def test_outlook_simulates_units_that_span_nodes() -> None:
    nodes = Cluster(nodes=tuple(node(f"n{i}", 4.0, gpu="T4") for i in range(4)))
    (found,) = outlook([job(6, most=2)], nodes, "goodput", 0.0)
    assert found.workers == 2 and all(len(parts(place)) == 2 for place in found.nodes)


def allocate(instructions: list[Instruction], name: str) -> Allocate:
    (found,) = [each for each in instructions if isinstance(each, Allocate) and each.job == name]
    return found


def test_reason_says_that_units_span_nodes() -> None:
    core = AllocatorCore(make_policy("goodput"), AT_ONCE, settling=False)
    core.handle(NodesChanged(cluster=cluster(2, 2)), 0.0)
    given = allocate(core.handle(JobHeartbeat(view=job(4, most=1)), 1.0), "a")
    assert list(given.nodes) == ["n0*2+n1*2"]
    assert "a unit spans nodes" in given.reason.explained and len(str(given.reason).split()) <= 15
    told = core.explain("a")
    assert "a unit spans nodes" in told.figures and told.speed == 1.0


def test_spanning_unit_leaves_nodes_that_drain_or_go() -> None:
    core = AllocatorCore(make_policy("goodput"), AT_ONCE, settling=False)
    core.handle(NodesChanged(cluster=cluster(2, 2, 2, 2)), 0.0)
    held = job(4, most=1).placed({"n0*2+n1*2": 1})
    core.handle(JobHeartbeat(view=held), 1.0)
    assert core.snapshot().jobs["a"].target == {"n0*2+n1*2": 1}
    told = allocate(core.handle(NodesChanged(cluster=cluster(2, 2, 2, 2).draining({"n1"})), 2.0), "a")
    assert not parts(next(iter(told.nodes))).keys() & {"n1"} and told.draining == {"n0*2+n1*2": 0.0}
    core.handle(NodesChanged(cluster=Cluster(nodes=cluster(2, 2, 2, 2).nodes[1:])), 3.0)
    assert "n0" not in by_node(core.snapshot().jobs["a"].target)


def test_plain_job_of_same_bundle_is_judged_apart() -> None:
    core = AllocatorCore(make_policy("goodput"), AT_ONCE, settling=False)
    core.handle(NodesChanged(cluster=cluster(2, 2)), 0.0)
    core.handle(JobHeartbeat(view=dataclasses.replace(job(4, "plain", most=1), unit=1)), 1.0)
    core.handle(JobHeartbeat(view=job(4, most=1)), 2.0)
    core.handle(NodesChanged(cluster=cluster(2, 2, 1)), 3.0)
    jobs = core.snapshot().jobs
    assert jobs["a"].target == {"n0*2+n1*2": 1} and not jobs["plain"].target


def test_running_unit_is_judged_apart_from_waiting_one() -> None:
    """Beside a larger node only a unit that spans nodes already may do so."""
    core = AllocatorCore(make_policy("goodput"), AT_ONCE, settling=False)
    core.handle(NodesChanged(cluster=cluster(2, 2, 2, 2)), 0.0)
    held = job(4, most=2, least=2).placed({"n0*2+n1*2": 1, "n2*2+n3*2": 1})
    core.handle(JobHeartbeat(view=dataclasses.replace(job(4, "w", least=2), submitted_s=9.0)), 1.0)
    core.handle(JobHeartbeat(view=held), 2.0)
    core.handle(NodesChanged(cluster=cluster(2, 2, 2, 2, 4)), 3.0)
    assert core.snapshot().jobs["a"].target == dict(held.allocation)


@pytest.mark.parametrize("name", ["goodput", "fifo"])
@pytest.mark.parametrize("running", [False, True])
def test_quota_holds_across_units_of_several_sizes(name: str, running: bool) -> None:
    jobs = [job(6, "a", most=2, tenant="t"), job(5, "b", most=2, tenant="t", submitted_s=1.0)]
    if running:
        jobs[1] = jobs[1].placed({"n0*4+n1*1": 1})
    rules = Constraints(tenants=(Tenant(name="t", quota={"CPU": 12.0}),))
    plan = make_plan(make_policy(name), jobs, cluster(4, 4, 4, 4, 4, 4), 0.0, rules)
    sizes = {each: sum(at.values()) for each, at in plan.allocation.items()}
    assert sizes == ({"a": 1, "b": 1} if running else {"a": 2})


def test_nodes_are_requested_for_parts_of_running_units() -> None:
    """A bundle that no node type holds would keep Ray from starting any node of the request."""
    running = job(4, least=2).placed({"n0*3+n1*1": 1, "n9": 1})
    found = demand([running, view("w", min_workers=1)], {"w"})
    assert [resources["CPU"] for resources, _ in found] == [3.0, 1.0, 4.0, 1.0]


def test_nodes_that_hold_parts_of_units_are_possible() -> None:
    """A job's first failed start ends it if no other node could start it."""
    assert [len(possible_nodes(job(unit), cluster(2, 2, 2))) for unit in (1, 2, 4)] == [3, 3, 3]
    assert len(possible_nodes(job(4), cluster(2, 2, 4))) == 1


def test_other_jobs_have_what_units_leave() -> None:
    """The small job trains on a node that a second unit could span; it is asked for what it has."""
    small = view("b", bundle={"CPU": 1.0}, min_workers=1, max_workers=8).placed({"n2": 1})
    plan = make_plan(make_policy("goodput"), [job(4, most=1), small], cluster(2, 2, 2, 2), 0.0)
    assert set(plan.allocation) == {"a", "b"} and "n2" in plan.allocation["b"]
    assert sum(plan.allocation["b"].values()) > 1


def test_unit_that_spans_stays_when_larger_node_comes() -> None:
    nodes = Cluster(nodes=(*cluster(2, 2).nodes, node("n9", 4.0)))
    plan = make_plan(make_policy("goodput"), [job(4, most=1).placed({"n0*2+n1*2": 1})], nodes, 0.0)
    assert plan.allocation["a"] == {"n0*2+n1*2": 1}
