"""What a job's weight, and a tenant's that its jobs bring, do to the allocation."""

from __future__ import annotations

import dataclasses

import pytest

from placement.allocator.significance import trigger_of
from placement.cluster.cluster import Cluster, Node
from placement.cluster.jobs import JobView
from placement.planning.constraints import Constraints
from placement.planning.plan import make_plan
from placement.planning.tenants import Tenant
from placement.policies import make_policy

# Those that compare jobs in whole numbers; sia knows powers of two, the others serve jobs in an order.
WEIGH = ("goodput", "pollux", "fair_share", "optimus", "throughput_efficiency")


def cluster(slots: int = 8) -> Cluster:
    return Cluster(nodes=(Node(node_id="n1", total={"CPU": slots}, free={"CPU": slots}),))


def job(name: str, **options: object) -> JobView:
    return JobView(**{"job": name, "bundle": {"CPU": 1}, "max_workers": 8, "most_workers": 8, **options})


def counts(policy: str, jobs: list[JobView], constraints: Constraints | None = None) -> dict[str, int]:
    plan = make_plan(make_policy(policy), jobs, cluster(), 100.0, constraints or Constraints())
    return {view.job: sum(plan.allocation.get(view.job, {}).values()) for view in jobs}


@pytest.mark.parametrize("policy", WEIGH)
def test_the_heavier_job_grows_where_one_of_two_can(policy: str) -> None:
    for heavy, light in (("a", "b"), ("b", "a")):
        found = counts(policy, [job(heavy, weight=4.0), job(light, weight=0.25)])
        assert found[heavy] > found[light] >= 1, found
        assert sum(found.values()) == 8


@pytest.mark.parametrize("heavy", ["a", "b", "c"])
def test_sia_gives_heavier_job_the_larger_power_of_two(heavy: str) -> None:
    found = counts("sia", [job(name, weight=4.0 if name == heavy else 0.25) for name in "abc"])
    assert found == {name: 4 if name == heavy else 2 for name in "abc"}


@pytest.mark.parametrize("policy", ["goodput", "fair_share"])
def test_shares_follow_weights(policy: str) -> None:
    assert counts(policy, [job("a", weight=3.0), job("b", weight=1.0)]) == {"a": 6, "b": 2}


@pytest.mark.parametrize("policy", WEIGH)
def test_a_survivor_takes_all_whatever_it_weighs(policy: str) -> None:
    assert counts(policy, [job("a", weight=0.25)]) == {"a": 8}


def test_a_tenant_has_the_weight_that_its_jobs_bring() -> None:
    sweep = [job(f"t{i}", tenant="sweep", tenant_weight=3.0) for i in range(2)]
    found = counts("goodput", [*sweep, job("other")])
    assert found["t0"] + found["t1"] == 6
    assert found["other"] == 2


def test_the_clusters_configuration_overrules_it() -> None:
    sweep = [job("t", tenant="sweep", tenant_weight=7.0)]
    named = Constraints(tenants=(Tenant(name="sweep", weight=1.0),))
    assert counts("goodput", [*sweep, job("other")], named) == {"t": 4, "other": 4}


def test_changed_weight_is_news_once_it_changes_by_tenth() -> None:
    before = job("a", weight=1.0)
    assert trigger_of(before, dataclasses.replace(before, weight=1.05)) is None
    assert trigger_of(before, dataclasses.replace(before, weight=1.5)) == "weight"
    assert trigger_of(before, dataclasses.replace(before, tenant_weight=2.0)) == "limits"


def test_being_stoppable_is_news_its_cost_is_not() -> None:
    before = job("a")
    stoppable = dataclasses.replace(before, stop_cost_s=5.0)
    assert trigger_of(before, stoppable) == trigger_of(stoppable, before) == "limits"
    assert trigger_of(stoppable, dataclasses.replace(before, stop_cost_s=9.0)) is None


def test_that_a_trial_may_grow_now_is_news() -> None:
    before = dataclasses.replace(job("a"), growth_limit=1)
    assert trigger_of(before, dataclasses.replace(before, growth_limit=None)) == "limits"
    assert trigger_of(before, dataclasses.replace(before, growth_limit=2)) is None


@pytest.mark.parametrize("name", ["weight", "tenant_weight"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_are_above_zero(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} of job 'a' must be above 0"):
        job("a", **{name: value})
