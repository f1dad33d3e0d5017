"""What the page makes of a real allocator core's answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest

from elastic_ray.events import EventKind, JobEvent, JobPhase, JobStatus, Pause, TrialFacts
from elastic_ray.observe.page.cluster_page import ClusterPage
from elastic_ray.observe.page.feed import tables, to_json
from elastic_ray.observe.page.job_memory import MOST_POINTS, JobMemory, pauses, shares_of_time
from elastic_ray.observe.page.model import PageJob, PageSnapshot
from elastic_ray.observe.page.rows import node_row
from elastic_ray.observe.page.source import ClusterLook, JobAnswer, JobFacts, JobLook, NodeLook
from elastic_ray.observe.page.sources.live import compare
from placement.allocator.config import AllocatorConfig
from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobEnded, JobHeartbeat, NodesChanged
from placement.allocator.snapshot import AllocatorLook
from placement.autoscaling.autoscaler import ScalingDecision
from placement.autoscaling.objectives.base import WantedSize
from placement.cluster.jobs import Progress
from placement.cluster.node_record import NodeFailure, NodeRecord
from placement.errors import InputError
from placement.planning.tenants import Tenant
from placement.policies import make_policy
from placement.reasons import Cause, Reason
from tests.placement.views import cluster, view


class World:
    """An allocator core, and a page that looks at it."""

    def __init__(self, *cpus: float, tenants: tuple[Tenant, ...] = ()) -> None:
        self.tenants = tenants
        self.core = AllocatorCore(
            make_policy("goodput"), AllocatorConfig(gather_s=0.0, min_interval_s=0.0, tenants=tenants)
        )
        self.page = ClusterPage("test", actions=True)
        self.cluster = cluster(*cpus)
        self.core.handle(NodesChanged(cluster=self.cluster), 1000.0)
        self.nodes = [n.node_id for n in self.cluster.nodes]

    def receive(self, job: str, now_s: float, **fields: Any) -> None:
        """A job's heartbeat; it is where it is to be."""
        states = self.core.snapshot().jobs
        held = states[job].target if job in states else {}
        own = view(job, allocation=held, most_workers=8, submitted_s=1000.0, **fields)
        self.core.handle(JobHeartbeat(view=own), now_s)

    def poll(self, now_s: float, *jobs: JobLook, life: str = "a", **more: Any) -> PageSnapshot:
        known = self.page.known
        allocator = AllocatorLook(
            core=self.core.snapshot(known[1] if known[0] == life else 0),
            recorded=self.core.recorded,
            life=life,
            tenants=self.tenants,
            decided_s=self.core.decided_s,
            decision_cpu_s=0.01,
            **more,
        )
        nodes = tuple(
            NodeLook(node=n.node_id, address=f"10.0.0.{i}", total=n.total, labels=n.labels)
            for i, n in enumerate(self.cluster.nodes)
            if n.node_id in self.nodes
        )
        alive = frozenset(self.core.jobs)
        self.page.take(ClusterLook(now_s=now_s, allocator=allocator, jobs=jobs, alive=alive, nodes=nodes))
        return self.page.snapshot(now_s)


def answer(job: str, step: int = 0, events: tuple[JobEvent, ...] = (), **status: Any) -> JobLook:
    fields: dict[str, Any] = {"phase": JobPhase.RUNNING, "workers": 2, "batch_size": 64, "step": step, **status}
    return JobLook(
        job=job,
        status=JobStatus(job=job, **fields),
        facts=JobFacts(min_workers=1, max_workers=8, storage=f"/runs/{job}"),
        events=events,
    )


def event(kind: EventKind, time_s: float, before: int, after: int, **more: Any) -> JobEvent:
    return JobEvent(kind=kind, time_s=time_s, from_workers=before, to_workers=after, reason="why", **more)


def row(snapshot: PageSnapshot, job: str) -> PageJob:
    return next(each for each in snapshot.jobs if each.job == job)


def test_bars_are_the_decisions_and_end_with_their_job() -> None:
    world = World(4, 4)
    world.receive("a", 1001.0)
    world.poll(1001.5)
    world.receive("b", 1010.0)
    seen = world.poll(1010.5)
    now = world.core.snapshot().jobs
    placed = {(bar[1], bar[2]): bar[5] for bar in seen.bars if bar[4] is None}
    assert placed == {(n, job): w for job, state in now.items() for n, w in state.target.items()}
    reasons = {each.number: each.reason for each in seen.decisions}
    assert all(reasons[bar[6]] for bar in seen.bars)
    world.core.handle(JobEnded(job="a"), 1020.0)
    ended = world.poll(1020.5)
    assert not [bar for bar in ended.bars if bar[2] == "a" and bar[4] is None]
    assert row(ended, "a").phase == "silent" or row(ended, "a").ended_s == 1020.5
    assert to_json(tables(ended))


def test_what_one_job_answers_costs_the_others_nothing() -> None:
    world = World(4)
    world.receive("a", 1001.0)
    huge = answer("a", 1, metrics={"loss": 2**1024 - 1})
    broken = answer("c", 1, events=(event("no kind", 1.0, 1, 2),))
    seen = world.poll(1001.5, huge, broken, answer("b", 2, metrics={"loss": 0.5}))
    assert row(seen, "a").metrics == {} and row(seen, "b").metrics == {"loss": 0.5}
    assert len(to_json(tables(seen))) < 20_000


def test_texts_have_an_end() -> None:
    world = World(4)
    world.receive("a", 1001.0)
    long = answer("a", 1, message="x" * 1_000_000, events=(event(EventKind.RESIZE, 1.0, 1, 2),))
    assert len(row(world.poll(1001.5, long), "a").why) <= 500


def test_a_checkpoint_is_marked_once_when_it_is_stored() -> None:
    world = World(4)
    world.receive("a", 1001.0)
    seen = [
        world.poll(1001.0 + n, answer("a", n, checkpoint=path)) for n, path in enumerate(("", "/x/1", "/x/1", "/x/2"))
    ]
    marks = [(mark[1], mark[2], mark[4]) for mark in seen[-1].marks if mark[3] == "checkpoint"]
    assert marks == [(1002.0, "a", "stored as /x/1"), (1004.0, "a", "stored as /x/2")]


def test_page_that_comes_late_sees_what_was_before_it() -> None:
    world = World(4)
    world.receive("a", 1001.0)
    world.core.handle(JobEnded(job="a"), 1005.0)
    world.receive("b", 1006.0)
    seen = world.poll(2000.0)
    assert [(bar[2], bar[3], bar[4]) for bar in seen.bars] == [("a", 1001.0, 1006.0), ("b", 1006.0, None)]
    assert [each.number for each in seen.decisions] == list(range(1, len(seen.decisions) + 1))
    assert seen.use[0][:3] == (1001.0, sum(b[5] for b in seen.bars if b[2] == "a"), None)


def test_another_allocator_counts_its_decisions_anew() -> None:
    world = World(4)
    world.receive("a", 1001.0)
    first = world.poll(1001.5)
    assert len(world.poll(1002.0).decisions) == len(first.decisions)
    assert len(world.poll(1003.0, life="b").decisions) == 2 * len(first.decisions)


def test_the_strip_counts_every_slot_once() -> None:
    world = World(4, 2)
    world.receive("a", 1001.0)
    seen = world.poll(1001.5, answer("a", workers=1, target_workers=6))
    (count,) = seen.strip.slots
    target = row(seen, "a").target
    assert count.type == "CPU" and count.used + count.starting + count.idle + count.draining + count.other == 6
    assert count.used + count.starting == target == 6 and count.starting == 5
    assert seen.strip.running == 1 and seen.strip.policy == "goodput" and seen.strip.decision_cpu_s == 0.01
    assert seen.strip.speed is not None and seen.strip.speed_one_each == pytest.approx(1.0)
    assert seen.strip.speed >= seen.strip.speed_equal > 0  # it has the cluster for itself
    world.nodes = world.nodes[:1]
    gone = world.poll(1002.0)
    assert [(mark[2], mark[3]) for mark in gone.marks] == [("", "gone")]
    assert [each.gone_s for each in gone.nodes] == [None, 1002.0]


def test_draining_node_is_marked_once_and_is_not_idle() -> None:
    world = World(4, 2)
    world.receive("a", 1001.0, max_workers=1)
    world.poll(1001.5)
    world.core.handle(NodesChanged(cluster=world.cluster.draining({"n1"})), 1002.0)
    world.poll(1002.5)
    seen = world.poll(1003.0)
    assert [(mark[1], mark[3]) for mark in seen.marks] == [(1002.5, "drain")]
    (count,) = seen.strip.slots
    assert (count.draining, count.idle + count.used + count.starting) == (2, 4)


def test_a_job_tells_where_it_stands_and_what_happened() -> None:
    world = World(8)
    progress = Progress(done=300.0, epoch_ends=(100.0, 200.0, 300.0), epochs=10.0)
    world.receive("a", 1001.0, progress=progress, held_at=2, deadline_s=5000.0)
    events = (event(EventKind.STARTED, 1001.0, 0, 2), event(EventKind.RESIZE, 1002.0, 1, 2, pause_s=0.5))
    seen = world.poll(1003.0, answer("a", 10, events, goodput=100.0, efficiency=0.5, metrics={"loss": 0.25}))
    job = row(seen, "a")
    assert (job.held_at, job.metrics["loss"], job.efficiency, job.deadline_s) == (2, 0.25, 0.5, 5000.0)
    assert job.progress == pytest.approx(0.3) and job.eta_s == pytest.approx(700.0 * 64 / 100.0)
    assert [mark[3] for mark in seen.marks] == ["resize"]
    detail = world.page.detail("a", JobAnswer(explanation=world.core.explain("a")), 1003.0)
    assert detail is not None and detail.explanation.startswith("job a has 2 workers") and detail.pauses[0][2] == 0.5
    assert [size for size, _ in detail.curve] == list(range(1, 9)) and len(detail.events) == 2
    assert detail.gain == pytest.approx(dict(detail.curve)[3] - dict(detail.curve)[2])  # its model is its own
    assert world.page.detail("b", JobAnswer(), 1003.0) is None
    world.poll(1004.0, answer("a", 9, mfu=0.4, backend="nccl", memory_bound=16))
    detail = world.page.detail("a", JobAnswer(), 1005.0)
    assert detail is not None and (detail.mfu, detail.backend, detail.memory_bound) == (0.4, "nccl", 16)


def test_metrics_and_rates_not_finite_are_left_out() -> None:
    world = World(4)
    world.receive("a", 1001.0)
    seen = world.poll(1002.0, answer("a", 3, metrics={"loss": "<b>"}, goodput=float("inf"), throughput=1.0))
    assert row(seen, "a").metrics == {} and row(seen, "a").goodput is None and to_json(tables(seen))


def test_tenants_are_owed_by_weight_and_lend_the_rest() -> None:
    world = World(8, tenants=(Tenant(name="x", weight=3.0, quota={"CPU": 6.0}), Tenant(name="y")))
    world.receive("a", 1001.0, tenant="x", max_workers=2)
    world.receive("b", 1002.0, tenant="y", max_workers=8)
    seen = {each.tenant: each for each in world.poll(1003.0).tenants}
    assert seen["x"].owed == 0.75 and seen["y"].owed == 0.25 and seen["x"].quota == {"CPU": 6.0}
    assert seen["x"].used == 0.25 and seen["x"].lent == pytest.approx(0.5)
    assert seen["y"].borrowed == pytest.approx(seen["y"].used - 0.25) and seen["y"].used > 0.25


def test_missing_nodes_are_told_with_since_when_and_whom() -> None:
    world = World(1)
    world.receive("a", 1001.0, min_workers=1)
    want = {"a": WantedSize(job="a", workers=4, gpu="", reason=Reason(Cause.EXPLORES, ("4 workers",)))}
    fields: Mapping[str, Any] = {"release": (), "leaving": (), "notes": {}, "usd_per_h": 2.5, "wants": want}
    short = ScalingDecision(
        nodes={"big": 2}, add={"big": 1}, reasons={"big": Reason(Cause.UNUSED, (), "0 -> 2 nodes")}, **fields
    )
    world.poll(1002.0, scaling=short)
    seen = world.poll(1010.0, scaling=short)
    (wanted,) = seen.wanted
    assert (wanted.type, wanted.wanted, wanted.missing, wanted.since_s, wanted.jobs) == ("big", 2, 1, 1002.0, ("a",))
    assert (wanted.reason, wanted.figures, seen.strip.usd_per_h) == ("no job needs them", "0 -> 2 nodes", 2.5)
    there = dataclasses.replace(short, add={})
    assert world.poll(1011.0, scaling=there).wanted[0].since_s is None


def test_a_long_series_is_thinned_and_keeps_its_ends() -> None:
    memory = JobMemory("a", "#000000", 0.0)
    for n in range(5000):
        memory.receive(answer("a", n), float(n))
    times = [point[0] for point in memory.series]
    assert len(times) <= MOST_POINTS and times[0] == 1.0 and times == sorted(times) and (times[-1] or 0) > 4900
    assert memory.series[-1][1] == pytest.approx(64.0 * (times[-1] or 0))


def test_time_goes_to_waiting_pausing_and_training() -> None:
    told = (
        event(EventKind.STARTED, 10.0, 0, 2),
        event(EventKind.RESIZE, 20.0, 2, 3, pause_s=1.0, detail={"vote_s": 0.25, "group_s": 0.5}),
        event(EventKind.PREEMPTED, 30.0, 3, 0),
        event(EventKind.STARTED, 50.0, 0, 2),
    )
    shares = {"training": 69.0, "catching up": 0.0, "pausing": 1.0, "starting": 0.0, "waiting": 30.0}
    assert shares_of_time(told, None, 0.0, 100.0) == shares
    own = dataclasses.replace(answer("a", 1).status, training_s=5.0, waiting_s=2.0)
    assert shares_of_time(told, own, 0.0, 100.0) == dict.fromkeys(shares, 0.0) | {"training": 5.0, "waiting": 2.0}
    assert pauses(told) == ((20.0, "resize", 1.0, {"vote": 0.25, "group": 0.5, "other": 0.25}),)
    (last,) = pauses(told, Pause(vote_s=0.25, group_s=0.5, first_step_s=0.125))
    assert last[2] == 1.0 and last[3]["first step"] == 0.125


def test_what_if_takes_registered_policies_only() -> None:
    world = World(4)
    world.receive("a", 1001.0)
    look = AllocatorLook(core=world.core.snapshot(), recorded=0, life="a")
    with pytest.raises(InputError, match="policy must be one of"):
        compare(look, "", "os:system", 1002.0)  # a name that make_policy would import
    with pytest.raises(InputError, match="no elastic job runs"):
        compare(None, "", "", 1002.0)
    with pytest.raises(InputError, match="cluster must look like"):
        compare(look, "x", "", 1002.0)
    for many in ("cpu:999999999x1", "cpu:600x1,T4:600x1", "cpu:1x999999999"):  # which would fill this machine
        with pytest.raises(InputError, match="nodes must be 1000 at most"):
            compare(look, many, "", 1002.0)
    now, then = compare(look, "cpu:1x2", "fifo", 1002.0)
    assert [each.job for each in now] == ["a"] == [each.job for each in then] and then[0].workers <= 2


def test_a_node_says_which_workers_failed_there() -> None:
    failed = NodeFailure(node="n0", worker="w1", cause="OSError: no disk", age_s=0.0, starting=True)
    record = NodeRecord()
    record.receive(view("a", node_failures=(failed,)), 0.0)
    (history,) = record.rows(1.0)
    row = node_row(NodeLook(node="n0", address="10.0.0.1", total={"CPU": 4.0}, labels={}), None, 0.0, history)
    assert row.failures == "1 worker of a failed, avoided by a for 10 min; the last: OSError: no disk"


def test_a_node_tells_when_it_came_and_went() -> None:
    page = ClusterPage("here")
    nodes = {name: NodeLook(node=name, address=name, total={"CPU": 4.0}, labels={}) for name in ("n0", "n1")}
    for now_s, there in ((1.0, ("n0",)), (5.0, ("n0", "n1")), (9.0, ("n0",)), (12.0, ("n0", "n1"))):
        page.take(ClusterLook(now_s=now_s, allocator=None, nodes=tuple(nodes[name] for name in there)))
        told = {each.node: (each.since_s, each.gone_s) for each in page.snapshot(now_s).nodes}
        assert told["n0"] == (None, None), "it was there before the page"
        assert told.get("n1") == {1.0: None, 5.0: (5.0, None), 9.0: (5.0, 9.0), 12.0: (12.0, None)}[now_s]


def test_a_node_without_slots_has_no_lane() -> None:
    page = ClusterPage("here")
    nodes = tuple(
        NodeLook(node=name, address=name, total={"CPU": cpus}, labels={}) for name, cpus in (("head", 0.0), ("n0", 4.0))
    )
    trial = TrialFacts(sweep="s", parameters={"lr": 0.1}, metric="eval/accuracy", mode="max")
    metrics = {"eval": {"accuracy": 0.9}, "loss": math.nan}
    status = answer("a", metrics=metrics, trial=trial).status
    look = JobLook(job="a", status=status, facts=JobFacts(min_workers=1, max_workers=2))
    page.take(ClusterLook(now_s=1.0, allocator=None, jobs=(look,), alive=frozenset({"a"}), nodes=nodes))
    seen = page.snapshot(1.0)
    assert [each.node for each in seen.nodes] == ["n0"]
    (row,) = seen.jobs
    assert (row.score, row.metrics, row.parameters) == (0.9, {"eval/accuracy": 0.9}, {"lr": 0.1})
