"""The allocator's brain, driven by plain events."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.allocator.config import AllocatorConfig
from placement.allocator.core import IMPOSSIBLE_S, AllocatorCore
from placement.allocator.events import (
    Allocate,
    Event,
    Instruction,
    JobEnded,
    JobHeartbeat,
    NodesChanged,
    TimePassed,
    Unsatisfiable,
)
from placement.allocator.recording import SteadyClock
from placement.cluster.cluster import Cluster, check
from placement.cluster.jobs import JobView
from placement.goodput.fitting import Observation
from placement.policies import FixedPolicy, GoodputPolicy, Policy, Target
from tests.placement.views import AT_ONCE, cluster, model, node, view


class World:
    """Jobs that do at once what they are told, and report it with their next heartbeat."""

    def __init__(self, *cpus: float, policy: Policy | None = None, settling: bool = False) -> None:
        self.core = AllocatorCore(policy or GoodputPolicy(), AT_ONCE, settling=settling)
        self.views: dict[str, JobView] = {}
        self.now_s = 0.0
        self.send(NodesChanged(cluster=cluster(*cpus)))

    def send(self, event: Event, after_s: float = 0.1) -> list[Instruction]:
        self.now_s += after_s
        instructions = self.core.handle(event, self.now_s)
        for instruction in instructions:
            if isinstance(instruction, Allocate) and instruction.job in self.views:
                before = self.views[instruction.job]
                most = max(before.most_workers, sum(instruction.nodes.values()))
                self.views[instruction.job] = dataclasses.replace(
                    before, allocation=dict(instruction.nodes), most_workers=most
                )
        return instructions

    def beat(self, job: str, after_s: float = 0.1) -> list[Instruction]:
        return self.send(JobHeartbeat(view=self.views[job]), after_s)

    def arrive(self, new: JobView, after_s: float = 0.1) -> list[Instruction]:
        self.views[new.job] = new
        return self.beat(new.job, after_s)

    def end(self, job: str) -> list[Instruction]:
        del self.views[job]
        return self.send(JobEnded(job=job))

    def sizes(self) -> dict[str, int]:
        return {job: sum(state.target.values()) for job, state in self.core.snapshot().jobs.items()}


def test_a_paused_job_gets_nothing_until_it_is_resumed() -> None:
    world = World(4)
    world.arrive(view("a", max_workers=4))
    world.arrive(view("b", max_workers=4))
    world.views["a"] = dataclasses.replace(world.views["a"], paused="paused by hand")
    told = [each for each in world.beat("a") if isinstance(each, Allocate) and each.job == "a"]
    assert [(each.nodes, str(each.reason)) for each in told] == [({}, "paused by hand")]
    world.beat("a")
    assert world.sizes()["a"] == 0 and world.sizes()["b"] > 0
    assert [each.job for each in world.core.views_to_scale_for(world.now_s)] == ["b"]  # no node is asked for it
    assert world.core.snapshot().jobs["a"].reason.words == "paused by hand"
    world.send(NodesChanged(cluster=cluster(0)))  # nothing could hold it now, which is no matter while it is paused
    told_all = [each for _ in range(8) for job in "ab" for each in world.beat(job, 1.0)]
    assert {each.job for each in told_all if isinstance(each, Unsatisfiable)} == {"b"}
    world.send(NodesChanged(cluster=cluster(4)))
    world.views["a"] = dataclasses.replace(world.views["a"], paused="")
    world.beat("a")
    assert world.sizes()["a"] > 0


def test_arrivals_and_ends_are_decided_at_once() -> None:
    world = World(8)
    assert [i.job for i in world.arrive(view("a"))] == ["a"]
    assert world.sizes() == {"a": 8}
    shrink, start = world.arrive(view("b", submitted_s=1.0))
    assert (shrink.job, start.job) == ("a", "b")  # those that give back come first
    assert world.sizes() == {"a": 4, "b": 4}
    (grow,) = world.end("a")
    assert isinstance(grow, Allocate)
    assert grow.nodes == {"n0": 8}
    assert "growth pays: " in str(grow.reason) and "4 -> 8 workers" in grow.reason.explained


@dataclasses.dataclass
class Told:
    """A policy that gives every job as many workers as it is told."""

    workers: int
    name = "told"

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """All alike."""
        return {each.job: Target(workers=self.workers, reason="as told") for each in jobs}


def test_job_that_loses_workers_is_not_said_to_stay() -> None:
    policy = Told(4)
    world = World(8, policy=policy)
    noisy = (Observation(nodes=1, replicas=4, atomic_bsz=8, accum_steps=0, step_time=1.0, spread=0.5),)
    world.arrive(view("a", max_workers=8, observations={"": noisy}))
    reasons = []
    for policy.workers in (3, 3, 0):
        for _ in range(16):
            world.beat("a", 1.0)
            world.send(TimePassed(), 1.0)
        reasons.append(str(world.core.snapshot().jobs["a"].reason))
    assert reasons[1].startswith("measured noise keeps the size") and world.sizes() == {"a": 0}
    assert reasons[2] == "told: as told", "a policy may let others go first all the same"


def test_heartbeats_without_news_decide_nothing() -> None:
    world = World(8)
    world.arrive(view("a"))
    length = len(world.core.log)
    assert [i for _ in range(100) for i in world.beat("a")] == []
    assert len(world.core.log) == length


def test_job_not_where_it_should_be_is_told_again() -> None:
    world = World(4)
    (first,) = world.arrive(view("a"))
    world.views["a"] = dataclasses.replace(world.views["a"], allocation={"n0": 1})
    (again,) = world.beat("a")
    assert isinstance(first, Allocate)
    assert again == first


def test_nobody_is_told_again_of_a_node_gone() -> None:
    """Without any node nothing is decided, and the old place is no place."""
    world = World(4)
    world.arrive(view("a"))
    world.send(NodesChanged(cluster=Cluster()))
    world.views["a"] = dataclasses.replace(world.views["a"], allocation={})
    assert not [each for each in world.beat("a") if isinstance(each, Allocate)]


def test_changed_model_waits_for_interval_and_is_then_decided() -> None:
    world = World(8)
    world.arrive(view("a"))
    world.arrive(view("b", submitted_s=1.0))
    world.views["b"] = dataclasses.replace(world.views["b"], goodput=model(noise=0.01, sync_s=5.0))
    assert world.beat("b") == []
    world.send(TimePassed(), 2.0)
    assert world.sizes() == {"a": 7, "b": 1}
    assert world.core.log[-1].trigger == "model"


def test_snapshot_has_records_after_one_that_was_read_last() -> None:
    world = World(8)
    world.arrive(view("a"))
    world.arrive(view("b", submitted_s=1.0))
    log, last = world.core.log, world.core.recorded
    assert len(log) == last >= 3
    assert world.core.snapshot().log == world.core.snapshot(0).log == log
    assert world.core.snapshot(last - 1).log == log[-1:] and world.core.snapshot(last).log == ()


def test_exploration_doubles() -> None:
    world = World(8)
    world.arrive(view("a", goodput=None))
    seen = [world.sizes()["a"]]
    for _ in range(4):
        world.beat("a", 2.1)
        seen.append(world.sizes()["a"])
    assert seen == [2, 4, 8, 8, 8]


def test_lost_node_is_decided_at_once_and_survivors_stay() -> None:
    world = World(4, 4)
    world.arrive(view("a"))
    (told,) = world.send(NodesChanged(cluster=cluster(4)))
    assert isinstance(told, Allocate)
    assert told.nodes == {"n0": 4}
    assert (world.core.log[-1].from_workers, world.core.log[-1].trigger) == (8, "nodes")


def test_others_use_of_the_cluster_is_respected() -> None:
    world = World(8)
    world.arrive(view("a"))
    world.send(NodesChanged(cluster=Cluster(nodes=(node("n0", 8, free=5),))))
    assert world.sizes() == {"a": 5}
    world.send(NodesChanged(cluster=cluster(8)), 3.0)
    assert world.sizes() == {"a": 8}


def test_holding_and_releasing() -> None:
    world = World(8)
    world.arrive(view("a"))
    world.views["a"] = dataclasses.replace(world.views["a"], held_at=2)
    world.beat("a")
    assert world.sizes() == {"a": 2}
    world.views["a"] = dataclasses.replace(world.views["a"], held_at=None)
    world.beat("a")
    assert world.sizes() == {"a": 8}


def test_silent_jobs_are_dropped_and_others_grow() -> None:
    world = World(8)
    world.arrive(view("a"))
    world.arrive(view("b", submitted_s=1.0))
    for _ in range(12):
        world.beat("a", 1.0)
        world.send(TimePassed(), 0.0)
    assert world.sizes() == {"a": 8}
    assert "no heartbeat for" in next(record.reason.words for record in world.core.log if record.trigger == "silence")


def test_a_restarted_allocator_shuffles_nobody() -> None:
    before = World(4, 4)
    for i, job in enumerate("abc"):
        before.arrive(view(job, submitted_s=float(i)))
    after = World(4, 4, settling=True)
    assert after.send(TimePassed(), 5.0) == []  # the jobs take a while to find it
    instructions = [i for known in before.views.values() for i in after.arrive(known)]
    assert instructions == []
    assert [after.beat(job, 1.0) for job in "abc"] == [[], [], []]
    assert after.sizes() == before.sizes()
    assert after.core.snapshot().settled


def test_a_newcomers_own_workers_are_not_others_use() -> None:
    world = World(4, 4)
    world.send(NodesChanged(cluster=Cluster(nodes=(node("n0", 4, free=0), node("n1", 4)))))
    world.arrive(view("a"))
    assert world.sizes() == {"a": 4}
    world.views["b"] = view("b", submitted_s=1.0, allocation={"n0": 4})
    assert world.send(JobHeartbeat(view=world.views["b"], cluster=cluster(4, 4))) == []
    assert world.sizes() == {"a": 4, "b": 4}


def test_an_allocator_that_slept_drops_nobody() -> None:
    world = World(8)
    world.arrive(view("a"))
    assert world.send(TimePassed(), 3600.0) == []
    assert world.sizes() == {"a": 8}


def test_nothing_is_decided_while_no_node_is_known() -> None:
    world = World(8)
    world.arrive(view("a"))
    assert world.send(NodesChanged(cluster=Cluster()), 60.0) == []
    assert world.send(NodesChanged(cluster=cluster(8))) == []
    assert world.sizes() == {"a": 8}


def test_impossible_jobs_are_told_what_is_missing() -> None:
    world = World(4)
    world.arrive(view("a", bundle={"CPU": 1.0, "GPU": 1.0}))
    assert world.send(TimePassed(), 1.0) == []
    (told,) = world.send(TimePassed(), 3.0)
    assert isinstance(told, Unsatisfiable)
    assert "one worker needs 1 GPU, but the largest node has 0" in told.reason.explained
    assert world.send(TimePassed(), 1.0) == []
    (told,) = [i for _ in range(2) for i in world.arrive(view("b", min_workers=6), 3.0) if i.job == "b"]
    assert "the empty cluster holds 4" in told.reason.explained


def test_an_impossible_job_is_told_so_also_after_settling() -> None:
    world = World(4, settling=True)
    world.arrive(view("a", bundle={"CPU": 9.0}))
    told = [i for _ in range(5) for i in world.send(TimePassed(), IMPOSSIBLE_S / 2)]
    assert [(type(each), each.job) for each in told] == [(Unsatisfiable, "a")]


def test_room_that_appears_while_all_wait_is_used() -> None:
    world = World(8)
    world.send(NodesChanged(cluster=Cluster(nodes=(node("n0", 8, free=0),))))
    world.arrive(view("a"))
    assert world.sizes() == {"a": 0}
    world.send(NodesChanged(cluster=cluster(8)), AT_ONCE.min_interval_s / 20)
    assert world.sizes() == {"a": 8}


def test_news_that_force_nothing_wait_for_the_interval() -> None:
    world = World(8)
    world.arrive(view("a", max_workers=8, preemptible=False, min_workers=8))
    world.arrive(view("b", submitted_s=1.0), 10.0)  # a decision, which changes nothing: b waits
    decided_s = world.now_s
    world.views["a"] = dataclasses.replace(world.views["a"], goodput=model(noise=0.01, sync_s=5.0))
    world.beat("a")
    world.send(TimePassed(), AT_ONCE.min_interval_s / 2)
    assert world.core.decided_s == decided_s
    world.send(TimePassed(), AT_ONCE.min_interval_s / 2)
    assert world.core.decided_s == world.now_s


def test_what_no_offered_node_could_hold_need_not_wait() -> None:
    world, types = World(4), (node("large", 8),)
    world.send(NodesChanged(cluster=cluster(4), obtainable=types))
    world.arrive(view("fits", bundle={"CPU": 8.0}))
    world.arrive(view("never", bundle={"CPU": 9.0}))
    world.send(TimePassed(), 1.0)
    (told,) = world.send(TimePassed(), 3.0)
    assert told.job == "never" and isinstance(told, Unsatisfiable) and told.final
    elsewhere = World(4)  # another autoscaler than ours may yet bring a larger node
    elsewhere.arrive(view("later", bundle={"CPU": 9.0}))
    elsewhere.send(TimePassed(), 1.0)
    assert [told.final for told in elsewhere.send(TimePassed(), 3.0) if isinstance(told, Unsatisfiable)] == [False]


def test_a_waiting_job_is_told_why() -> None:
    world = World(2)
    world.arrive(view("a", min_workers=2, max_workers=2))
    (told,) = world.arrive(view("b", submitted_s=1.0))
    assert isinstance(told, Allocate)
    assert told.nodes == {}
    assert "waits: needs at least 1 x 1 CPU" in told.reason.explained


@dataclasses.dataclass
class Broken:
    """A policy that can be told to misbehave."""

    workers: int = 2
    name: str = "broken"

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        if self.workers < 0:
            raise RuntimeError("out of ideas")
        return {job.job: Target(workers=self.workers, reason="because") for job in jobs}


def test_policy_that_breaks_rule_changes_nothing_and_is_named() -> None:
    policy = Broken()
    world = World(4, policy=policy)
    world.arrive(view("a"))
    for workers, rule in ((6, "capacity"), (9, "maximum"), (-1, "RuntimeError")):
        policy.workers = workers
        assert world.send(NodesChanged(cluster=cluster(4.0 + workers / 100)), 3.0) == []
        assert world.sizes() == {"a": 2}
        record = world.core.log[-1]
        assert (record.trigger, record.job) == ("refused", "")
        assert f"policy 'broken' broke rule '{rule}'" in record.reason.explained


def test_bundles_without_a_node_leave_their_share_to_others() -> None:
    world = World(3, 3, policy=FixedPolicy())
    world.arrive(view("large", bundle={"CPU": 2.0}, max_workers=3))
    world.arrive(view("small", submitted_s=1.0))
    assert world.sizes() == {"large": 2, "small": 2}


def test_config_errors_say_what_would_be_right() -> None:
    with pytest.raises(ValueError, match=r"silence_s must be 0 or more, but got -1\.0"):
        AllocatorConfig(silence_s=-1.0)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 5), st.integers(1, 3)),
        st.tuples(st.just("end"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("nodes"), st.integers(0, 6), st.integers(0, 6)),
        st.tuples(st.just("time"), st.integers(1, 3), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(script=steps)
def test_whatever_happens_targets_fit_and_replays_are_equal(
    script: list[tuple[str, int, int]],
) -> None:
    def play() -> World:
        world = World(4, 4)
        for kind, x, y in script:
            if kind == "arrive" and f"j{x}" not in world.views:
                world.arrive(view(f"j{x}", min_workers=y, bundle={"CPU": 0.5 * y}, submitted_s=world.now_s))
            elif kind == "end" and f"j{x}" in world.views:
                world.end(f"j{x}")
            elif kind == "nodes":
                world.send(NodesChanged(cluster=cluster(x, y)))
            elif kind == "time":
                world.send(TimePassed(), float(x))
                for job in list(world.views):
                    world.beat(job)
            state = world.core.snapshot()
            targets = {job: s.target for job, s in state.jobs.items() if s.target}
            check(targets, {job: s.view.bundle for job, s in state.jobs.items()}, state.cluster)
            for job, s in state.jobs.items():
                assert not s.target or s.view.min_workers <= sum(s.target.values()) <= s.view.max_workers, job
        return world

    assert play().core.log == play().core.log


class Places:
    """A policy that names nodes itself."""

    name = "places"

    def __init__(self, workers: int, nodes: Mapping[str, int]) -> None:
        self.target = Target(workers=workers, reason="places: there", nodes=nodes)

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        first, *others = jobs
        return {first.job: self.target, **{v.job: Target(workers=1, reason="places: packed") for v in others}}


def test_policy_may_name_nodes_and_others_are_packed_beside() -> None:
    world = World(4, 4, policy=Places(3, {"n1": 3}))
    world.arrive(view("a"))
    world.arrive(view("b", submitted_s=1.0))
    targets = {job: dict(state.target) for job, state in world.core.snapshot().jobs.items()}
    assert targets["a"] == {"n1": 3}
    assert sum(targets["b"].values()) == 1


@pytest.mark.parametrize(
    ("workers", "nodes", "rule"), [(3, {"n0": 2}, "nodes"), (5, {"n0": 5}, "capacity"), (1, {"n9": 1}, "known node")]
)
def test_named_nodes_are_held_to_the_rules(workers: int, nodes: Mapping[str, int], rule: str) -> None:
    world = World(4, 4, policy=Places(workers, nodes))
    world.arrive(view("a"))
    assert world.sizes() == {"a": 0}
    assert f"policy 'places' broke rule '{rule}'" in world.core.log[-1].reason.explained


def test_in_rounds_only_ticks_decide() -> None:
    core = AllocatorCore(FixedPolicy(), AllocatorConfig(rounds=True, silence_s=1e9))
    core.handle(NodesChanged(cluster=cluster(4)), 0.0)
    assert core.handle(JobHeartbeat(view=view("a")), 1.0) == []
    assert [each.job for each in core.handle(TimePassed(), 60.0)] == ["a"]
    calls = len(core.log)
    assert core.handle(TimePassed(), 120.0) == []
    assert len(core.log) == calls


def test_a_job_is_told_which_of_its_nodes_go() -> None:
    world = World(4, 4)
    world.arrive(view("a"))
    before = world.views["a"].allocation
    assert len(before) == 2
    (told,) = world.send(NodesChanged(cluster=cluster(4, 4).draining({min(before)})))
    assert isinstance(told, Allocate) and told.draining == {min(before): 0.0} and min(before) not in told.nodes
    world.views["a"] = dataclasses.replace(world.views["a"], allocation=before)
    (again,) = world.beat("a")
    assert isinstance(again, Allocate) and again.draining == told.draining and not again.nodes_may_come


def test_a_job_is_told_when_its_nodes_go() -> None:
    world = World(4, 4)
    world.arrive(view("a"))
    before = world.views["a"].allocation
    goes = {"draining": True, "goes_s": world.now_s + 3.1}
    nodes = tuple(dataclasses.replace(n, **(goes if n.node_id == "n0" else {})) for n in cluster(4, 4).nodes)
    (told,) = world.send(NodesChanged(cluster=Cluster(nodes=nodes), obtainable=(node("more", 4),)))
    assert isinstance(told, Allocate) and told.draining == {"n0": pytest.approx(3.0)} and told.nodes_may_come
    world.views["a"] = dataclasses.replace(world.views["a"], allocation=before)
    (again,) = world.beat("a", after_s=2.0)
    assert isinstance(again, Allocate) and again.draining == {"n0": pytest.approx(1.0)}
    world.views["a"] = dataclasses.replace(world.views["a"], allocation=before)
    (late,) = world.beat("a", after_s=2.0)
    assert isinstance(late, Allocate) and late.draining == {"n0": 0.0}


@pytest.mark.parametrize("set_by_s", [-3600.0, 0.0, 3600.0])
def test_clock_that_is_set_moves_no_drain(set_by_s: float) -> None:
    world = World(4)
    world.arrive(view("a"))
    job, now_s = world.views["a"], world.now_s
    going = dataclasses.replace(world.core.cluster.nodes[0], draining=True, goes_s=now_s + 100.0)
    world.send(NodesChanged(cluster=Cluster(nodes=(going, node("n1", 4)))), 0.0)
    (told,) = world.core.handle(JobHeartbeat(view=job), now_s + 3.0 + set_by_s, now_s + 3.0)
    assert isinstance(told, Allocate) and told.draining == {"n0": pytest.approx(97.0)}


@pytest.mark.parametrize("others", [(), (4,)])
def test_job_that_gets_new_nodes_hears_of_draining(others: tuple[float, ...]) -> None:
    world = World(4, *others)
    world.arrive(view("a"))
    there = world.views["a"]
    going = {"draining": True, "goes_s": world.now_s + 600.0}
    first, *rest = cluster(4, *others).nodes
    nodes = (dataclasses.replace(first, **going), *rest)
    world.send(NodesChanged(cluster=Cluster(nodes=nodes), obtainable=(node("more", 4),)))
    world.views["a"] = there  # it trains on
    world.beat("a")
    more = NodesChanged(cluster=Cluster(nodes=(*nodes, node("new", 4))), obtainable=(node("more", 4),))
    (told,) = [each for each in world.send(more, 10.0) if isinstance(each, Allocate)]
    assert "new" in told.nodes
    assert told.draining == {"n0": pytest.approx(589.8)} and told.nodes_may_come


def test_job_without_nodes_hears_of_draining_with_each_reason() -> None:
    world = World(4)
    world.arrive(view("a", min_workers=4))
    before = world.views["a"].allocation
    going = {"draining": True, "goes_s": world.now_s + 60.0}
    nodes = tuple(dataclasses.replace(each, **going) for each in cluster(4).nodes)
    told = world.send(NodesChanged(cluster=Cluster(nodes=nodes), obtainable=(node("more", 4),)))
    world.views["a"] = dataclasses.replace(world.views["a"], allocation=before)
    told += world.beat("a")
    told += world.send(NodesChanged(cluster=Cluster(nodes=(*nodes, node("small", 1))), obtainable=(node("more", 4),)))
    orders = [each for each in told if isinstance(each, Allocate)]
    assert len(orders) > 1 and all(each.nodes == {} and each.draining and each.nodes_may_come for each in orders)


def test_what_orphaned_workers_hold_is_given_to_nobody() -> None:
    world = World(4, 4)
    world.arrive(view("a"))
    world.arrive(view("b", submitted_s=1.0))
    assert world.sizes() == {"a": 4, "b": 4}
    (held,) = world.views.pop("a").allocation
    still = Cluster(nodes=tuple(node(n, 4, free=0 if n == held else 4) for n in ("n0", "n1")))
    assert world.send(JobEnded(job="a", cluster=still)) == [] and world.sizes() == {"b": 4}
    (grow,) = world.send(NodesChanged(cluster=cluster(4, 4)), 3.0)
    assert isinstance(grow, Allocate) and grow.nodes == {"n0": 4, "n1": 4}


# --- bursts ---


def test_one_decision_serves_burst_and_drops_no_running_job() -> None:
    """400 jobs come while 60 run and an allocator is too busy to hear anybody: for 12 s, then for 3 s in each 3.5."""
    core = AllocatorCore(FixedPolicy())
    gather_s = AllocatorConfig().gather_s
    core.handle(NodesChanged(cluster=cluster(*[8.0] * 64)), 0.0)
    running = [view(f"r{i}", max_workers=1) for i in range(60)]
    for each in running:
        core.handle(JobHeartbeat(view=each), 0.01)
    assert core.due_s == pytest.approx(0.01 + gather_s) and not core.log, "the first news sets the time"
    assert len(core.handle(TimePassed(), core.due_s or 0.0)) == 60 and core.due_s is None

    now_s = 1.0
    core.handle(TimePassed(), now_s)
    for i in range(400):
        now_s += 12.0 / 400
        core.handle(JobHeartbeat(view=view(f"a{i}", max_workers=1, submitted_s=1.0 + i)), now_s)
    for _ in range(2):
        core.handle(TimePassed(), now_s)
        now_s += 3.0
        core.handle(TimePassed(), now_s)
        now_s += 0.5
    state = core.snapshot()
    assert len(state.jobs) == 460 and all(job.target for job in state.jobs.values())
    assert not [record for record in state.log if record.trigger == "silence"]
    for _ in range(30):  # now it listens, and nobody says anything
        now_s += 0.5
        core.handle(TimePassed(), now_s)
    assert not core.jobs


def test_a_burst_of_milliseconds_is_one_decision() -> None:
    class Counted(FixedPolicy):
        calls = 0

        def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
            Counted.calls += 1
            return super().decide(jobs, cluster, now_s)

    core = AllocatorCore(Counted())
    core.handle(NodesChanged(cluster=cluster(*[8.0] * 64)), 0.0)
    for i in range(400):
        core.handle(JobHeartbeat(view=view(f"a{i}", max_workers=1)), 0.05 * i / 400)
        assert core.due_s == pytest.approx(AllocatorConfig().gather_s)
    core.handle(TimePassed(), core.due_s or 0.0)
    assert Counted.calls == 1 and all(job.target for job in core.snapshot().jobs.values())


# --- clocks ---


class SetClock:
    """A time of day that is set now and then, and a clock that is not."""

    def __init__(self) -> None:
        self.wall_s, self.monotonic_s = 1.7e9, 50.0
        self.clock = SteadyClock(lambda: self.wall_s, lambda: self.monotonic_s)

    def passes(self, seconds: float, set_by_s: float = 0.0) -> tuple[float, float]:
        self.monotonic_s += seconds
        self.wall_s += seconds + set_by_s
        return self.clock.read()


def test_both_clocks_are_one_until_time_is_set() -> None:
    set_clock = SetClock()
    for seconds in (0.0, 0.3, 7.0, 3600.0):
        wall_s, steady_s = set_clock.passes(seconds)
        assert wall_s == steady_s == set_clock.wall_s
    before_s = set_clock.passes(1.0)[1]
    assert set_clock.passes(2.0, -3600.0) == (set_clock.wall_s, pytest.approx(before_s + 2.0))
    assert set_clock.passes(2.0, 7200.0) == (set_clock.wall_s, pytest.approx(before_s + 4.0))
    assert set_clock.passes(0.0, -0.1)[1] >= before_s + 4.0 - 1e-6, "it never decreases, also where time is slewed"


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.sampled_from((0.0, 0.0, -600.0, -3600.0, 5.0, 3600.0, 1e6)), min_size=5, max_size=40))
def test_however_clock_is_set_news_are_decided_at_once(steps: list[float]) -> None:
    """Each second the clock may be set; then a job says that it lives, and another one arrives or ends."""
    set_clock, core = SetClock(), AllocatorCore(GoodputPolicy(), AT_ONCE)
    core.handle(NodesChanged(cluster=cluster(64)), *set_clock.passes(0.0))
    steady = view("steady", max_workers=2)
    core.handle(JobHeartbeat(view=steady), *set_clock.passes(0.1))
    for number, step_s in enumerate(steps):
        times = set_clock.passes(0.5, step_s)
        core.handle(TimePassed(), *times)
        core.handle(JobHeartbeat(view=steady), *times)
        job = f"j{number // 2}"
        told = JobEnded(job=job) if number % 2 else JobHeartbeat(view=view(job, max_workers=2))
        core.handle(told, *set_clock.passes(0.5))
        known = core.snapshot().jobs
        assert "steady" in known and core.settled
        assert (job in known) == (number % 2 == 0)
        assert all(state.target for state in known.values()), "it was decided at once"
        assert core.decided_s is not None and abs(core.decided_s - set_clock.wall_s) < 2.0
        assert abs(known["steady"].heard_s - set_clock.wall_s) < 2.0, "as the time of day is now"
