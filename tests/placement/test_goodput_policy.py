"""What is special about the default policy: lengths, measured points, GPU types, idle clusters, changes that pay."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, Progress, speeds
from placement.goodput.fitting import Observation
from placement.goodput.remaining import remaining
from placement.goodput.speeds import GoodputCache
from placement.planning.plan import make_plan
from placement.policies import GoodputPolicy
from placement.policies.goodput.tables import SpeedValue, build, size_grid
from placement.simulator.nodes.clusters import parse_cluster
from tests.placement.views import model, view


def gpu_view(job: str, **kwargs: object) -> JobView:
    return view(job, **{"bundle": {"GPU": 1.0}, "max_workers": 16, **kwargs})


def length(epochs: float, done: float = 10.0) -> Progress:
    return Progress(done=done, epoch_ends=(done,), epochs=epochs)


def sizes(views: list[JobView], nodes: Cluster, policy: GoodputPolicy | None = None) -> dict[str, int]:
    targets = (policy or GoodputPolicy()).decide(views, nodes, 100.0)
    return {job: target.workers for job, target in targets.items()}


def test_the_first_decision_uses_all_within_one_per_cent() -> None:
    nodes = parse_cluster("aws:16x4")
    views = [gpu_view(f"j{i:02d}", goodput=model(noise=10.0 + 40 * i, sync_s=0.002 * (i % 7))) for i in range(32)]
    chosen = sizes(views, nodes, GoodputPolicy(fair_power=1.0))
    assert sum(chosen.values()) == 64
    curves = np.array([speeds(v, [4] * 16)[1:17] for v in views])
    jobs, options = curves.shape
    one = np.kron(np.eye(jobs), np.ones(options))
    use = np.tile(np.arange(1, options + 1.0), jobs)[np.newaxis]
    constraints = [LinearConstraint(one, 1, 1), LinearConstraint(use, 0, 64)]
    exact = milp(-curves.ravel(), constraints=constraints, integrality=np.ones(curves.size), bounds=Bounds(0, 1))
    reached = sum(curves[i, chosen[v.job] - 1] for i, v in enumerate(views))
    assert reached >= 0.99 * -exact.fun


def test_the_default_also_uses_all_of_it() -> None:
    views = [gpu_view(f"j{i:02d}") for i in range(32)]
    assert sum(sizes(views, parse_cluster("aws:16x4")).values()) == 64


def test_the_job_with_less_left_gets_more() -> None:
    views = [gpu_view("short", progress=length(3)), gpu_view("long", progress=length(300))]
    chosen = sizes(views, parse_cluster("aws:4x4"))
    assert chosen["short"] > chosen["long"] >= 1
    blind = sizes(views, parse_cluster("aws:4x4"), GoodputPolicy(lengths=False))
    assert blind["short"] == blind["long"]


def test_one_job_without_length_is_neither_favoured_nor_delayed() -> None:
    views = [gpu_view(job, progress=length(epochs)) for job, epochs in (("a", 3), ("b", 30))]
    views.append(gpu_view("c", progress=Progress(done=10.0, epoch_ends=(10.0,))))
    chosen = sizes(views, parse_cluster("aws:6x4"))
    assert chosen["a"] >= chosen["c"] >= chosen["b"]
    assert chosen["a"] > chosen["b"]


def test_one_job_of_new_model_does_not_even_shares() -> None:
    """With each known length p rises from ``fair_power`` to ``power``; what cannot be known counts as the mean."""
    short, long = (gpu_view(job, progress=length(epochs)) for job, epochs in (("short", 3), ("long", 300)))
    new = gpu_view("new", progress=Progress(done=10.0, epoch_ends=(10.0,)))
    nodes, policy = parse_cluster("aws:4x4"), GoodputPolicy(crowd=3 / 16)

    def power(*views: JobView) -> float:
        return policy.utility(build(views, nodes, GoodputCache()), 100.0).power

    assert power(new) == 0.0 and power(short, long, long) == 0.5
    assert power(short, long, new) == pytest.approx(0.5 * 2 / 3) and power(short, new, new) == pytest.approx(0.5 / 3)
    chosen = sizes([short, long, new], nodes)
    assert chosen["short"] > chosen["new"] >= chosen["long"]


def test_a_new_models_job_that_waited_long_comes_first() -> None:
    """It is late by what it is taken to have left, as others are by their own lengths."""
    views = [gpu_view(f"j{i}", progress=length(3), submitted_s=1e6) for i in range(8)]
    views.append(gpu_view("new", progress=Progress(done=1.0, epoch_ends=(1.0,)), submitted_s=0.0))
    targets = GoodputPolicy().decide(views, parse_cluster("aws:1x4"), 1e6)
    assert targets["new"].workers > 0


def test_job_yet_to_tell_its_length_starts_no_waiter() -> None:
    """Live jobs tell it when they train. Until then all lengths counted for nothing, and everybody got a minimum."""
    nodes = parse_cluster("aws:1x4")
    epochs = {"longest": 300, "long": 200, "c": 6, "b": 4, "a": 3}  # in the order of their arrival
    views = [
        gpu_view(job, progress=length(each), stop_cost_s=5.0, submitted_s=float(i))
        for i, (job, each) in enumerate(epochs.items())
    ]
    targets = GoodputPolicy().decide(views, nodes, 100.0)
    running = [view.placed(targets[view.job].nodes or {}) for view in views]
    before = {view.job: view.workers for view in running}
    assert before["longest"] == 0 and sum(before.values()) == 4
    newcomer = gpu_view("new", goodput=None, submitted_s=100.0)
    assert newcomer.progress is None
    after = sizes([*running, newcomer], nodes)
    assert {job: after[job] for job in before} == before, "as long as the others on average, it comes after the short"


def test_the_last_long_jobs_share_the_best_type() -> None:
    """One on all of it and the other on slow GPUs would end one after the other, the last one alone."""
    slow, fast = model(noise=1e4, sync_s=0.05, beta_c=1e-2), model(noise=1e4, sync_s=0.05, beta_c=2e-3)
    types = {"aws": slow, "dgx": fast}
    views = [
        gpu_view(job, goodput=slow, models=types, progress=length(epochs))
        for job, epochs in (("sooner", 300), ("later", 330))
    ]
    targets = GoodputPolicy().decide(views, parse_cluster("aws:4x4,dgx:2x8"), 100.0)
    assert {node.split("-")[0] for target in targets.values() for node in target.nodes or {}} == {"dgx"}
    assert targets["sooner"].workers == targets["later"].workers == 8


def test_what_a_pause_takes_counts_more_than_rank() -> None:
    """Its GPUs stand still meanwhile, whosever they are; a job that weighs more is charged its own weight."""
    value = SpeedValue(
        weight=np.array([0.1, 0.8]),
        left_s=np.array([1e6, 1e6]),
        cost_s=np.array([300.0, 300.0]),
        stop_s=np.zeros(2),
        power=1.0,
        horizon_s=np.array([300.0, 300.0]),
        hysteresis=0.0,
        charge=0.5,
        crowded=False,
    )
    no, yes = np.zeros((2, 1), dtype=np.bool_), np.ones((2, 1), dtype=np.bool_)
    lost = value.values(np.full((2, 1), 4.0), no, yes) - value.values(np.full((2, 1), 4.0), no, no)
    assert lost[:, 0].tolist() == pytest.approx([0.5 * 2.0, 0.8 * 2.0])  # half of the horizon is lost, a speed of 2


@pytest.mark.parametrize(("pause_s", "workers"), [(150.0, 2), (250.0, 1)])
def test_a_long_job_grows_onto_otherwise_useless_gpus(pause_s: float, workers: int) -> None:
    """Its pause, charged as if others wanted its GPUs, would outweigh what it gains for as long as short jobs run."""
    nodes = parse_cluster("aws:2x4")
    full = [
        gpu_view(f"short{i}", allocation={"aws-001": 1}, max_workers=1, progress=length(3), submitted_s=1.0)
        for i in range(4)
    ]
    long = gpu_view(
        "long", allocation={"aws-000": 1}, growth_limit=2, progress=length(3000), resize_cost_s=pause_s, restarts=9
    )
    assert sizes([long, *full], nodes)["long"] == workers
    wanted = dataclasses.replace(full[0], job="new", allocation={}, max_workers=3)
    assert sizes([long, *full, wanted], nodes) | {"long": 1, "new": 3} == sizes([long, *full, wanted], nodes)


def test_where_types_differ_a_pause_also_charges_idle_gpus() -> None:
    """With several types jobs took longer otherwise: see docs/lab/allocation.md."""
    full = [
        gpu_view(f"short{i}", allocation={"aws-001": 1}, max_workers=1, progress=length(3), submitted_s=1.0)
        for i in range(4)
    ]
    long = gpu_view(
        "long", allocation={"aws-000": 1}, growth_limit=2, progress=length(3000), resize_cost_s=150.0, restarts=9
    )
    one = sizes([long, *full], parse_cluster("aws:2x4"))
    several = sizes([long, *full], parse_cluster("aws:2x4,rtx:1x8"))
    assert (one["long"], several["long"]) == (2, 1)


def test_a_job_takes_scattered_idle_gpus_over_moving_others() -> None:
    nodes = parse_cluster("aws:3x4")
    long = gpu_view("long", allocation={"aws-000": 2, "aws-001": 4}, growth_limit=8, progress=length(3000))
    small = [
        gpu_view(job, allocation={node: 2}, max_workers=2, progress=length(3), submitted_s=1.0)
        for job, node in (("a", "aws-000"), ("b", "aws-002"))
    ]
    views = [dataclasses.replace(each, resize_cost_s=40.0, restarts=9) for each in (long, *small)]
    targets = GoodputPolicy().decide(views, nodes, 100.0)
    assert {job: dict(target.nodes or {}) for job, target in targets.items()} == {
        "long": {"aws-000": 2, "aws-001": 4, "aws-002": 2},
        "a": {"aws-000": 2},
        "b": {"aws-002": 2},
    }


def test_a_late_job_is_no_longer_put_off() -> None:
    views = [gpu_view("short", progress=length(3)), gpu_view("long", progress=length(300))]
    soon = GoodputPolicy().decide(views, parse_cluster("aws:4x4"), 1.0)
    later = GoodputPolicy().decide(views, parse_cluster("aws:4x4"), 1e6)
    assert "its weight is 0.50" in soon["long"].reason.explained
    assert "its weight is 0.50" not in later["long"].reason.explained


def test_measured_points_are_trusted_before_the_model() -> None:
    """yolov3 is slower on two nodes than on one, which a fitted model smooths away."""
    nodes = parse_cluster("aws:2x4")
    base = gpu_view("a", max_workers=8)
    assert base.goodput is not None
    assert sizes([base], nodes) == {"a": 8}
    slow = [
        Observation(2, k, m, 0, 5 * float(base.goodput.step_time(2, k, m, 0)))
        for k in (5, 6, 7, 8)
        for m in (64, 128, 256)
    ]
    measured = dataclasses.replace(base, observations={"aws": tuple(slow)}, models={"aws": base.goodput})
    assert sizes([measured], nodes) == {"a": 4}


@settings(max_examples=60, deadline=None)
@given(
    others=st.lists(st.sampled_from([0.002, 0.01, 0.05]), min_size=1, max_size=3),
    exact=st.sets(st.sampled_from([1, 2, 3, 4, 8, 12, 16])),
    ratio=st.floats(0.3, 0.95),
)
def test_measured_faster_than_modelled_never_shrinks_a_job(others: list[float], exact: set[int], ratio: float) -> None:
    nodes = parse_cluster("aws:4x4")
    views = [gpu_view("a")] + [gpu_view(f"b{i}", goodput=model(sync_s=sync_s)) for i, sync_s in enumerate(others)]
    job, *rest = carried_out(views, nodes)
    assert job.goodput is not None
    here = len(job.allocation), job.workers
    seen = [
        Observation(n, k, m, 0, (ratio if (n, k) == here else 1.0) * float(job.goodput.step_time(n, k, m, 0)))
        for n, k in sorted({here} | {(-(-k // 4), k) for k in exact})
        for m in (64, 128)
    ]
    faster = dataclasses.replace(job, observations={"aws": tuple(seen)}, models={"aws": job.goodput})
    assert sizes([faster, *rest], nodes)["a"] >= job.workers


def test_shape_next_to_a_faster_one_looks_no_slower() -> None:
    """Corrected at four workers alone, a job of three times the modelled speed would lose by growing to eight."""
    nodes = parse_cluster("aws:2x4")
    base = gpu_view("a", max_workers=8, allocation={"aws-000": 4})
    assert base.goodput is not None
    seen = tuple(Observation(1, 4, m, 0, float(base.goodput.step_time(1, 4, m, 0)) / 3) for m in (64, 128, 256, 512))
    measured = dataclasses.replace(base, observations={"aws": seen}, models={"aws": base.goodput})
    assert sizes([measured], nodes) == sizes([base], nodes) == {"a": 8}


def test_job_is_on_one_gpu_type_alone_the_fastest() -> None:
    nodes = parse_cluster("aws:1x4,rtx:1x4")
    fast, slow = model(), model(beta_c=1e-2)
    job = gpu_view("a", goodput=slow, models={"aws": slow, "rtx": fast}, max_workers=8)
    nodes_of = GoodputPolicy().decide([job], nodes, 0.0)["a"].nodes
    assert nodes_of is not None
    assert {node.split("-")[0] for node in nodes_of} == {"rtx"}


def test_growth_stops_where_exploration_does() -> None:
    assert sizes([gpu_view("a", growth_limit=2)], parse_cluster("aws:2x4")) == {"a": 2}


def test_a_resize_that_never_pays_off_is_not_made() -> None:
    nodes = parse_cluster("aws:2x4")
    job = gpu_view("a", allocation={"aws-000": 4}, progress=Progress(done=100.0, epoch_ends=(100.0,), epochs=1.5))
    almost = dataclasses.replace(job, progress=Progress(done=149.9, epoch_ends=(100.0,), epochs=1.5))
    cost = {"resize_cost_s": 20.0}
    assert sizes([dataclasses.replace(job, resize_cost_s=0.2)], nodes) == {"a": 8}
    assert sizes([dataclasses.replace(almost, **cost)], nodes) == {"a": 4}


@st.composite
def mixed(draw: st.DrawFn) -> list[JobView]:
    views = []
    for i in range(draw(st.integers(1, 7))):
        epochs = draw(st.none() | st.floats(2.0, 500.0))
        types = {"aws": model(beta_c=2e-3), "rtx": model(sync_s=draw(st.sampled_from([0.01, 0.3])))}
        views.append(
            gpu_view(
                f"j{i}",
                min_workers=draw(st.integers(1, 2)),
                submitted_s=float(draw(st.integers(0, 3))),
                goodput=types["aws"],
                models=types if draw(st.booleans()) else {},
                progress=None if epochs is None else length(epochs),
                resize_cost_s=draw(st.sampled_from([0.2, 30.0, 250.0])),
                growth_limit=draw(st.none() | st.integers(1, 8)),
            )
        )
    return views


def carried_out(views: list[JobView], nodes: Cluster) -> list[JobView]:
    plan = make_plan(GoodputPolicy(), views, nodes, 50.0)
    return [dataclasses.replace(v, allocation=plan.allocation.get(v.job, {})) for v in views]


@settings(max_examples=60, deadline=None)
@given(views=mixed(), more=mixed(), where=st.sampled_from(["aws:3x4", "aws:2x4,rtx:1x8", "aws:1x2,rtx:3x1"]))
def test_equal_inputs_change_nothing_with_lengths_and_types(
    views: list[JobView], more: list[JobView], where: str
) -> None:
    nodes = parse_cluster(where)
    first = carried_out(views, nodes)
    both = first + [dataclasses.replace(v, job=f"new-{v.job}", submitted_s=9.0) for v in more]
    once = carried_out(both, nodes)
    assert carried_out(once, nodes) == once
    types = {node.node_id: node.gpu_type for node in nodes.nodes}
    assert all(len({types[node] for node in v.allocation}) <= 1 for v in once)


@settings(max_examples=40, deadline=None)
@given(views=mixed(), seed=st.randoms(use_true_random=False))
def test_the_order_of_jobs_does_not_matter(views: list[JobView], seed) -> None:  # type: ignore[no-untyped-def]
    nodes = parse_cluster("aws:2x4,rtx:1x8")
    shuffled = list(views)
    seed.shuffle(shuffled)
    assert GoodputPolicy().decide(views, nodes, 50.0) == GoodputPolicy().decide(shuffled, nodes, 50.0)


@pytest.mark.parametrize("field, value", [("horizon_s", 0.0), ("hysteresis", -1.0), ("power", 2.0), ("late", 0.5)])
def test_wrong_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        GoodputPolicy(**{field: value})


def test_settings_default_to_the_measured_round_numbers() -> None:
    shown = {"horizon_s": 300.0, "crowd": 0.25, "hysteresis": 0.05, "exponent": 1.0, "power": 0.5, "fair_power": 0.0}
    shown |= {"late": 3.0, "charge": 0.5, "sharpness": 2.0, "lengths": True}
    assert GoodputPolicy() == GoodputPolicy(**shown)


def test_on_a_crowded_cluster_the_longest_stoppable_jobs_wait() -> None:
    long = gpu_view("long", progress=length(3000), allocation={"aws-000": 1})
    short = [gpu_view(f"short{i}", progress=length(3), submitted_s=float(i)) for i in range(4)]
    nodes = parse_cluster("aws:1x4")
    kept = sizes([long, *short], nodes)
    assert kept["long"] == 1, "it would lose its work"
    stopped = sizes([dataclasses.replace(long, stop_cost_s=30.0), *short], nodes)
    assert stopped["long"] == 0 and sum(stopped.values()) == 4
    roomy = sizes([dataclasses.replace(long, stop_cost_s=30.0), *short], parse_cluster("aws:8x4"))
    assert roomy["long"] >= 1


def test_on_a_crowded_cluster_without_any_room_all_wait() -> None:
    """So the policy is asked where those of a higher priority have taken everything."""
    views = [gpu_view(f"j{i}", progress=length(3 + i), priority=i % 2) for i in range(4)]
    nodes = parse_cluster("aws:1x4")
    full = Cluster(nodes=tuple(dataclasses.replace(node, free={"GPU": 0.0}) for node in nodes.nodes))
    assert set(sizes(views, full).values()) == {0}
    one = Cluster(nodes=tuple(dataclasses.replace(node, free={"GPU": 1.0}) for node in nodes.nodes))
    assert make_plan(GoodputPolicy(), views, one, 100.0).allocation.keys() == {"j1"}


def test_policy_that_has_decided_before_decides_as_new_one() -> None:
    """What it remembers of models and measurements only saves time, also when it has to forget."""
    nodes, used = parse_cluster("aws:4x4,rtx:2x8"), GoodputPolicy()
    used._cache.most = 8
    for i in range(6):
        seen = tuple(Observation(1, k, 64, 0, 0.1 * (1 + (i + k) % 3)) for k in (1, 2, 4))
        views = [gpu_view(f"j{j}", goodput=model(noise=10.0 * (i + j)), observations={"aws": seen}) for j in range(5)]
        assert used.decide(views, nodes, 100.0) == GoodputPolicy().decide(views, nodes, 100.0)
        assert len(used._cache.rows) <= 8


def test_an_epochs_length_is_known_from_the_models_jobs() -> None:
    fresh = Progress(done=5.0, epochs=10.0, usual_epoch=100.0)
    assert remaining(fresh) == 995.0
    assert remaining(dataclasses.replace(fresh, done=150.0)) == 1350.0, "it has outgrown the usual"
    assert remaining(dataclasses.replace(fresh, done=60.0, epoch_ends=(50.0,))) == 440.0, "its own counts"


def test_sizes_that_leave_no_scattered_room_are_tried_first() -> None:
    grid = size_grid(node=4, total=12, most=12, extra=[5, 99])
    assert grid.sizes.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 12]
    assert grid.sizes[grid.regular].tolist() == [1, 2, 4, 5, 8, 12]
