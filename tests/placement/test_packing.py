"""Where workers run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cluster.cluster import AllocationError, Change, Cluster, check, diff
from placement.cluster.jobs import JobView
from placement.cluster.packing import FreeResources, pack
from tests.placement.views import cluster, node, view


def test_workers_stay_and_shrinking_job_leaves_its_smallest_node() -> None:
    job = view("a", allocation={"n0": 1, "n1": 3})
    assert pack({"a": 3}, [job], cluster(4, 4)).allocation == {"a": {"n1": 3}}
    assert pack({"a": 5}, [job], cluster(4, 4)).allocation == {"a": {"n0": 1, "n1": 4}}


def test_job_goes_onto_tightest_node_that_takes_it_whole() -> None:
    assert pack({"a": 2}, [view("a")], cluster(4, 2, 3)).allocation == {"a": {"n1": 2}}
    assert pack({"a": 5}, [view("a")], cluster(4, 2, 3)).allocation == {"a": {"n0": 4, "n1": 1}}


def test_jobs_that_span_nodes_keep_apart_where_they_can() -> None:
    jobs = [view("a", max_workers=6), view("b", max_workers=6)]
    placed = pack({"a": 5, "b": 5}, jobs, cluster(4, 4, 4, 4)).allocation
    assert not set(placed["a"]) & set(placed["b"])
    crowded = pack({"a": 5, "b": 5}, jobs, cluster(4, 4, 2)).allocation  # a preference only: nobody is left out
    assert sum(crowded["a"].values()) == sum(crowded["b"].values()) == 5


def test_draining_nodes_are_emptied() -> None:
    nodes = Cluster(nodes=(node("n0", 4, draining=True), node("n1", 4)))
    assert pack({"a": 3}, [view("a", allocation={"n0": 2, "n1": 1})], nodes).allocation == {"a": {"n1": 3}}


def test_labels_choose_the_nodes() -> None:
    nodes = Cluster(nodes=(node("n0", 4, labels={"zone": "a"}), node("n1", 4, labels={"zone": "b"})))
    packing = pack({"a": 5}, [view("a", label_selector={"zone": "b"})], nodes)
    assert packing.allocation == {"a": {"n1": 4}}
    assert packing.short == {"a": 1}


def test_scattered_room_is_gathered_for_a_large_bundle() -> None:
    small = [view(f"s{i}", allocation={f"n{i}": 1}) for i in range(2)]
    large = view("large", bundle={"CPU": 2.0}, submitted_s=1.0)
    packing = pack({"s0": 1, "s1": 1, "large": 1}, [*small, large], cluster(2, 2))
    assert packing.short == {}


@settings(max_examples=150, deadline=None)
@given(
    cpus=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    jobs=st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.integers(0, 6), st.integers(1, 2)), max_size=6),
    has=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_never_over_capacity_and_every_worker_placed_or_counted(
    cpus: list[int], jobs: list[tuple[float, int, int]], has: list[int]
) -> None:
    nodes = cluster(*cpus)
    views: list[JobView] = [
        view(f"j{i}", bundle={"CPU": size}, min_workers=least, allocation={"n0": has[i]} if has[i] else {})
        for i, (size, _, least) in enumerate(jobs)
    ]
    counts = {f"j{i}": n for i, (_, n, least) in enumerate(jobs) if n >= least}
    packing = pack(counts, views, nodes)
    check(packing.allocation, {v.job: v.bundle for v in views}, nodes)
    for job, wanted in counts.items():
        assert sum(packing.allocation.get(job, {}).values()) + packing.short.get(job, 0) == wanted
    if all(size == 1.0 for size, _, _ in jobs) and sum(counts.values()) <= sum(cpus):
        assert not packing.short  # bundles of one size leave no room unused


def test_check_names_the_rule() -> None:
    bundles = {"a": {"CPU": 1.0}}
    draining = Cluster(nodes=(node("n0", 4, free=1), node("n1", 4, draining=True)))
    for allocation, rule in (
        ({"b": {"n0": 1}}, "known job"),
        ({"a": {"n9": 1}}, "known node"),
        ({"a": {"n0": 0}}, "whole number"),
        ({"a": {"n1": 1}}, "draining"),
        ({"a": {"n0": 2}}, "capacity"),
    ):
        with pytest.raises(AllocationError) as error:
            check(allocation, bundles, draining)
        assert error.value.rule == rule


def test_diff_lists_those_that_give_back_first() -> None:
    before = {"a": {"n0": 1}, "b": {"n0": 3}, "c": {"n1": 1}}
    after = {"a": {"n0": 3}, "b": {"n0": 1}, "c": {"n1": 1}}
    assert diff(before, after) == (
        Change(job="b", before={"n0": 3}, after={"n0": 1}),
        Change(job="a", before={"n0": 1}, after={"n0": 3}),
    )


def test_fractions_fit_despite_rounding() -> None:
    tenth = view("a", bundle={"CPU": 0.1}, max_workers=20)
    assert int(FreeResources(cluster(1)).slots(tenth).sum()) == 10
