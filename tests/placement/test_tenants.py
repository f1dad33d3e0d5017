"""Tenants: what is guaranteed, what is lent and given back, and that a quota is never exceeded."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from placement.cluster.cluster import MARKET_LABEL, SPOT, Cluster, Node
from placement.cluster.jobs import JobView
from placement.planning.constraints import Constraints
from placement.planning.plan import make_plan
from placement.planning.problem import Plan, Problem
from placement.planning.tenants import Tenant, by_tenant, entitlements, share_out, within
from placement.policies import POLICIES, make_policy
from tests.placement.views import cluster, node, view

every = pytest.mark.parametrize("name", sorted(POLICIES))
FRUGAL = {name for name in POLICIES if getattr(make_policy(name), "frugal", False)}


def sizes(name: str, jobs: list[JobView], nodes: Cluster, *tenants: Tenant) -> dict[str, int]:
    found = make_plan(make_policy(name), jobs, nodes, 0.0, Constraints(tenants=tenants))
    return {job: sum(place.values()) for job, place in found.allocation.items()}


def test_all_shares_rise_together_until_demand_or_cluster_ends() -> None:
    demands = {"a": {"GPU": 8.0}, "b": {"GPU": 1.0}, "c": {"GPU": 8.0}}
    share = entitlements(demands, {"a": 1.0, "b": 1.0, "c": 2.0}, {"GPU": 8.0})
    assert share == pytest.approx({"b": 1 / 8, "a": 7 / 24, "c": 14 / 24})


def test_tenants_of_different_resources_do_not_compete() -> None:
    demands = {"cpu": {"CPU": 10.0}, "gpu": {"GPU": 4.0, "CPU": 4.0}}
    share = entitlements(demands, {"cpu": 1.0, "gpu": 1.0}, {"CPU": 100.0, "GPU": 4.0})
    assert share == pytest.approx({"cpu": 0.1, "gpu": 1.0})
    small = entitlements({"a": {"CPU": 2.0}, "b": {"GPU": 1.0}}, {"a": 1.0, "b": 0.5}, {"CPU": 1.0, "GPU": 1.0})
    assert small == pytest.approx({"a": 1.0, "b": 1.0}), "b rises on when a has all CPUs"


def test_the_published_example_of_dominant_resource_fairness() -> None:
    """Ghodsi et al. 2011, section 4.1: 9 CPUs and 18 GB; tasks of (1 CPU, 4 GB) and (3 CPUs, 1 GB): 3 and 2 tasks."""
    demands = {"a": {"CPU": 100.0, "memory": 400.0}, "b": {"CPU": 300.0, "memory": 100.0}}
    share = entitlements(demands, {"a": 1.0, "b": 1.0}, {"CPU": 9.0, "memory": 18.0})
    assert share == pytest.approx({"a": 2 / 3, "b": 2 / 3})


amounts = st.fixed_dictionaries({"CPU": st.floats(0, 50), "GPU": st.floats(0, 8)})


@settings(max_examples=150, deadline=None)
@given(demands=st.lists(amounts, min_size=1, max_size=4), weights=st.lists(st.floats(0.1, 8), min_size=4, max_size=4))
def test_shares_fit_and_nobody_has_less_than_its_due(demands: list[dict[str, float]], weights: list[float]) -> None:
    totals = {"CPU": 32.0, "GPU": 8.0}
    wanted = {str(i): demand for i, demand in enumerate(demands)}
    weight = {str(i): weights[i] for i in range(len(demands))}
    share = entitlements(wanted, weight, totals)
    full = {name: max(demand[r] / totals[r] for r in totals) for name, demand in wanted.items()}
    for r, total in totals.items():
        assert sum(share[n] / full[n] * wanted[n][r] for n in wanted if full[n] > 0) <= total * (1 + 1e-6)
    for name, each in share.items():
        due = weight[name] / sum(weight.values())
        assert min(due, full[name]) * (1 - 1e-6) - 1e-9 <= each <= full[name] * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(
    demands=st.lists(amounts, min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 8), min_size=4, max_size=4),
    units=st.sampled_from([2.0**-10, 1 / 8, 8.0]),
    of_weights=st.sampled_from([1 / 16, 1.0, 16.0]),
)
def test_shares_do_not_depend_on_units(
    demands: list[dict[str, float]], weights: list[float], units: float, of_weights: float
) -> None:
    def shares(scale: float, by: float) -> dict[str, float]:
        wanted = {str(i): {r: amount * scale for r, amount in demand.items()} for i, demand in enumerate(demands)}
        weight = {str(i): weights[i] * by for i in range(len(demands))}
        return entitlements(wanted, weight, {"CPU": 32.0 * scale, "GPU": 8.0 * scale})

    assert shares(units, of_weights) == pytest.approx(shares(1.0, 1.0), rel=1e-5, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    cpus=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    demands=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=7),
    quota=st.none() | st.integers(0, 8),
    units=st.sampled_from([1 / 8, 4.0]),
)
def test_plans_do_not_depend_on_units(
    cpus: list[int], demands: list[tuple[str, int, int]], quota: int | None, units: float
) -> None:
    def plan(scale: float) -> dict[str, int]:
        jobs = [
            view(f"j{i}", tenant=name, min_workers=low, max_workers=low + more, bundle={"CPU": scale})
            for i, (name, low, more) in enumerate(demands)
        ]
        tenants = Tenant(name="a", quota={} if quota is None else {"CPU": quota * scale}), Tenant(name="b", weight=2.0)
        return sizes("goodput", jobs, cluster(*(n * scale for n in cpus)), *tenants)

    assert plan(units) == plan(1.0)


@every
def test_cluster_is_shared_by_weight_and_lends_the_rest(name: str) -> None:
    jobs = [view(f"a{i}", tenant="a") for i in range(3)] + [view("b", tenant="b", submitted_s=1.0)]
    found = sizes(name, jobs, cluster(8), Tenant(name="b", weight=3.0))
    if name not in FRUGAL:
        assert (found["b"], sum(found.values())) == (6, 8) or (found["b"], sum(found.values())) == (5, 8)
    lent = sizes(
        name, [*jobs[:3], dataclasses.replace(jobs[3], max_workers=2)], cluster(8), Tenant(name="b", weight=3.0)
    )
    assert lent["b"] == 2 or name in FRUGAL
    assert sum(lent.values()) == 8 or name in FRUGAL


@every
def test_lent_workers_are_returned_at_once_also_by_stopping(name: str) -> None:
    """b's jobs run on a's half of the cluster; a's job arrives and needs all of it."""
    borrowed = [view(f"b{i}", tenant="b", min_workers=2, max_workers=2, allocation={f"n{i // 2}": 2}) for i in range(4)]
    owner = view("a", tenant="a", min_workers=4, max_workers=4, submitted_s=1.0)
    found = sizes(name, [*borrowed, owner], cluster(4, 4))
    assert found["a"] == 4
    assert sum(found.values()) == 8
    firm = [dataclasses.replace(job, preemptible=False) for job in borrowed]
    assert sizes(name, [*firm, owner], cluster(4, 4)) == {f"b{i}": 2 for i in range(4)}


@every
def test_quota_is_a_ceiling_though_the_rest_is_idle(name: str) -> None:
    nodes = Cluster(nodes=tuple(dataclasses.replace(node(f"n{i}", 8), free={"CPU": 8, "GPU": 4}) for i in range(2)))
    jobs = [view(f"a{i}", tenant="a", bundle={"GPU": 0.5}) for i in range(3)]
    found = make_plan(make_policy(name), jobs, nodes, 0.0, Constraints(tenants=(Tenant(name="a", quota={"GPU": 2}),)))
    total = sum(sum(place.values()) for place in found.allocation.values())
    assert total == 4 or (name in FRUGAL and total <= 4)
    both = [*jobs, view("b", tenant="b", bundle={"GPU": 1.0}, submitted_s=1.0, max_workers=16)]
    found = make_plan(make_policy(name), both, nodes, 0.0, Constraints(tenants=(Tenant(name="a", quota={"GPU": 2}),)))
    assert sum(sum(found.allocation.get(job.job, {}).values()) for job in jobs) <= 4
    if name not in FRUGAL:
        assert any("tenant 'a' may use 2 GPU at most" in found.reasons[job.job].words for job in jobs)
        assert sum(found.allocation["b"].values()) >= 4


@settings(max_examples=60, deadline=None)
@given(
    cpus=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    demands=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=7),
    weights=st.tuples(*[st.sampled_from([1.0, 2.0, 5.0])] * 3),
    quota=st.none() | st.integers(0, 8),
)
def test_each_tenant_has_its_due_in_whole_workers(
    cpus: list[int], demands: list[tuple[str, int, int]], weights: tuple[float, ...], quota: int | None
) -> None:
    """Jobs that need one worker only: each tenant has floor(due) workers or all that it can use."""
    tenants = {
        name: Tenant(name=name, weight=weight, quota={"CPU": quota} if quota is not None and name == "a" else {})
        for name, weight in zip("abc", weights, strict=True)
    }
    jobs = [
        view(f"j{i}", tenant=tenant, max_workers=1 + more, goodput=None, most_workers=9, submitted_s=float(i))
        for i, (tenant, _, more) in enumerate(demands)
    ]
    present = {name: tenants[name] for name in sorted({job.tenant for job in jobs})}
    used, floors = share_out(Problem(views=jobs, cluster=cluster(*cpus)), present)
    demand = {name: sum(job.max_workers for job in jobs if job.tenant == name) for name in present}
    if quota is not None and "a" in demand:
        demand["a"] = min(demand["a"], quota)
    for name, tenant in present.items():
        due = sum(cpus) * tenant.weight / sum(each.weight for each in present.values())
        assert min(int(due + 1e-9), demand[name]) <= used[name]["CPU"] <= demand[name]
    assert sum(each["CPU"] for each in used.values()) == min(sum(cpus), sum(demand.values()))
    assert set(floors) <= {job.job for job in jobs}


@every
def test_minimum_above_its_tenants_share_does_not_take_anothers(name: str) -> None:
    large = view("a", tenant="a", min_workers=6, max_workers=6)
    small = [view(f"b{i}", tenant="b", max_workers=1, submitted_s=1.0 + i) for i in range(8)]
    found = sizes(name, [large, *small], cluster(8))
    assert sum(found.get(job.job, 0) for job in small) >= 4


def test_a_running_job_is_not_stopped_for_its_equal() -> None:
    """Neither minimum is within its tenant's half: what is lent stays lent while nobody has more right to it."""
    runs = view("b", tenant="b", min_workers=4, allocation={"n0": 4})
    waits = view("a", tenant="a", min_workers=4, submitted_s=1.0)
    assert sizes("goodput", [runs, waits], cluster(6)) == {"b": 6}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tenant(name="a", weight=0), "weight of tenant 'a' must be above 0 and finite, but got 0"),
        (lambda: Tenant(name="a", quota={"GPU": -1}), r"quota\['GPU'\] of tenant 'a' must be 0 or more, but got -1"),
        (lambda: Constraints(tenants=(Tenant(name="a"), Tenant(name="a"))), "'a' occurs twice"),
    ],
)
def test_bad_tenants_are_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()


OFF_SPOT = {"spot": "avoid", "label_selector": {MARKET_LABEL: f"!{SPOT}"}}


def spot_node(node_id: str, cpus: float) -> Node:
    return dataclasses.replace(node(node_id, cpus), labels={MARKET_LABEL: SPOT})


def with_nodes(*nodes: Node) -> Cluster:
    return Cluster(nodes=nodes)


@every
def test_share_counts_slots_that_the_tenants_jobs_may_use(name: str) -> None:
    """b has two thirds of the on-demand node, whatever there is of spot nodes, which neither may use."""
    jobs = [view("a", tenant="a", max_workers=6, **OFF_SPOT), view("b", tenant="b", max_workers=6, **OFF_SPOT)]
    tenants = (Tenant(name="a"), Tenant(name="b", weight=2.0))
    here = sizes(name, jobs, with_nodes(node("n0", 6)), *tenants)
    there = sizes(name, jobs, with_nodes(node("n0", 6), spot_node("s0", 30)), *tenants)
    assert here == there and (name in FRUGAL or there == {"a": 2, "b": 4})


def test_minimums_come_before_the_growth_of_others() -> None:
    """a may grow on either node, b has only one of them."""
    jobs = [view("a", tenant="a", max_workers=4), view("b", tenant="b", min_workers=3, max_workers=3, **OFF_SPOT)]
    nodes = with_nodes(node("n0", 3), spot_node("s0", 3))
    assert sizes("goodput", jobs, nodes) == {"a": 3, "b": 3}


jobs_of_two = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.integers(0, 4), st.booleans()), min_size=2, max_size=5
)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["goodput", "fifo"]),
    cpus=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    spot=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    wanted=jobs_of_two,
    weight=st.sampled_from([1.0, 2.0]),
)
# What is lent to a's first job would be given to its third, by shares alone.
@example(
    name="goodput", cpus=[2], spot=[1], wanted=[("a", 2, 0, False), ("b", 2, 0, False), ("a", 1, 1, False)], weight=1.0
)
# Placed anew, the first would take the room that the second needs.
@example(name="fifo", cpus=[3], spot=[1], wanted=[("b", 1, 0, False), ("b", 1, 0, True), ("b", 2, 0, True)], weight=1.0)
# One tenant.
@example(
    name="goodput",
    cpus=[3],
    spot=[3],
    wanted=[("a", 1, 0, False), ("a", 3, 0, False), ("a", 2, 0, True), ("a", 1, 1, False)],
    weight=1.0,
)
def test_a_spot_node_that_arrives_stops_nobody(
    name: str, cpus: list[int], spot: list[int], wanted: list[tuple[str, int, int, bool]], weight: float
) -> None:
    jobs = [
        view(
            f"j{i}", tenant=tenant, min_workers=low, max_workers=low + more, submitted_s=i, **(OFF_SPOT if off else {})
        )
        for i, (tenant, low, more, off) in enumerate(wanted)
    ]
    rules = Constraints(tenants=(Tenant(name="a", weight=weight), Tenant(name="b")))
    there = tuple(node(f"n{i}", amount) for i, amount in enumerate(cpus))
    for _ in range(6):
        plan = make_plan(make_policy(name), jobs, with_nodes(*there), 0.0, rules)
        placed = [each.placed(plan.allocation.get(each.job, {})) for each in jobs]
        settled, jobs = [each.allocation for each in jobs] == [each.allocation for each in placed], placed
        if settled:
            break
    assume(settled)
    more = tuple(spot_node(f"s{i}", amount) for i, amount in enumerate(spot))
    after = make_plan(make_policy(name), jobs, with_nodes(*there, *more), 0.0, rules)
    assert [each.job for each in jobs if each.workers and not after.allocation.get(each.job)] == []


def test_a_tenants_part_begins_with_what_its_jobs_hold() -> None:
    """Filling the node with most of its workers first would leave nothing of the other."""
    job = view("a", allocation={"n0": 3, "n1": 1})
    part = within(Problem(views=[job], cluster=cluster(8, 8)), {"CPU": 4.0}, {})
    assert {each.node_id: each.free["CPU"] for each in part.cluster.nodes} == {"n0": 3.0, "n1": 1.0}


def test_a_tenant_that_is_satisfied_is_decided_once() -> None:
    asked: list[set[str]] = []

    def solve(problem: Problem) -> Plan:
        asked.append({each.tenant for each in problem.views})
        found = {each.job: {"n0" if each.job == "a" else "n1": each.max_workers} for each in problem.views}
        return Plan(allocation=found, reasons=dict.fromkeys(found, ""))

    jobs = [view(name, tenant=name, max_workers=2) for name in "ab"]
    by_tenant(Problem(views=jobs, cluster=cluster(4, 4)), solve, {})
    assert sorted(map(sorted, asked)) == [["a"], ["b"]]
