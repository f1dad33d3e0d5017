"""Sizes that jobs' own policies ask for: contract tests over the registry, with a user's own policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobHeartbeat, NodesChanged
from placement.allocator.significance import trigger_of
from placement.allocator.snapshot import Trigger
from placement.cluster.cluster import Cluster, check
from placement.cluster.jobs import JobView, goodputs, speeds
from placement.cluster.sizes import AllowedSizes
from placement.goodput.model import GoodputModel, NoiseScale, ThroughputModel
from placement.goodput.speeds import GoodputCache, table
from placement.planning.constraints import Constraints
from placement.planning.multi_node import shared
from placement.planning.plan import make_plan
from placement.planning.problem import Plan
from placement.planning.tenants import Tenant
from placement.planning.wishes import without_wish
from placement.policies import GoodputPolicy
from tests.placement.constrained import carried_out, clusters, constrained_views, every, policy, rules, sizes
from tests.placement.views import AT_ONCE, cluster, model, view

# Two workers are slower than one: no other policy has a use for them.
SLOW = GoodputModel(ThroughputModel(0.02, 1e-5, 5.0, 1.0, 5.0, 1.0, 1.5), NoiseScale(sqr=1.0, var=0.01), 64)


def alone(job: str, **fields: Any) -> JobView:
    """A job that trains fastest on one worker."""
    return view(job, goodput=SLOW, max_batch_size=64, atomic_bsz_range=(1, 64), **fields)


@st.composite
def wishing(draw: st.DrawFn) -> list[JobView]:
    jobs = []
    for each in draw(constrained_views(bundles=(1.0, 2.0))):
        held = draw(st.none() | st.integers(each.min_workers, each.max_workers))
        wished = draw(st.none() | st.integers(1, each.max_workers))
        jobs.append(dataclasses.replace(each, wished=wished, held_at=held))
    return jobs


def without(jobs: Sequence[JobView]) -> list[JobView]:
    return [dataclasses.replace(each, wished=None) for each in jobs]


@pytest.mark.matrix(every=1)
@every
@settings(max_examples=8, deadline=None)
@given(jobs=wishing(), nodes=clusters, cluster_rules=rules, late=wishing())
def test_wish_takes_from_nobody_and_equal_input_changes_nothing(
    name: str, jobs: list[JobView], nodes: Cluster, cluster_rules: Constraints, late: list[JobView]
) -> None:
    one = policy(name)
    plain = make_plan(one, without(jobs), nodes, 0.0, cluster_rules)
    found = make_plan(one, jobs, nodes, 0.0, cluster_rules)
    _check(jobs, nodes, cluster_rules, plain, found)
    assert _again(one, jobs, nodes, cluster_rules, found).allocation == found.allocation
    # Newcomers get what they would if nothing had been granted.
    new = [dataclasses.replace(each, job=f"new-{each.job}", submitted_s=9.0) for each in late]
    here, there = [*carried_out(jobs, found), *new], [*without(carried_out(jobs, plain)), *without(new)]
    later = make_plan(one, here, nodes, 0.0, cluster_rules, found.guaranteed, found.granted)
    plain_later = make_plan(one, there, nodes, 0.0, cluster_rules, plain.guaranteed)
    _check(here, nodes, cluster_rules, plain_later, later)


def _again(one: Any, jobs: Sequence[JobView], nodes: Cluster, cluster_rules: Constraints, found: Plan) -> Plan:
    return make_plan(one, carried_out(jobs, found), nodes, 0.0, cluster_rules, found.guaranteed, found.granted)


def _check(jobs: Sequence[JobView], nodes: Cluster, cluster_rules: Constraints, plain: Plan, found: Plan) -> None:
    """Every job has what it has without wishes, and those that ask no more than that or what they ask for."""
    check(found.allocation, {each.job: each.bundle for each in jobs}, nodes)
    assert set(found.reasons) == {each.job for each in jobs}
    for each in jobs:
        own, has = sizes(plain).get(each.job, 0), sizes(found).get(each.job, 0)
        if each.wished is None or each.held_at is not None or not own:
            assert has == own
        assert own <= has <= max(own, each.wished or 0, each.min_workers)
        assert ("its policy asked for" in found.reasons[each.job].words) == (
            bool(own) and each.held_at is None and each.wished is not None and own < each.wished_workers
        )
    if cluster_rules.one_multi_node_job_per_node:
        assert not shared(found.allocation)
    for tenant in cluster_rules.tenants:
        mine = [each for each in jobs if each.tenant == tenant.name]
        used = sum(each.bundle["CPU"] * sizes(found).get(each.job, 0) for each in mine)
        before = sum(each.bundle["CPU"] * sizes(plain).get(each.job, 0) for each in mine)
        assert used <= max(tenant.quota.get("CPU", 99.0), before)


@every
def test_free_slots_are_granted_kept_and_given_back(name: str) -> None:
    """Held by its user at one worker it has one; otherwise what nobody else needs, as long as nobody does."""
    one, nodes = policy(name), cluster(4)
    job = alone("a", max_workers=3, wished=3)
    if sizes(make_plan(one, without([job]), nodes, 0.0)) == {"a": 3}:
        pytest.skip(f"{name} gives a job all that is free anyway")
    found = make_plan(one, [job], nodes, 0.0)
    assert sizes(found) == {"a": 3} and "its policy asked for 3 workers, " in found.reasons["a"].words
    assert sizes(make_plan(one, [dataclasses.replace(job, held_at=1)], nodes, 0.0)) == {"a": 1}
    kept = _again(one, [job], nodes, Constraints(), found)
    assert kept.allocation == found.allocation and kept.granted == found.granted
    other = view("b", submitted_s=1.0, max_workers=3, min_workers=3)
    now = [*carried_out([job], found), other]
    both = make_plan(one, now, nodes, 0.0, granted=found.granted)
    assert sizes(both) == {"a": 1, "b": 3} and "its policy asked for 3 workers, of which 1" in both.reasons["a"].words
    gone = make_plan(one, carried_out([job], both), nodes, 0.0, granted=both.granted)
    assert sizes(gone) == {"a": 3}
    withdrawn = [dataclasses.replace(each, wished=None) for each in carried_out([job], gone)]
    assert sizes(make_plan(one, withdrawn, nodes, 0.0, granted=gone.granted)) == {"a": 1}


def test_grants_keep_quotas_priorities_and_multi_node_rules() -> None:
    quota = Constraints(tenants=(Tenant(name="t", quota={"CPU": 2}),))
    job = alone("a", wished=4, tenant="t")
    assert sizes(make_plan(GoodputPolicy(), [job], cluster(4), 0.0, quota)) == {"a": 2}
    first, urgent = alone("a", wished=3), alone("b", wished=3, priority=1, submitted_s=1.0)
    assert sizes(make_plan(GoodputPolicy(), [first, urgent], cluster(4), 0.0)) == {"a": 1, "b": 3}
    wide = view("wide", min_workers=3, max_workers=3, allocation={"n0": 2, "n1": 1})
    beside = alone("a", wished=4, allocation={"n1": 1}, submitted_s=1.0)
    nodes = cluster(2, 3, 2)
    assert make_plan(GoodputPolicy(), [wide, beside], nodes, 0.0).allocation["a"] == {"n1": 2, "n2": 2}
    apart = Constraints(one_multi_node_job_per_node=True)
    assert make_plan(GoodputPolicy(), [wide, beside], nodes, 0.0, apart).allocation["a"] == {"n1": 2}


class Sticky:
    """A user's own policy: a job keeps what it has, and newcomers have what is left."""

    name = "sticky"

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> dict[str, int]:
        left = sum(int(each.free["CPU"]) for each in cluster.nodes) - sum(job.workers for job in jobs)
        targets = {}
        for job in sorted(jobs, key=lambda job: job.arrival):
            targets[job.job] = job.workers or min(job.min_workers if job.job == "a" else job.max_workers, left)
            left -= 0 if job.workers else targets[job.job]
        return targets


def test_what_was_granted_is_not_the_jobs_own() -> None:
    job, nodes = view("a", wished=3), cluster(4)
    found = make_plan(Sticky(), [job], nodes, 0.0)
    assert sizes(found) == {"a": 3}
    now = [*carried_out([job], found), view("b", submitted_s=1.0, max_workers=2)]
    assert sizes(make_plan(Sticky(), now, nodes, 0.0, granted=found.granted)) == {"a": 2, "b": 2}
    assert sizes(make_plan(Sticky(), now, nodes, 0.0)) == {"a": 3, "b": 1}, "an allocator that was started anew"


def test_grants_on_nodes_that_a_job_left_take_nothing() -> None:
    job = view("a", min_workers=2, allocation={"n0": 2, "n1": 2}, wished=5)
    assert without_wish(job, {"n9": 1}).allocation == job.allocation
    assert without_wish(job, {"n9": 1, "n1": 3}).allocation == {"n0": 2}
    assert without_wish(job, {"n0": 1, "n1": 2}).allocation == {"n0": 1, "n1": 1}, "never below its minimum"


def test_granted_workers_stay_on_one_type_off_whole_nodes() -> None:
    nodes = Cluster(
        nodes=tuple(
            dataclasses.replace(each, labels={"ray.io/accelerator-type": gpu})
            for each, gpu in zip(cluster(1, 2, 2).nodes, ("T4", "A100", "T4"), strict=True)
        )
    )
    job = alone("a", max_workers=5, wished=5, allocation={"n0": 1})
    found = make_plan(GoodputPolicy(), [job], nodes, 0.0)
    assert found.allocation == {"a": {"n0": 1, "n2": 2}}
    shy = alone("shy", whole_nodes=True, allocation={"n1": 1}, submitted_s=1.0)
    found = make_plan(GoodputPolicy(), [alone("a", wished=5, allocation={"n0": 1}), shy], cluster(1, 4), 0.0)
    assert found.allocation == {"a": {"n0": 1}, "shy": {"n1": 1}}


def test_the_core_decides_at_once_on_a_changed_wish() -> None:
    core = AllocatorCore(GoodputPolicy(), AT_ONCE)
    job = alone("a", max_workers=3)
    core.handle(NodesChanged(cluster=cluster(4)), 0.0)
    core.handle(JobHeartbeat(view=job), 0.0)
    here = dataclasses.replace(job, allocation=core.snapshot().jobs["a"].target)
    core.handle(JobHeartbeat(view=here), 0.1)
    assert trigger_of(here, dataclasses.replace(here, wished=3)) is Trigger.LIMITS
    (grown,) = core.handle(JobHeartbeat(view=dataclasses.replace(here, wished=3)), 0.2)
    assert sum(grown.nodes.values()) == 3 and "its policy asked for" in grown.reason.words
    there = dataclasses.replace(here, wished=3, allocation=grown.nodes)
    assert core.handle(JobHeartbeat(view=there), 0.3) == []
    assert "its policy asked for" in str(core.explain("a"))
    core.handle(JobHeartbeat(view=view("b", submitted_s=1.0, min_workers=3, max_workers=3)), 0.4)
    targets = {name: sum(state.target.values()) for name, state in core.snapshot().jobs.items()}
    assert targets == {"a": 1, "b": 3}


def test_a_wish_lies_within_the_limits() -> None:
    with pytest.raises(ValueError, match=r"wished of job 'a' must lie between 1 and max_workers \(3\), but got 4"):
        view("a", max_workers=3, wished=4)


# A batch that a policy of the job's own holds
# ------------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(batch=st.integers(32, 4096), noise=st.sampled_from([0.1, 10.0, 1000.0]), sync_s=st.sampled_from([0.001, 0.1]))
def test_goodput_is_that_of_held_batch_where_it_fits(batch: int, noise: float, sync_s: float) -> None:
    job = view("a", goodput=model(noise, sync_s), held_batch=batch)
    truth, free = job.goodput, goodputs(dataclasses.replace(job, held_batch=None), [8])
    assert truth is not None
    found = goodputs(job, [8])
    for k in range(1, 9):
        share = -(-batch // k)
        micro = -(-share // 512)
        seconds = float(truth.step_time(1, k, -(-share // micro), micro - 1))
        fits = -(-share // micro) >= 8
        expected = batch / seconds * float(truth.efficiency(batch)) if fits else free[k - 1]
        assert found[k - 1] == pytest.approx(expected, rel=1e-6)
    nodes, workers = np.ones((1, 8), dtype=np.int64), np.arange(1, 9, dtype=np.int64)[np.newaxis]
    # The table does not round a worker's share up to whole samples.
    np.testing.assert_allclose(table([job], "", nodes, workers, GoodputCache())[0], found, rtol=0.1)


def test_a_small_held_batch_is_worth_fewer_workers() -> None:
    job = view("a", goodput=model(noise=1e5, beta_c=1e-2))
    free, held = (speeds(each, [8]) for each in (job, dataclasses.replace(job, held_batch=64)))
    assert free[8] > held[8]
    assert trigger_of(job, dataclasses.replace(job, held_batch=64)) is Trigger.MODEL


def test_what_makes_no_allowed_size_returns_from_one_node() -> None:
    job = alone("a", max_workers=8, wished=8, sizes=AllowedSizes(sizes=(2, 4, 8)), min_workers=2, allocation={"n0": 2})
    found = make_plan(GoodputPolicy(), [job], cluster(3, 2), 0.0)
    assert found.allocation == {"a": {"n0": 3, "n1": 1}} and found.granted == {"a": {"n0": 1, "n1": 1}}
