"""What the core keeps for every policy without its knowing: contract tests over the registry, with a user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings

from placement.cluster.cluster import Cluster, check
from placement.cluster.jobs import JobView, speeds
from placement.cluster.packing import FreeResources
from placement.goodput.fitting import Observation
from placement.goodput.model import GoodputModel, NoiseScale
from placement.planning.constraints import Constraints, node_worth
from placement.planning.multi_node import held_up, shared
from placement.planning.plan import make_plan
from placement.planning.tenants import Tenant
from placement.policies import Target
from tests.placement.constrained import (
    FRUGAL,
    carried_out,
    clusters,
    constrained_views,
    every,
    plan,
    policy,
    rules,
    sizes,
)
from tests.placement.views import cluster, model, node, view

APART = Constraints(one_multi_node_job_per_node=True)


# All at once
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.matrix(every=1)
@every
@settings(max_examples=25, deadline=None)
@given(jobs=constrained_views(bundles=(1.0, 0.5, 2.0)), nodes=clusters, cluster_rules=rules, late=constrained_views())
def test_plans_keep_all_rules_and_equal_input_changes_nothing(
    name: str, jobs: list[JobView], nodes: Cluster, cluster_rules: Constraints, late: list[JobView]
) -> None:
    one = policy(name)
    jobs = carried_out(jobs, make_plan(one, jobs, nodes, 0.0, cluster_rules))
    running = {v.job: v for v in jobs if v.workers}
    jobs += [dataclasses.replace(v, job=f"new-{v.job}", submitted_s=9.0) for v in late]
    found = make_plan(one, jobs, nodes, 0.0, cluster_rules)
    check(found.allocation, {v.job: v.bundle for v in jobs}, nodes)
    assert set(found.reasons) == {v.job for v in jobs}
    for v in jobs:
        has = sum(found.allocation.get(v.job, {}).values())
        assert has == 0 or v.min_workers <= has <= v.max_workers
        if v.job in running and not v.preemptible:
            assert has >= v.min_workers, f"{v.job} was stopped"
    if cluster_rules.one_multi_node_job_per_node:
        assert not shared(found.allocation)
    quota = next((t.quota["CPU"] for t in cluster_rules.tenants if t.quota), None)
    if quota is not None:
        assert (
            sum(v.bundle["CPU"] * sum(found.allocation.get(v.job, {}).values()) for v in jobs if v.tenant == "a")
            <= quota
        )
    jobs = carried_out(jobs, found)
    assert make_plan(one, jobs, nodes, 0.0, cluster_rules).allocation == found.allocation


@pytest.mark.matrix(every=1)
@every
@settings(max_examples=25, deadline=None)
@given(jobs=constrained_views(resize_cost_s=0.0), nodes=clusters, cluster_rules=rules)
@example(  # four workers of `d` fit on the largest node of its tenant's part; they and a fifth span two nodes here
    jobs=[
        view("a", max_workers=4, priority=1, tenant="y", resize_cost_s=0.0, preemptible=False),
        view("c", max_workers=3, tenant="x", resize_cost_s=0.0, preemptible=False),
        view(
            "d", max_workers=5, priority=1, tenant="y", goodput=model(noise=1.0), resize_cost_s=0.0, preemptible=False
        ),
    ],
    nodes=cluster(3, 3, 6),
    cluster_rules=Constraints(),
)
def test_nothing_is_idle_that_a_job_could_use(
    name: str, jobs: list[JobView], nodes: Cluster, cluster_rules: Constraints
) -> None:
    if name in FRUGAL:
        pytest.skip(f"{name} leaves idle what is not worth its price")
    cluster_rules = dataclasses.replace(cluster_rules, one_multi_node_job_per_node=False)
    found = plan(name, jobs, nodes, cluster_rules)
    room = FreeResources(nodes)
    for v in jobs:
        for node_id, workers in found.allocation.get(v.job, {}).items():
            index = room.index(node_id)
            assert index is not None
            room.take(v, index, workers)
    quotas = {t.name: t.quota.get("CPU", 99.0) for t in cluster_rules.tenants}
    for v in jobs:
        of_tenant = sum(sizes(found).get(other.job, 0) for other in jobs if other.tenant == v.tenant)
        left = min(int(room.slots(v).sum()), int(quotas.get(v.tenant, 99.0)) - of_tenant)
        has = sizes(found).get(v.job, 0)
        if has == 0:
            assert left < v.min_workers
        elif name != "greedy" and left > 0:
            # Neither as policies estimate it, on as few nodes as on an empty cluster, nor on the nodes at hand.
            here = [n + found.allocation[v.job].get(i, 0) for i, n in zip(room.node_ids, room.slots(v), strict=True)]
            curves = [speeds(v, FreeResources(nodes).slots(v).tolist()), speeds(v, here)]
            gain = min(curve[has + 1] / curve[has] if has + 1 < len(curve) else 1.0 for curve in curves)
            # A policy that was asked about a part of the cluster counts nodes as if that part were empty: the size that
            # the job has may then fit on one node, and the next not, though both span two here.
            parts = any(len({getattr(other, field) for other in jobs}) > 1 for field in ("tenant", "priority"))
            parts |= any(t.quota for t in cluster_rules.tenants)
            if parts and has + 1 < min(map(len, curves)):
                gain = min(gain, curves[1][has + 1] / curves[0][has])
            assert gain < 1.0 + (0.1 if name == "goodput" and parts else 1e-5)


@every
@settings(max_examples=15, deadline=None)
@given(jobs=constrained_views(priority=1, tenant="x", preemptible=True, whole_nodes=False), nodes=clusters)
def test_one_priority_of_one_tenant_changes_nothing(name: str, jobs: list[JobView], nodes: Cluster) -> None:
    plain = [dataclasses.replace(v, priority=0, tenant="") for v in jobs]
    assert plan(name, jobs, nodes) == plan(name, plain, nodes)
    assert plan(name, jobs, nodes, Constraints(tenants=(Tenant(name="x", weight=2.0),))) == plan(name, plain, nodes)


# Priorities
# ------------------------------------------------------------------------------------------------------------------


@every
def test_higher_priority_has_its_minimum_and_its_growth_first(name: str) -> None:
    low = view("low", min_workers=2, max_workers=8, allocation={"n0": 4, "n1": 4})
    high = view("high", submitted_s=1.0, min_workers=3, max_workers=5, priority=1)
    found = plan(name, [low, high], cluster(4, 4))
    assert sizes(found)["high"] >= (5 if name not in FRUGAL else 3)
    assert sizes(found)["low"] >= 2
    assert str(found.reasons["low"]) == "jobs of higher priority go first (yours: 0)"


@every
def test_lower_priorities_stop_for_higher_minimums_not_for_growth(name: str) -> None:
    low = view("low", min_workers=2, max_workers=2, allocation={"n0": 2})
    assert "low" not in plan(name, [low, view("high", priority=1, min_workers=3)], cluster(4)).allocation
    assert sizes(plan(name, [low, view("high", priority=1, min_workers=2)], cluster(4))) == {"low": 2, "high": 2}


@every
@settings(max_examples=25, deadline=None)
@given(jobs=constrained_views(tenant="", preemptible=True, whole_nodes=False), nodes=clusters)
def test_minimums_are_admitted_strictly_by_priority(name: str, jobs: list[JobView], nodes: Cluster) -> None:
    """No job waits whose minimum would fit if all jobs of lower priority were stopped."""
    if name == "greedy":
        pytest.skip("it serves jobs of one priority as it likes")
    found = plan(name, jobs, nodes)
    for v in jobs:
        if v.job not in found.allocation:
            room = FreeResources(nodes)
            assert all(
                room.add(o, o.min_workers) for o in jobs if o.priority >= v.priority and o.job in found.allocation
            )
            assert int(room.slots(v).sum()) < v.min_workers


# Jobs that may not be stopped
# ------------------------------------------------------------------------------------------------------------------


@every
def test_job_that_is_not_preemptible_is_stopped_for_nobody(name: str) -> None:
    firm = view("firm", min_workers=2, max_workers=4, preemptible=False, allocation={"n0": 4})
    found = plan(name, [firm, view("high", priority=9, min_workers=3, submitted_s=1.0)], cluster(4))
    assert sizes(found)["firm"] >= 2
    assert "high" not in found.allocation
    more = plan(name, [firm, view("high", priority=9, min_workers=2, submitted_s=1.0)], cluster(4))
    assert sizes(more) == {"firm": 2, "high": 2}


def test_jobs_that_a_policy_keeps_forgetting_keep_their_minimum() -> None:
    """Whoever came last takes all it can: of four firm jobs it forgets first one, then another."""
    firm = [
        view(f"f{i}", max_workers=2, preemptible=False, allocation={"n0": 1}, submitted_s=float(i)) for i in range(4)
    ]
    late = view("late", max_workers=1, submitted_s=9.0)
    assert sizes(plan("greedy", [*firm, late], cluster(5))) == {"f0": 1, "f1": 1, "f2": 1, "f3": 1, "late": 1}


@every
def test_a_lost_node_may_stop_it_without_a_right(name: str) -> None:
    firm = view("firm", min_workers=3, preemptible=False, allocation={"n0": 3})
    assert plan(name, [firm], cluster(2)).allocation == {}
    waiting = view("firm", min_workers=3, preemptible=False)
    assert sizes(plan(name, [waiting, view("high", priority=1, min_workers=3)], cluster(4)))["high"] >= 3


# One multi-node job per node
# ------------------------------------------------------------------------------------------------------------------


@every
def test_two_jobs_that_span_nodes_are_kept_apart(name: str) -> None:
    jobs = [view("a", min_workers=5, max_workers=6), view("b", min_workers=5, max_workers=6, submitted_s=1.0)]
    together = plan(name, jobs, cluster(4, 4, 4), APART)
    assert list(sizes(together).values()) in ([5], [6])  # 12 slots, but there is no third pair of nodes
    assert not shared(together.allocation)
    assert sorted(plan(name, jobs, cluster(4, 4, 4, 4), APART).allocation) == ["a", "b"]


def heavy(job: str, **fields: Any) -> JobView:
    """A job that synchronises 5 s between nodes, whatever its batch, and has measured that."""
    slow = model(sync_s=2.5)
    seen = Observation(2, 2, 64, 0, step_time=5.2, grad_time=0.1)
    return view(job, **{"goodput": slow, "observations": {"": (seen,)}, **fields})


def test_jobs_that_links_hold_up_are_kept_apart() -> None:
    measured = Constraints(one_multi_node_job_per_node=None)
    fields: dict[str, Any] = {"min_workers": 5, "max_workers": 6}
    several = [heavy("a", **fields), heavy("b", submitted_s=1.0, **fields)]
    light = [several[0], view("b", submitted_s=1.0, **fields)]
    unseen = [several[0], heavy("b", submitted_s=1.0, observations={}, **fields)]
    assert [held_up(jobs) for jobs in (several, light, unseen)] == [True, False, False]
    crossed = {"a": {"n0": 4, "n1": 1}, "b": {"n1": 3, "n2": 2}}
    there = [dataclasses.replace(each, allocation=crossed[each.job]) for each in several]
    assert not shared(plan("goodput", there, cluster(4, 4, 4, 4), measured).allocation)
    tight = plan("goodput", there, cluster(4, 4, 4), measured).allocation
    assert set(tight) == {"a", "b"}, "neither is stopped for it"
    kept = [dataclasses.replace(each, allocation=crossed[each.job]) for each in light]
    assert plan("goodput", kept, cluster(4, 4, 4, 4), measured) == plan("goodput", kept, cluster(4, 4, 4, 4))


def test_jobs_kept_apart_by_measurement_do_not_swing() -> None:
    measured = Constraints(one_multi_node_job_per_node=None)
    times = dataclasses.replace(model().throughput_model, beta_n=0.2)
    growing = GoodputModel(times, NoiseScale(sqr=1.0, var=100.0), 64)
    six = Observation(2, 6, 512, 0, step_time=1.4, grad_time=0.532)  # 0.82 s between nodes; of 4 workers 0.42 s
    fields: dict[str, Any] = {"max_workers": 6, "goodput": growing, "observations": {"": (six,)}}
    jobs = [heavy("a", **fields), heavy("b", submitted_s=1.0, **fields)]
    seen = []
    for _ in range(5):
        found = plan("fixed", jobs, cluster(4, 4, 4), measured)
        seen.append((sizes(found), bool(shared(found.allocation))))
        jobs = carried_out(jobs, found)
    assert seen == [({"a": 6, "b": 4}, False)] * 5, "nothing but their own sizes would change"


class Crossed:
    """Names nodes so that every job spans all of them."""

    name = "crossed"

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        ids = [node.node_id for node in cluster.nodes]
        return {v.job: Target(workers=len(ids), reason="crossed", nodes=dict.fromkeys(ids, 1)) for v in jobs}


def test_a_policy_that_names_crossed_places_is_repaired() -> None:
    jobs = [view("a", min_workers=2), view("b", submitted_s=1.0), view("c", submitted_s=2.0)]
    found = make_plan(Crossed(), jobs, cluster(3, 3), 0.0, APART)
    assert not shared(found.allocation)
    assert sizes(found) == {"a": 2, "b": 2, "c": 2}
    assert make_plan(Crossed(), carried_out(jobs, found), cluster(3, 3), 0.0, APART).allocation == found.allocation


# Draining nodes, fractions, labels
# ------------------------------------------------------------------------------------------------------------------


@every
def test_all_jobs_leave_a_draining_node_in_one_decision(name: str) -> None:
    jobs = [
        view("a", max_workers=4, allocation={"n0": 3}),
        view("b", max_workers=4, allocation={"n0": 1, "n1": 2}, submitted_s=1.0),
    ]
    nodes = Cluster(nodes=(node("n0", 4, draining=True), node("n1", 4), node("n2", 4)))
    found = plan(name, jobs, nodes)
    assert sorted(found.allocation) == ["a", "b"]
    assert all("n0" not in place for place in found.allocation.values())
    firm = [dataclasses.replace(v, preemptible=False, priority=i, tenant=v.job) for i, v in enumerate(jobs)]
    assert all("n0" not in place for place in plan(name, firm, nodes, APART).allocation.values())


@every
def test_half_gpus_and_whole_ones_share_a_node(name: str) -> None:
    nodes = Cluster(nodes=tuple(dataclasses.replace(node(f"n{i}", 8), free={"CPU": 8, "GPU": 2}) for i in range(2)))
    half = view("half", bundle={"GPU": 0.5}, min_workers=3, max_workers=3)
    tenth = view("tenth", bundle={"GPU": 0.1}, min_workers=5, max_workers=5, submitted_s=1.0)
    whole = view("whole", bundle={"GPU": 1.0}, min_workers=2, max_workers=2, submitted_s=2.0)
    found = plan(name, [half, tenth, whole], nodes)
    assert sizes(found) == {"half": 3, "tenth": 5, "whole": 2}  # 1.5 + 0.5 + 2 = all of it
    assert plan(name, carried_out([half, tenth, whole], found), nodes).allocation == found.allocation


@every
@pytest.mark.parametrize(
    ("condition", "accepted"),
    [("T4", {"n0"}), ("!T4", {"n1", "n2", "n3"}), ("in(T4,A100)", {"n0", "n1"}), ("!in(T4, A100)", {"n2", "n3"})],
)
def test_job_runs_on_the_gpu_types_that_it_accepts(name: str, condition: str, accepted: set[str]) -> None:
    types: list[dict[str, str]] = [{"ray.io/accelerator-type": gpu} for gpu in ("T4", "A100", "H100")]
    nodes = Cluster(nodes=tuple(node(f"n{i}", 2, labels=labels) for i, labels in enumerate([*types, {}])))
    job = view("a", label_selector={"ray.io/accelerator-type": condition})
    place = plan(name, [job], nodes).allocation["a"]
    assert set(place) <= accepted


# Whole nodes
# ------------------------------------------------------------------------------------------------------------------


@every
def test_sizes_above_a_node_are_whole_nodes_if_contested(name: str) -> None:
    whole = view("whole", whole_nodes=True, min_workers=4, max_workers=7)
    other = view("other", max_workers=8, submitted_s=1.0)
    found = sizes(plan(name, [whole, other], cluster(4, 4)))
    if name != "greedy":  # the last one takes everything there
        assert found["whole"] == 4
        assert found["other"] == 4 or name in FRUGAL


@pytest.mark.parametrize("name", ["fifo", "fixed"])
def test_no_worker_is_idle_for_sake_of_whole_nodes(name: str) -> None:
    whole = view("whole", whole_nodes=True, min_workers=4, max_workers=7)
    assert sizes(plan(name, [whole], cluster(4, 4))) == {"whole": 7}
    small = view("other", max_workers=2, submitted_s=1.0)
    assert sizes(plan(name, [whole, small], cluster(4, 4))) == {"whole": 7, "other": 1}
    assert sizes(plan(name, [whole, dataclasses.replace(small, max_workers=4)], cluster(4, 4))) == {
        "whole": 4,
        "other": 4,
    }


def test_whole_node_is_largest_that_the_job_may_use() -> None:
    nodes = Cluster(
        nodes=(*cluster(2, 4).nodes, node("going", 16, draining=True), node("other", 8, labels={"gpu": "T4"}))
    )
    assert node_worth(view("a", label_selector={"gpu": "!T4"}), nodes) == 4
    assert node_worth(view("a"), nodes) == 8
    assert node_worth(view("a", bundle={"GPU": 1.0}), nodes) == 0


@every
def test_nobody_else_is_on_its_nodes_where_avoidable(name: str) -> None:
    whole = view("whole", whole_nodes=True, max_workers=2, allocation={"n0": 2})
    other = view("other", max_workers=2, submitted_s=1.0, allocation={"n0": 2})
    found = plan(name, [whole, other], cluster(4, 4))
    assert sizes(found) == {"whole": 2, "other": 2}
    assert not set(found.allocation["whole"]) & set(found.allocation["other"])
    full = plan(name, [whole, dataclasses.replace(other, max_workers=6)], cluster(4, 4))
    assert sum(sizes(full).values()) == 8 or name in FRUGAL  # never idle because of it
