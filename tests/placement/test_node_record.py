"""Nodes on which workers fail: avoided by their job, by all after two jobs, for a time, and never by leaving none."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobEnded, JobHeartbeat, NodeForgiven, NodesChanged, TimePassed
from placement.allocator.significance import trigger_of
from placement.allocator.snapshot import Trigger
from placement.cluster.cluster import Cluster, slots
from placement.cluster.jobs import JobView
from placement.cluster.node_record import (
    FORGET_S,
    MOST_REST_S,
    REST_S,
    WINDOW_S,
    AvoidedNodes,
    NodeFailure,
    NodeRecord,
)
from placement.planning.failing_nodes import NODE_LABEL, avoid_failing
from placement.policies.goodput.policy import GoodputPolicy
from placement.policies.shared.base import admit
from tests.placement.views import cluster, view


def failure(
    node: str, worker: str, age_s: float = 0.0, *, starting: bool = False, of_device: bool = False
) -> NodeFailure:
    cause = "OSError: [Errno 5]"
    return NodeFailure(node=node, worker=worker, cause=cause, age_s=age_s, starting=starting, of_device=of_device)


def named(nodes: Cluster) -> Cluster:
    """With the label that Ray gives each node."""
    labelled = (dataclasses.replace(node, labels={NODE_LABEL: node.node_id}) for node in nodes.nodes)
    return Cluster(nodes=tuple(labelled))


def told(job: str, *failures: NodeFailure, **kwargs: object) -> JobView:
    return view(job, node_failures=failures, **kwargs)


def avoids(record: NodeRecord, job: str, now_s: float) -> set[str]:
    return set(record.avoided(now_s).of(view(job)))


def test_two_failures_close_a_node_to_jobs_or_all() -> None:
    record = NodeRecord()
    record.receive(told("a", failure("n0", "w1")), 0.0)
    assert not avoids(record, "a", 1.0)
    record.receive(told("a", failure("n0", "w1", 500.0), failure("n0", "w2")), 500.0)
    assert (avoids(record, "a", 501.0), avoids(record, "b", 501.0)) == ({"n0"}, set())
    record.receive(told("b", failure("n0", "w1"), tenant="y"), 600.0)
    assert avoids(record, "b", 601.0) == avoids(record, "c", 601.0) == {"n0"}


def test_failures_far_apart_are_chance() -> None:
    record = NodeRecord()
    for number in range(20):
        record.receive(told("a", failure("n0", f"w{number}")), number * (WINDOW_S + 1))
        assert not avoids(record, "a", number * (WINDOW_S + 1))


def test_one_failed_start_closes_node_to_its_job_alone() -> None:
    record = NodeRecord()
    record.receive(told("a", failure("n0", "w1", starting=True)), 0.0)
    assert (avoids(record, "a", 1.0), avoids(record, "b", 1.0)) == ({"n0"}, set())


def test_heartbeats_repeat_what_they_tell_and_it_counts_once() -> None:
    record = NodeRecord()
    for now_s in range(30):
        record.receive(told("a", failure("n0", "w1", float(now_s))), float(now_s))
    (row,) = record.rows(30.0)
    assert (row.failures, row.age_s, row.avoided_by, row.rests_s) == (1, 30.0, (), 0.0)


def test_a_node_failing_after_its_rest_rests_twice() -> None:
    record = NodeRecord()
    record.receive(told("a", failure("n0", "w1"), failure("n0", "w2")), 0.0)
    assert avoids(record, "a", REST_S - 1) and not avoids(record, "a", REST_S + 1)
    again_s = 2 * REST_S
    record.receive(told("a", failure("n0", "w3")), again_s)
    assert avoids(record, "a", again_s + 2 * REST_S - 1) and not avoids(record, "a", again_s + 2 * REST_S + 1)
    (row,) = record.rows(again_s)
    assert (row.avoided_by, row.by_all, row.rests_s) == (("a",), False, 2 * REST_S)
    assert str(row) == "node n0: 3 workers of a failed, avoided by a for 20 min; the last: OSError: [Errno 5], 0 s ago"


def test_workers_that_fail_together_are_one_reason_to_rest() -> None:
    record = NodeRecord()
    for number in range(8):
        record.receive(told("a", failure("n0", f"w{number}")), float(number))
    (row,) = record.rows(7.0)
    assert (row.failures, row.rests_s) == (8, REST_S)


def test_what_is_forgiven_is_not_heard_again() -> None:
    record = NodeRecord()
    both = failure("n0", "w1"), failure("n0", "w2")
    record.receive(told("a", *both), 10.0)
    assert record.forgive("n0", 20.0) and not avoids(record, "a", 20.0)
    record.receive(told("a", *(dataclasses.replace(each, age_s=20.0) for each in both)), 30.0)
    assert not record.rows(30.0) and not record.forgive("n1", 30.0)


def test_a_job_ended_by_its_program_takes_back_blame() -> None:
    record = NodeRecord()
    record.receive(told("a", failure("n0", "w1"), failure("n1", "w2")), 0.0)
    record.receive(told("b", failure("n0", "w1"), tenant="y"), 0.0)
    assert avoids(record, "c", 1.0) == {"n0"}
    record.ended(told("a", failure("n1", "w2")))
    assert not avoids(record, "c", 1.0)
    assert [(row.node, row.jobs) for row in record.rows(1.0)] == [("n0", ("b",)), ("n1", ("a",))]


TIMES = st.lists(st.tuples(st.floats(0.0, 1e5), st.sampled_from("abc"), st.booleans()), min_size=1, max_size=12)


@given(times=TIMES, later_s=st.floats(0.0, 1e5))
def test_whatever_has_failed_a_node_comes_back(times: list[tuple[float, str, bool]], later_s: float) -> None:
    record = NodeRecord()
    for number, (at_s, job, starting) in enumerate(sorted(times)):
        record.receive(told(job, failure("n0", f"w{number}", starting=starting)), at_s)
    last_s = max(at_s for at_s, _, _ in times)
    before, after = (set(record.avoided(last_s + s).by_job) for s in (0.0, later_s))
    assert after <= before, "without another failure nobody begins to avoid a node"
    free = record.avoided(last_s + MOST_REST_S)
    assert not free.by_job and not free.by_all
    record.discard(last_s + FORGET_S + 1.0, {"n0"})
    assert not record.rows(last_s + FORGET_S + 1.0)


NODES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(
    cpus=NODES,
    jobs=st.lists(st.tuples(st.sets(st.integers(0, 3)), st.integers(1, 6), st.booleans()), min_size=1, max_size=4),
)
def test_no_job_is_left_without_nodes_that_could_run(cpus: list[int], jobs: list[tuple[set[int], int, bool]]) -> None:
    nodes, record, views = cluster(*cpus), NodeRecord(), []
    for number, (failed, least, trained) in enumerate(jobs):
        failures = [failure(f"n{node}", f"w{node}", starting=True) for node in failed]
        views.append(told(f"j{number}", *failures, min_workers=least, most_workers=int(trained)))
        record.receive(views[-1], 0.0)
    seen, named, notes = avoid_failing(views, nodes, record.avoided(1.0))
    for before, after in zip(views, seen, strict=True):
        room = sum(slots(each.total, after.bundle) for each in named.nodes if each.matches(after.selector))
        assert room >= before.min_workers or after is before
        assert (before.job in notes) == (after is not before)


def test_where_nothing_has_failed_plans_are_as_before() -> None:
    views, nodes = [view("a")], cluster(4, 4)
    seen, same, notes = avoid_failing(views, nodes, NodeRecord().avoided(0.0))
    assert seen is views and same is nodes and not notes


def test_a_job_retakes_its_node_unless_a_device_failed() -> None:
    record = NodeRecord()
    full, half = view("b", allocation={"n1": 4}, min_workers=4), view("b", allocation={"n1": 4}, min_workers=2)
    for most_workers, of_device, other, closed in (
        (2, False, full, False),
        (2, True, full, False),
        (0, False, full, False),
        (0, True, full, True),
        (0, False, half, True),
    ):
        there = {"n0": 2} if most_workers else {}
        failed = failure("n0", f"w{most_workers}{of_device}", starting=True, of_device=of_device)
        job = told(f"a{of_device}", failed, allocation=there, most_workers=most_workers, submitted_s=1.0)
        record.receive(job, 0.0)
        (_, seen), _, notes = avoid_failing([other, job], cluster(4, 4), record.avoided(1.0))
        assert ((seen is not job), (job.job in notes)) == (closed, closed), (most_workers, of_device, other.min_workers)


def test_failure_calls_for_decision_and_its_age_does_not() -> None:
    before = told("a", failure("n0", "w1"))
    assert trigger_of(before, told("a", failure("n0", "w1", 5.0))) is None
    assert trigger_of(before, told("a", failure("n0", "w1"), failure("n0", "w2"))) is Trigger.NODES


def test_allocator_moves_a_job_off_and_back_when_forgiven() -> None:
    core = AllocatorCore(GoodputPolicy())
    core.handle(NodesChanged(cluster=cluster(1, 1)), 0.0)

    def target(now_s: float, *failures: NodeFailure) -> dict[str, int]:
        core.handle(JobHeartbeat(view=told("a", *failures, max_workers=2, held_at=2)), now_s)
        core.handle(TimePassed(), now_s + 5.0)
        return dict(core.snapshot().jobs["a"].target)

    assert target(1.0) == {"n0": 1, "n1": 1}
    started = failure("n0", "w1", starting=True)
    assert target(10.0, started) == {"n1": 1}
    reason = core.snapshot().jobs["a"].reason
    assert "node n0 is avoided, 1 of its workers failed there, the last with OSError: [Errno 5]" in reason.explained
    assert str(reason) == "avoids node n0: workers failed there" == core.avoids["a"].words
    (scaled,) = core.views_to_scale_for(20.0)
    there = [each.node_id for each in named(cluster(1, 1)).nodes if each.matches(scaled.selector)]
    assert there == ["n1"], "for the autoscaler as well"
    core.handle(NodeForgiven(node="n0"), 20.0)
    assert target(20.0, dataclasses.replace(started, age_s=10.0)) == {"n0": 1, "n1": 1} and not core.avoids
    core.handle(JobEnded(job="a", view=told("a")), 30.0)
    assert not core.snapshot().node_failures


def test_jobs_of_one_program_close_a_node_to_nobody() -> None:
    for kwargs, starting in (({"tenant": "x", "fingerprint": "f"}, False), ({}, True)):
        record = NodeRecord()
        for job in "ab":
            fields = kwargs or {"tenant": job}
            record.receive(told(job, failure("n0", "w1", starting=starting), **fields), 0.0)
        assert not record.avoided(1.0).by_all
    record.receive(told("c", failure("n0", "w1"), tenant="x", fingerprint="f"), 0.0)
    record.receive(told("d", failure("n0", "w1"), tenant="x", fingerprint="g"), 0.0)
    assert set(record.avoided(1.0).by_all) == {"n0"}


def avoided_by_all(node: str) -> AvoidedNodes:
    return AvoidedNodes(by_job={}, by_all={node: "it fails"})


def test_jobs_that_leave_a_node_displace_nobody_elsewhere() -> None:
    views = [
        view(f"j{i:02d}", submitted_s=float(i), max_workers=1, most_workers=1, allocation={"n0" if i < 8 else "n1": 1})
        for i in range(15)
    ]
    seen, labelled, notes = avoid_failing(views, cluster(8, 8), avoided_by_all("n0"))
    moved = [before.job for before, after in zip(views[:8], seen, strict=False) if after is not before]
    assert moved == ["j00"] and "j00" in notes
    assert len(admit(seen, labelled).floors) == len(views)


def test_a_new_job_fitting_nowhere_runs_on_avoided_nodes() -> None:
    full = view("b", allocation={"n0": 4}, min_workers=4, max_workers=4, most_workers=4)
    seen, labelled, notes = avoid_failing([full, view("a", submitted_s=1.0)], cluster(4, 4), avoided_by_all("n1"))
    assert "a" in admit(seen, labelled).floors and "a" not in notes


def test_what_a_job_tells_is_bounded_and_forgotten() -> None:
    record = NodeRecord()
    failures = [dataclasses.replace(failure(f"n{i}", "w"), cause="x" * 10_000) for i in range(100)]
    record.receive(told("a", *failures), 0.0)
    rows = record.rows(0.0)
    assert len(rows) == 32 and max(len(row.cause) for row in rows) == 200
    record.discard(1.0, {"n99"})
    assert [row.node for row in record.rows(1.0)] == ["n99"]
