"""Jobs that cannot train with every number of workers: contract tests over the registry, with a user's own policy."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cluster.cluster import Cluster, check
from placement.cluster.jobs import JobView, goodputs, speeds
from placement.cluster.sizes import ANY_SIZE, AllowedSizes, MemoryNeed, bytes_text
from placement.planning.constraints import Constraints
from placement.planning.plan import make_plan
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
from tests.placement.views import cluster, model, view


@st.composite
def needs(draw: st.DrawFn) -> MemoryNeed:
    """With and without shard groups, which are large enough."""
    sharded, replicated = draw(st.integers(0, 100)), draw(st.integers(0, 20))
    shard_size = draw(st.none() | st.integers(1, 4))
    least = 1 if shard_size is None else max(1, -(-sharded // shard_size))
    return MemoryNeed(
        available_bytes=replicated + least + draw(st.integers(0, 60)),
        sharded_bytes=sharded,
        replicated_bytes=replicated,
        copies=draw(st.integers(1, 3)),
        shard_size=shard_size,
    )


@st.composite
def some_sizes(draw: st.DrawFn) -> AllowedSizes:
    """Any, multiples or certain ones; with or without a bound on memory that leaves one of these."""
    memory = draw(st.none() | needs())
    least = 1 if memory is None else memory.least_workers
    if draw(st.booleans()):
        return AllowedSizes(multiple_of=draw(st.integers(1, 4)), memory=memory)
    found = draw(st.sets(st.integers(1, 8), min_size=1)) | {draw(st.integers(least, least + 4))}
    return AllowedSizes(sizes=tuple(sorted(found)), memory=memory)


allowed = st.one_of(st.just(ANY_SIZE), some_sizes())


@st.composite
def sized(draw: st.DrawFn, *, wishes: bool = False) -> list[JobView]:
    """Jobs whose limits are allowed sizes, as a job's own controller gives them."""
    jobs = []
    for each in draw(constrained_views(bundles=(1.0, 2.0))):
        only = draw(allowed)
        try:
            low, high = only.within(each.min_workers, each.max_workers)
        except ValueError:
            only, (low, high) = ANY_SIZE, (each.min_workers, each.max_workers)
        held = draw(st.none() | st.sampled_from([n for n in range(low, high + 1) if only.allow(n)]))
        wished = draw(st.none() | st.integers(1, high)) if wishes else None
        jobs.append(
            dataclasses.replace(each, min_workers=low, max_workers=high, sizes=only, held_at=held, wished=wished)
        )
    return jobs


@pytest.mark.matrix(every=1)
@every
@settings(max_examples=25, deadline=None)
@given(jobs=sized(), nodes=clusters, cluster_rules=rules, late=sized())
def test_every_size_is_allowed_and_equal_input_changes_nothing(
    name: str, jobs: list[JobView], nodes: Cluster, cluster_rules: Constraints, late: list[JobView]
) -> None:
    one = policy(name)
    jobs = carried_out(jobs, make_plan(one, jobs, nodes, 0.0, cluster_rules))
    jobs += [dataclasses.replace(v, job=f"new-{v.job}", submitted_s=9.0) for v in late]
    found = make_plan(one, jobs, nodes, 0.0, cluster_rules)
    check(found.allocation, {v.job: v.bundle for v in jobs}, nodes)
    for v in jobs:
        has = sizes(found).get(v.job, 0)
        assert has == 0 or (v.min_workers <= has <= v.max_workers and v.sizes.allow(has)), f"{v.job} has {has}"
    jobs = carried_out(jobs, found)
    assert make_plan(one, jobs, nodes, 0.0, cluster_rules).allocation == found.allocation


@every
@settings(max_examples=10, deadline=None)
@given(jobs=sized(wishes=True), nodes=clusters)
def test_so_are_those_that_jobs_own_policy_asked_for(name: str, jobs: list[JobView], nodes: Cluster) -> None:
    found = make_plan(policy(name), jobs, nodes, 0.0, Constraints())
    check(found.allocation, {v.job: v.bundle for v in jobs}, nodes)
    for v in jobs:
        assert v.sizes.allow(sizes(found).get(v.job, 0))


@every
def test_a_job_alone_has_the_largest_size_that_fits(name: str) -> None:
    job = view("a", min_workers=2, max_workers=8, sizes=AllowedSizes(sizes=(2, 4, 8)), most_workers=8)
    found = sizes(plan(name, [job], cluster(4, 3)))
    assert found["a"] in ((2, 4) if name in FRUGAL else (4,)), found


def test_goodput_policy_looks_beyond_size_that_is_not_allowed() -> None:
    job = view("a", min_workers=4, max_workers=16, sizes=AllowedSizes(multiple_of=4), goodput=model(sync_s=1e-4))
    assert sizes(plan("goodput", [job], cluster(8, 8))) == {"a": 16}
    beside = view("b", max_workers=16, goodput=model(sync_s=1e-4))
    found = sizes(plan("goodput", [job, beside], cluster(8, 7)))
    assert found["a"] in (4, 8, 12) and sum(found.values()) == 15


def test_an_unknown_job_explores_the_next_allowed_size() -> None:
    only = AllowedSizes(sizes=(1, 5, 8))
    job = view("a", goodput=None, sizes=only, most_workers=1, allocation={"n0": 1})
    assert job.useful_workers == 5
    assert view("a", goodput=None, sizes=only, most_workers=5, allocation={"n0": 5}).useful_workers == 8
    assert sizes(plan("goodput", [job], cluster(8))) == {"a": 5}


def test_a_size_between_two_leads_from_one_to_another() -> None:
    free, only = view("a"), view("a", min_workers=2, sizes=AllowedSizes(sizes=(2, 4, 8)))
    every_speed, speed = speeds(free, [8]), speeds(only, [8])
    assert [speed[n] for n in (0, 1, 2, 4, 8)] == [0, 0, *(every_speed[n] for n in (2, 4, 8))]
    assert speed[3] == pytest.approx((speed[2] + speed[4]) / 2) and speed[4] < speed[6] < speed[8]
    assert speeds(only, [7])[7] == speed[4], "beyond the last that fits"
    assert goodputs(only, [8])[6] == goodputs(free, [8])[3]


@given(need=needs())
def test_need_falls_and_fits_from_the_least_size_on(need: MemoryNeed) -> None:
    each = [need.need_bytes(n) for n in range(1, 400)]
    assert all(later <= sooner for sooner, later in itertools.pairwise(each))
    assert each[: need.copies] == [need.replicated_bytes + need.sharded_bytes] * need.copies
    if need.shard_size is not None:
        assert each[-1] == need.replicated_bytes - (-need.sharded_bytes // need.shard_size), "the part of one group"
    fits = [n for n, nbytes in enumerate(each, 1) if nbytes <= need.available_bytes]
    assert need.least_workers == fits[0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"available_bytes": 0}, "available_bytes must be a whole number, 1 or more, but got 0"),
        ({"available_bytes": 8e9}, "available_bytes must be a whole number"),
        ({"sharded_bytes": -1}, "sharded_bytes must be a whole number, 0 or more, but got -1"),
        ({"shard_size": 0}, "shard_size must be a whole number, 1 or more, but got 0"),
        ({"sharded_bytes": 500, "shard_size": 4}, "must be 125 or more.*any size with shard_size=4, but got 100"),
        ({"copies": 0}, "copies must be a whole number, 1 or more, but got 0"),
        ({"replicated_bytes": True}, "replicated_bytes must be a whole number"),
        ({"replicated_bytes": 100}, "above replicated_bytes.*available_bytes=100 and replicated_bytes=100"),
    ],
)
def test_memory_that_makes_no_sense_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        MemoryNeed(**{"available_bytes": 100, "sharded_bytes": 1, **wrong})


def test_a_job_that_fits_on_four_starts_on_four() -> None:
    only = AllowedSizes(memory=MemoryNeed(available_bytes=50, sharded_bytes=100))
    job = view("a", max_workers=8, min_workers=1, goodput=None, sizes=only)
    assert job.useful_workers == job.explored_workers == 4
    assert sizes(plan("goodput", [job], cluster(8))) == {"a": 4}
    found = plan("goodput", [job], cluster(3))
    assert sizes(found) == {} and str(only) == "memory=<from 4 on>"


def test_an_error_says_what_lacks_and_the_smallest_size() -> None:
    need = MemoryNeed(available_bytes=4 << 30, sharded_bytes=8 << 30)
    words = r"no size from 1 to 3 .*memory=<from 4 on>: a worker needs 5.33 GiB in a group of 3 and has 4.00 GiB; "
    with pytest.raises(ValueError, match=words + "the smallest allowed size that fits is 4"):
        AllowedSizes(memory=need).within(1, 3)
    with pytest.raises(ValueError, match=r"multiple_of=3, memory=<from 4 on>.*that fits is 6"):
        AllowedSizes(memory=need, multiple_of=3).within(1, 3)
    with pytest.raises(ValueError, match=r"exclude each other: a worker needs 8.00 GiB in a group of 2.* has 4 work"):
        AllowedSizes(memory=need, sizes=(1, 2))
    with pytest.raises(TypeError, match="memory must be a MemoryNeed or None, but got 4"):
        AllowedSizes(memory=4)
    assert "needs 4.00 GiB in a group of 4, and has 4.00 GiB: it needs more; with a larger" in need.after_failure(4)
    assert need.after_failure(3).startswith("a worker needs 5.33 GiB in a group of 3 and has 4.00 GiB, by Scheduling")
    assert str(AllowedSizes(memory=need, sizes=(2, 4))) == "sizes=(2, 4), memory=<from 4 on>"
    assert AllowedSizes(memory=need).or_any(1, 3) == (ANY_SIZE, 1, 3)
    assert [bytes_text(n) for n in (5, 2048, 3 << 20)] == ["5 B", "2.00 KiB", "3.00 MiB"]


@given(only=allowed, k=st.integers(0, 40))
def test_the_sizes_around_a_number(only: AllowedSizes, k: int) -> None:
    every_size = [n for n in range(1, 800) if only.allow(n)]
    assert only.free == (every_size == list(range(1, 800)))
    if only.memory is not None:
        assert all(only.memory.need_bytes(n) <= only.memory.available_bytes for n in every_size)
    assert only.at_most(k) == max((n for n in every_size if n <= k), default=0)
    assert only.at_least(k) == min((n for n in every_size if n >= k), default=None)
    assert only.floors(k).tolist() == [only.at_most(n) for n in range(k + 1)]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"sizes": (0, 1)}, "sizes must be a whole number, 1 or more, but got 0"),
        ({"sizes": (2, 1)}, "ascending"),
        ({"sizes": (1, 1)}, "ascending"),
        ({"sizes": [1, 2]}, "must be a tuple"),
        ({"sizes": (1.0,)}, "whole number, 1 or more, but got 1.0"),
        ({"multiple_of": 0}, "multiple_of must be a whole number, 1 or more"),
        ({"multiple_of": True}, "whole number"),
        ({"sizes": (2, 3), "multiple_of": 2}, "3 is no multiple of 2"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        AllowedSizes(**wrong)
