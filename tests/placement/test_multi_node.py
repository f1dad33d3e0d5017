"""At most one multi-node job per node: repairs that keep sizes where they can."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cluster.cluster import AllocationError, check
from placement.cluster.packing import Packing, pack
from placement.planning.multi_node import check_apart, keep_apart, shared
from tests.placement.views import cluster, view


def test_one_that_is_there_stays_and_the_other_moves() -> None:
    jobs = [view("a", allocation={"n0": 2, "n1": 2}), view("b")]
    crossed = {"a": {"n0": 2, "n1": 2}, "b": {"n1": 2, "n2": 1}}
    found = keep_apart(Packing(allocation=crossed, short={}), jobs, cluster(4, 4, 4))
    assert found == Packing(allocation={"a": {"n0": 2, "n1": 2}, "b": {"n2": 3}}, short={})


def test_a_job_shrinks_to_what_other_nodes_hold() -> None:
    jobs = [view("a", allocation={"n0": 4, "n1": 2}), view("b")]
    crossed = {"a": {"n0": 4, "n1": 2}, "b": {"n1": 2, "n2": 3}}
    found = keep_apart(Packing(allocation=crossed, short={}), jobs, cluster(4, 4, 3))
    assert found == Packing(allocation={"a": {"n0": 4, "n1": 2}, "b": {"n2": 3}}, short={"b": 2})


def test_a_larger_job_gives_way_to_anothers_minimum() -> None:
    jobs = [view("a", allocation={"n0": 4, "n1": 3}), view("b", min_workers=5)]
    crossed = {"a": {"n0": 4, "n1": 3}, "b": {"n1": 1, "n2": 4}}
    found = keep_apart(Packing(allocation=crossed, short={}), jobs, cluster(4, 4, 4))
    assert {job: sum(place.values()) for job, place in found.allocation.items()} == {"a": 4, "b": 5}


def test_nodes_that_others_span_are_avoided() -> None:
    found = keep_apart(Packing(allocation={"a": {"n0": 2, "n1": 2}}, short={}), [view("a")], cluster(4, 4), ["n1"])
    assert found.allocation == {"a": {"n0": 4}}


def test_the_rule_is_named() -> None:
    with pytest.raises(AllocationError, match="one multi-node job per node: node 'n0' holds workers of a and b"):
        check_apart({"a": {"n0": 1, "n1": 1}, "b": {"n0": 1, "n2": 1}})


@settings(max_examples=200, deadline=None)
@given(
    cpus=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    wanted=st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.integers(0, 8), st.integers(1, 3)), max_size=6),
    multi_node_nodes=st.sets(st.sampled_from(["n0", "n1", "n2"]), max_size=1),
)
def test_repaired_places_fit_keep_rule_and_lose_nobody_silently(
    cpus: list[int], wanted: list[tuple[float, int, int]], multi_node_nodes: set[str]
) -> None:
    nodes = cluster(*cpus)
    views = [view(f"j{i}", bundle={"CPU": size}, min_workers=least) for i, (size, _, least) in enumerate(wanted)]
    counts = {f"j{i}": n for i, (_, n, least) in enumerate(wanted) if n >= least}
    found = keep_apart(pack(counts, views, nodes), views, nodes, multi_node_nodes)
    check(found.allocation, {v.job: v.bundle for v in views}, nodes)
    assert not shared(found.allocation)
    assert not any(len(place) > 1 and multi_node_nodes & set(place) for place in found.allocation.values())
    for job, n in counts.items():
        assert sum(found.allocation.get(job, {}).values()) + found.short.get(job, 0) == n
