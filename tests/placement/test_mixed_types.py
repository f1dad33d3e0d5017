"""Jobs on GPUs of several types: what the policies give them, and when they give it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cluster.cluster import GPU_TYPE_LABEL, Cluster, Node, check
from placement.cluster.jobs import JobView
from placement.cluster.sizes import AllowedSizes
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.speeds import GoodputCache
from placement.goodput.step_time import ThroughputModel
from placement.planning.constraints import Constraints
from placement.planning.plan import make_plan
from placement.policies import POLICIES, GoodputPolicy
from placement.policies.goodput.policy import MixedTypes
from tests.placement.views import model, view

FAST, SLOW = model(beta_c=1e-3), model(beta_c=2e-3)
KNOWN = {"a100": FAST, "t4": SLOW}


def typed(**gpus: int) -> Cluster:
    """One node of each type with so many CPUs, for jobs of one CPU per worker."""
    return Cluster(
        nodes=tuple(
            Node(
                node_id=f"{gpu}-0",
                total={"CPU": float(cpus)},
                free={"CPU": float(cpus)},
                labels={GPU_TYPE_LABEL: gpu},
            )
            for gpu, cpus in gpus.items()
        )
    )


def job(name: str = "a", **fields: Any) -> JobView:
    given_fields: dict[str, Any] = {"goodput": FAST, "models": KNOWN, "mixed_gpu_types": True, "max_workers": 16}
    return view(name, **{**given_fields, **fields})


def allocated(jobs: list[JobView], cluster: Cluster, constraints: Constraints | None = None) -> dict[str, Any]:
    plan = make_plan(GoodputPolicy(), jobs, cluster, 1000.0, constraints or Constraints())
    check(plan.allocation, {each.job: each.bundle for each in jobs}, cluster)
    return {name: dict(place) for name, place in plan.allocation.items()}


def types(place: Mapping[str, int]) -> set[str]:
    return {node_id.split("-")[0] for node_id in place}


def test_a_job_takes_both_types_when_idle_says_so() -> None:
    cluster = typed(a100=4, t4=4)
    plan = make_plan(GoodputPolicy(), [job()], cluster, 1000.0)
    assert plan.allocation["a"] == {"a100-0": 4, "t4-0": 4}
    assert str(plan.reasons["a"]) == "with 4 workers on t4, which no other job needs"


def test_the_other_type_returns_once_another_job_wants_it() -> None:
    cluster = typed(a100=4, t4=4)
    both = job(allocation={"a100-0": 4, "t4-0": 4})
    picky = job("b", label_selector={GPU_TYPE_LABEL: "t4"}, submitted_s=900.0, mixed_gpu_types=False, goodput=SLOW)
    after = allocated([both, picky], cluster)
    assert after == {"a": {"a100-0": 4}, "b": {"t4-0": 4}}


def own(view_: JobView) -> dict[str, int]:
    """Where a job is, seen as one on its own type alone."""
    parts = MixedTypes(cluster=typed(a100=4, t4=4), horizon_s=300.0, hysteresis=0.05, cache=GoodputCache())
    return dict(parts.on_one_type(view_).allocation)


def test_a_jobs_own_type_does_most_by_itself() -> None:
    crawls = {**KNOWN, "t4": model(beta_c=1.0)}
    assert own(job(allocation={"a100-0": 1, "t4-0": 3}, models=crawls)) == {"a100-0": 1}
    assert own(job(allocation={"a100-0": 1, "t4-0": 3}, goodput=None, models={})) == {"t4-0": 3}, "by their number"
    assert own(job(allocation={"a100-0": 2, "t4-0": 2}, models=dict.fromkeys(KNOWN, FAST))) == {"a100-0": 2}
    assert own(job(allocation={"a100-0": 2, "gone": 2})) == {"a100-0": 2, "gone": 2}, "one type alone is known"
    both = {"a100-0": 1, "t4-0": 3}
    assert own(job(allocation=both, mixed_gpu_types=False)) == both


def test_type_that_is_too_slow_to_help_is_left() -> None:
    hopeless = GoodputModel(ThroughputModel(5.0, 0.1, 0.02, 1e-3, 0.01, 1e-3, 1.5), NoiseScale(sqr=1.0, var=100.0), 64)
    after = allocated([job(models={**KNOWN, "t4": hopeless})], typed(a100=4, t4=4))
    assert after == {"a": {"a100-0": 4}}


def test_batches_too_small_for_shares_keep_one_type() -> None:
    fast, slow = (
        GoodputModel(ThroughputModel(0.0, beta_c, 0.0, 0.0, 0.0, 0.0, 1.0), NoiseScale(sqr=1.0, var=100.0), 64)
        for beta_c in (1e-3, 4e-3)
    )
    known: dict[str, Any] = {"goodput": fast, "models": {"a100": fast, "t4": slow}}
    # Of 64 samples the four slow workers would take 3 each.
    for least, expected in [(2, {"a100-0": 4, "t4-0": 4}), (8, {"a100-0": 4})]:
        limits: dict[str, Any] = {"max_batch_size": 64, "atomic_bsz_range": (least, 64)}
        assert allocated([job(**known, **limits)], typed(a100=4, t4=4)) == {"a": expected}


def test_a_job_on_two_types_stays_where_changes_cost() -> None:
    cluster = typed(a100=4, t4=4)
    there = {"a100-0": 4, "t4-0": 2}
    plan = make_plan(GoodputPolicy(), [job(allocation=there, resize_cost_s=1000.0)], cluster, 1000.0)
    assert plan.allocation["a"] == there
    assert "4 workers" in plan.reasons["a"].figures and "2 workers on t4" in plan.reasons["a"].words
    assert allocated([job(allocation=there, resize_cost_s=0.0)], cluster) == {"a": {"a100-0": 4, "t4-0": 4}}


def test_held_jobs_and_those_without_model_keep_one_type() -> None:
    cluster = typed(a100=4, t4=4)
    assert types(allocated([job(held_at=4)], cluster)["a"]) == {"a100"}
    assert len(types(allocated([job(goodput=None, models={})], cluster)["a"])) == 1


def test_a_job_on_two_types_keeps_sizes_and_maximum() -> None:
    cluster = typed(a100=4, t4=3)
    assert sum(allocated([job(sizes=AllowedSizes(multiple_of=2))], cluster)["a"].values()) == 6
    # One on each; now there is room for two on its own type, and the third would be above its maximum.
    grown = [job(max_workers=2).placed({"a100-0": 1, "t4-0": 1})]
    assert sum(allocated(grown, typed(a100=2, t4=2))["a"].values()) == 2


gpu_counts = st.fixed_dictionaries({"a100": st.integers(1, 6), "t4": st.integers(1, 6), "v100": st.integers(0, 4)})


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[JobView], Cluster]:
    cluster = typed(**{gpu: count for gpu, count in draw(gpu_counts).items() if count})
    jobs = []
    for i in range(draw(st.integers(1, 4))):
        least = draw(st.integers(1, 2))
        jobs.append(
            job(
                f"j{i}",
                goodput=draw(st.sampled_from([None, FAST, SLOW])),
                min_workers=least,
                max_workers=draw(st.integers(least, 12)),
                submitted_s=float(draw(st.integers(0, 500))),
                mixed_gpu_types=draw(st.booleans()),
                priority=draw(st.integers(0, 1)),
                held_at=draw(st.none() | st.just(least)),
                sizes=draw(st.sampled_from([AllowedSizes(), AllowedSizes(multiple_of=least)])),
                resize_cost_s=draw(st.sampled_from([0.0, 0.2, 30.0])),
            )
        )
    return jobs, cluster


@settings(deadline=None, max_examples=60)
@given(problems(), st.booleans())
def test_equal_input_changes_nothing_and_all_rules_hold(problem: tuple[list[JobView], Cluster], apart: bool) -> None:
    jobs, cluster = problem
    constraints = Constraints(one_multi_node_job_per_node=apart)
    first = allocated(jobs, cluster, constraints)
    for each in jobs:
        workers = sum(first.get(each.job, {}).values())
        assert workers == 0 or each.min_workers <= workers <= each.max_workers
        assert each.sizes.allow(workers) or workers == 0
        if not each.mixed_gpu_types:
            assert len(types(first.get(each.job, {}))) <= 1
    for _ in range(4):  # growth of jobs without a model takes several decisions
        before = first
        jobs = [each.placed(first.get(each.job, {})) for each in jobs]
        first = allocated(jobs, cluster, constraints)
    assert first == before


@settings(deadline=None, max_examples=30)
@given(problems())
def test_workers_on_other_types_take_nothing_from_other_jobs(problem: tuple[list[JobView], Cluster]) -> None:
    jobs, cluster = problem
    jobs = [dataclasses.replace(each, priority=0) for each in jobs]
    without = allocated([dataclasses.replace(each, mixed_gpu_types=False) for each in jobs], cluster)
    mixed = allocated(jobs, cluster)
    for name, place in without.items():
        assert all(mixed[name].get(node_id, 0) >= workers for node_id, workers in place.items())


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(deadline=None, max_examples=8)
@given(problem=problems())
def test_without_flag_nothing_changes_and_other_policies_ignore_it(
    name: str, problem: tuple[list[JobView], Cluster]
) -> None:
    jobs, cluster = problem
    off = [dataclasses.replace(each, mixed_gpu_types=False) for each in jobs]
    plain = make_plan(POLICIES[name](), off, cluster, 1000.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("placement.policies.goodput.policy.MixedTypes", None)  # nothing of it is asked
        assert make_plan(POLICIES[name](), off, cluster, 1000.0) == plain
    if name != "goodput":
        assert make_plan(POLICIES[name](), jobs, cluster, 1000.0) == plain
    else:
        one_type = Cluster(nodes=cluster.nodes[:1])
        assert make_plan(GoodputPolicy(), jobs, one_type, 0.0) == make_plan(GoodputPolicy(), off, one_type, 0.0)
