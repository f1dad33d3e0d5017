"""The promises that every registered policy keeps, and what is special about each."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, speeds
from placement.cluster.packing import FreeResources
from placement.goodput.model import GoodputModel, NoiseScale, ThroughputModel
from placement.planning.plan import check_targets, make_plan
from placement.policies import POLICIES, FixedPolicy, GoodputPolicy, Policy, make_policy
from placement.policies.goodput.dual_prices import GAP
from tests.placement.views import cluster, model, node, view


@st.composite
def job_views(draw: st.DrawFn, sizes: tuple[float, ...] = (1.0,)) -> list[JobView]:
    views = []
    for i in range(draw(st.integers(0, 6))):
        least = draw(st.integers(1, 3))
        most = draw(st.integers(least, 8))
        views.append(
            view(
                f"j{i}",
                bundle={"CPU": draw(st.sampled_from(sizes))},
                min_workers=least,
                max_workers=most,
                submitted_s=float(draw(st.integers(0, 3))),
                held_at=draw(st.none() | st.integers(least, most)),
                goodput=draw(st.sampled_from([None, model(), model(noise=1.0), model(sync_s=0.5)])),
                most_workers=draw(st.integers(0, 4)),
                resize_cost_s=draw(st.sampled_from([0.0, 0.2, 10.0])),
            )
        )
    return views


clusters = st.lists(st.integers(0, 6), min_size=1, max_size=4).map(lambda cpus: cluster(*cpus))
contract = pytest.mark.parametrize("name", sorted(POLICIES))


def carried_out(policy: Policy, views: list[JobView], nodes: Cluster) -> list[JobView]:
    plan = make_plan(policy, views, nodes, 0.0)
    return [dataclasses.replace(v, allocation=plan.allocation.get(v.job, {})) for v in views]


@pytest.mark.matrix(every=1)
@contract
@settings(max_examples=60, deadline=None)
@given(views=job_views(sizes=(1.0, 0.5, 2.0)), nodes=clusters)
def test_targets_keep_the_rules(name: str, views: list[JobView], nodes: Cluster) -> None:
    targets = make_policy(name).decide(views, nodes, 0.0)
    check_targets(targets, views, nodes)
    assert all(str(target.reason) for target in targets.values())
    for v in views:
        if v.held_at is not None:
            assert targets[v.job].workers <= v.held_at


@pytest.mark.matrix(every=1)
@contract
@settings(max_examples=60, deadline=None)
@given(views=job_views(), nodes=clusters, seed=st.randoms(use_true_random=False))
def test_the_order_of_the_jobs_does_not_matter(name: str, views: list[JobView], nodes: Cluster, seed) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(views)
    seed.shuffle(shuffled)
    policy = make_policy(name)
    assert policy.decide(views, nodes, 0.0) == policy.decide(shuffled, nodes, 0.0)


@pytest.mark.matrix(every=1)
@contract
@settings(max_examples=80, deadline=None)
@given(views=job_views(sizes=(1.0, 2.0)), nodes=clusters, newcomer=job_views())
def test_equal_input_changes_nothing(name: str, views: list[JobView], nodes: Cluster, newcomer: list[JobView]) -> None:
    policy = make_policy(name)
    first = carried_out(policy, views, nodes)
    more = first + [dataclasses.replace(v, job=f"new-{v.job}", submitted_s=9.0) for v in newcomer]
    once = carried_out(policy, more, nodes)
    assert carried_out(policy, once, nodes) == once


@contract
@settings(max_examples=60, deadline=None)
@given(views=job_views(), nodes=clusters)
def test_nothing_is_idle_that_a_job_could_use(name: str, views: list[JobView], nodes: Cluster) -> None:
    policy = make_policy(name)
    if getattr(policy, "frugal", False):
        pytest.skip(f"{name} leaves idle what is not worth its price")
    targets = policy.decide(views, nodes, 0.0)
    room = FreeResources(nodes)
    assert all(room.add(v, targets[v.job].workers) for v in views)
    for v in views:
        left, has = int(room.slots(v).sum()), targets[v.job].workers
        if has == 0:
            assert left < v.min_workers
        elif v.held_at is not None:
            assert left == 0 or has == v.held_at
        else:
            speed = speeds(v, FreeResources(nodes).slots(v).tolist())
            # A single worker more must not gain anything, beyond what its own resize costs within a minute, and, with
            # goodput, what dual prices may leave where a small case is not solved exactly.
            left_over = GAP if name == "goodput" else 0.0
            gain = speed[has + 1] / speed[has] if has + 1 < len(speed) and left else 1.0
            assert gain < 1.0 + 2 * (v.resize_cost_s / 60 + 1e-6) + left_over


@contract
@pytest.mark.parametrize("present", [1, 2, 8])
@pytest.mark.parametrize("held", [1, 2, 3, 5, 8])
def test_a_job_is_brought_to_where_it_is_held(name: str, present: int, held: int) -> None:
    """Five workers share a fixed batch of 24 badly; the user knows."""
    slow = GoodputModel(ThroughputModel(0.0, 0.0044, 0.002, 0.002, 0.002, 0.002, 1.0), NoiseScale(90.0, 500.0), 24)
    limits = {"init_batch_size": 24, "max_batch_size": None, "atomic_bsz_range": None}
    job = view("a", max_workers=8, held_at=held, goodput=slow, allocation={"n0": present}, most_workers=8, **limits)
    assert make_policy(name).decide([job], cluster(8), 0.0)["a"].workers == held


@contract
def test_waiting_job_gets_its_minimum_from_those_above_theirs(name: str) -> None:
    nodes = cluster(4, 4)
    running = view("old", min_workers=2, allocation={"n0": 4, "n1": 4})
    targets = make_policy(name).decide([running, view("new", min_workers=3, submitted_s=1.0)], nodes, 0.0)
    assert targets["new"].workers >= 3
    assert targets["old"].workers >= 2


@contract
def test_a_running_job_is_not_evicted_by_a_waiter(name: str) -> None:
    running = view("late", submitted_s=5.0, allocation={"n0": 1})
    targets = make_policy(name).decide([view("early", min_workers=4), running], cluster(4), 0.0)
    assert targets["early"].workers == 0
    assert "waits: needs at least 4 x 1 CPU" in str(targets["early"].reason)
    assert targets["late"].workers == 4 or name == "goodput"


@contract
def test_held_jobs_get_exactly_that(name: str) -> None:
    targets = make_policy(name).decide([view("a", held_at=3), view("b", submitted_s=1.0)], cluster(8), 0.0)
    assert targets["a"].workers == 3
    assert targets["b"].workers == 5


@contract
def test_draining_nodes_offer_nothing(name: str) -> None:
    nodes = Cluster(nodes=(node("n0", 4, draining=True), node("n1", 2)))
    running = view("a", allocation={"n0": 4})
    assert make_policy(name).decide([running], nodes, 0.0)["a"].workers == 2


@contract
@pytest.mark.parametrize("has", [(1, 1), (2, 1), (1, 2)])
def test_jobs_that_hold_too_much_get_what_is_left(name: str, has: tuple[int, int]) -> None:
    """Another user of the node took two of its three CPUs."""
    views = [view(f"j{i}", max_workers=n, allocation={"n0": n}, resize_cost_s=0.0) for i, n in enumerate(has)]
    nodes = Cluster(nodes=(node("n0", 3, free=1),))
    assert sum(sum(v.allocation.values()) for v in carried_out(make_policy(name), views, nodes)) == 1


def test_goodput_shares_equally_between_equals() -> None:
    views = [view(job, submitted_s=float(i)) for i, job in enumerate("abcd")]
    targets = GoodputPolicy().decide(views, cluster(4, 4), 0.0)
    assert [targets[v.job].workers for v in views] == [2, 2, 2, 2]


def test_goodput_gives_more_to_the_job_that_scales() -> None:
    scales, does_not = view("a", goodput=model(noise=1e4)), view("b", goodput=model(noise=0.1, sync_s=0.05))
    targets = GoodputPolicy().decide([scales, does_not], cluster(8), 0.0)
    assert targets["a"].workers > targets["b"].workers >= 1
    assert "one more would add" in targets["b"].reason.explained


def test_goodput_explores_by_doubling_before_there_is_a_model() -> None:
    nodes = cluster(8)
    fresh = view("a", goodput=None)
    assert GoodputPolicy().decide([fresh], nodes, 0.0)["a"].workers == 2
    ran = dataclasses.replace(fresh, most_workers=2, allocation={"n0": 2})
    assert GoodputPolicy().decide([ran], nodes, 0.0)["a"].workers == 4


def test_goodput_leaves_alone_what_does_not_pay_back() -> None:
    # Twice the speed for the next 300 s (the horizon) is not worth 2000 s of standing still.
    job = view("a", allocation={"n0": 4}, resize_cost_s=2000.0)
    assert GoodputPolicy().decide([job], cluster(8), 0.0)["a"].workers == 4
    # A size that has lasted for hours will last for some more: now it is.
    assert GoodputPolicy().decide([job], cluster(8), 20_000.0)["a"].workers == 8
    assert GoodputPolicy().decide([dataclasses.replace(job, restarts=40)], cluster(8), 20_000.0)["a"].workers == 4
    cheap = dataclasses.replace(job, resize_cost_s=0.2)
    assert GoodputPolicy().decide([cheap], cluster(8), 0.0)["a"].workers == 8


def test_goodput_does_not_grow_job_that_communication_slows_down() -> None:
    slow = view("a", goodput=model(noise=0.01, sync_s=5.0))
    assert GoodputPolicy().decide([slow], cluster(8), 0.0)["a"].workers == 1


def test_batch_limits_cap_the_workers() -> None:
    assert view("a", max_batch_size=64, atomic_bsz_range=(16, 64)).useful_workers == 4
    assert view("a", max_batch_size=None, init_batch_size=3, atomic_bsz_range=None).useful_workers == 3


def test_fixed_serves_the_first_first() -> None:
    views = [view("a", submitted_s=0.0), view("b", submitted_s=1.0)]
    targets = FixedPolicy(workers=3).decide(views, cluster(4), 0.0)
    assert (targets["a"].workers, targets["b"].workers) == (3, 1)


def test_unknown_policies_are_named_with_what_would_be_valid() -> None:
    with pytest.raises(ValueError, match="policy must be one of boa, fair_share, fifo, fixed, goodput"):
        make_policy("polux")
    with pytest.raises(TypeError, match="decide"):
        make_policy(42)
