"""The allocator on a real Ray cluster, with stand-ins for the jobs' controllers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from placement.allocator.actor import Allocator, PolicyConflictError, get_or_create_allocator
from placement.allocator.config import AllocatorConfig
from placement.allocator.recording import read_recording, replay
from placement.allocator.snapshot import CoreSnapshot
from placement.autoscaling.autoscaler import AutoscalerConfig, Autoscaling
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.cluster.node_types import NodeType
from placement.ray_cluster.groups import hold, of_jobs, ready, release, reserve
from placement.ray_cluster.named_actors import NAMESPACE
from placement.ray_cluster.snapshot import group_name, on_head
from placement.versions import Spoken, VersionError, spoken
from tests.local_cluster import disconnect

pytestmark = pytest.mark.usefixtures("ray_nodes")


class Controller:
    """The smallest job controller: reserves what it is told to, gives back the rest, and says so."""

    def __init__(self, job: str, fields: dict[str, Any]) -> None:
        self.job = job
        self.fields = fields
        self.groups: dict[int, tuple[str, PlacementGroup]] = {}
        self.held: set[int] = set()
        self.wanted: dict[str, int] = {}
        self.told: list[tuple[float, dict[str, int], str]] = []
        self.impossible = ""
        self.serial = 0
        self.speaks = True
        self.ended = False
        self.submitted_s = time.time()
        self.beating = asyncio.get_event_loop().create_task(self.beat_on())

    async def beat_on(self) -> None:
        while True:
            if self.speaks:
                await self.beat()
            await asyncio.sleep(0.5)

    async def beat(self) -> None:
        allocation: dict[str, int] = {}
        for serial in self.held:
            node = self.groups[serial][0]
            allocation[node] = allocation.get(node, 0) + 1
        view = JobView(
            job=self.job,
            submitted_s=self.submitted_s,
            allocation=allocation,
            most_workers=max(8, len(self.held)),
            **{"bundle": {"CPU": 1.0}, "max_workers": 8, **self.fields},
        )
        me = ray.get_runtime_context().current_actor
        try:
            allocator = await asyncio.to_thread(get_or_create_allocator)
            await asyncio.wait_for(allocator.heartbeat.remote(view, me), 2.0)
        except Exception:
            pass  # the allocator is being restarted; the next heartbeat finds it

    async def allocate(
        self, nodes: dict[str, int], reason: str, draining: dict[str, float], nodes_may_come: bool
    ) -> None:
        if self.ended:
            return  # the end of another job was decided upon meanwhile
        self.told.append((time.time(), nodes, reason))
        self.wanted = dict(nodes)
        for node in {node for node, _ in self.groups.values()} | set(nodes):
            mine = [serial for serial, (at, _) in self.groups.items() if at == node]
            for serial in mine[nodes.get(node, 0) :]:
                release(self.groups.pop(serial)[1])
                self.held.discard(serial)
            for _ in range(nodes.get(node, 0) - len(mine)):
                self.serial += 1
                group = reserve({"CPU": 1.0}, node, group_name(self.job, str(self.serial)))
                self.groups[self.serial] = (node, group)
                asyncio.get_event_loop().create_task(self.wait_for(self.serial, group))
        await self.beat()

    async def wait_for(self, serial: int, group: PlacementGroup) -> None:
        if await ready(group, 30.0) and serial in self.groups:
            self.held.add(serial)
            await self.beat()

    async def unsatisfiable(self, reason: object, final: bool) -> None:
        self.impossible = str(reason)

    async def state(self) -> tuple[int, list[tuple[float, dict[str, int], str]], str]:
        return len(self.held), self.told, self.impossible

    async def speak(self, speaks: bool) -> None:
        self.speaks = speaks

    async def stop(self) -> None:
        self.ended = True
        self.beating.cancel()
        for _, group in self.groups.values():
            release(group)
        with contextlib.suppress(ray.exceptions.RayActorError):  # as when the allocator is being restarted
            await get_or_create_allocator().ended.remote(self.job)


class Jobs:
    """Starts controllers and ends what is left of them."""

    def __init__(self) -> None:
        self.handles: dict[str, Any] = {}

    def start(self, job: str, **fields: Any) -> None:
        options = {"num_cpus": 0, "namespace": NAMESPACE, "lifetime": "detached", "name": f"job:{job}", **on_head()}
        self.handles[job] = ray.remote(Controller).options(**options).remote(job, fields)

    def stop(self, job: str) -> None:
        handle = self.handles.pop(job)
        try:
            ray.get(handle.stop.remote(), timeout=180)
        finally:
            ray.kill(handle)

    def held(self) -> dict[str, int]:
        return {job: ray.get(handle.state.remote(), timeout=180)[0] for job, handle in self.handles.items()}

    def told(self, job: str) -> list[tuple[float, dict[str, int], str]]:
        told: list[tuple[float, dict[str, int], str]]
        _, told, _ = ray.get(self.handles[job].state.remote(), timeout=180)
        return told


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    running = Jobs()
    yield running
    with contextlib.ExitStack() as stack:
        for job in list(running.handles):
            stack.callback(running.stop, job)
    wait_until(lambda: not living_groups(), "all groups are given back")
    # A last heartbeat may come after the news of a job's end.
    wait_until(lambda: not snapshot().jobs, "no job is known any more")


def living_groups() -> list[str]:
    table = placement_group_table().values()
    return [group["name"] for group in table if group["state"] != "REMOVED"]


def snapshot() -> CoreSnapshot:
    for _ in range(50):
        try:
            state: CoreSnapshot = ray.get(get_or_create_allocator().snapshot.remote(), timeout=180)
            return state
        except ray.exceptions.RayActorError:
            time.sleep(0.1)  # it is being restarted
    raise AssertionError("the allocator does not come back")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> float:
    start_s = time.monotonic()
    while time.monotonic() - start_s < timeout_s:
        if condition():
            return time.monotonic() - start_s
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {what}; {snapshot()}")


@pytest.mark.thorough
def test_a_policy_loads_its_solver_when_the_allocator_starts() -> None:
    """Importing it would hold the event loop, and with it all jobs; with SciPy and pandas it has twice the memory."""
    modules = ("scipy", "pandas", "torch")

    def loaded() -> list[str]:
        allocator: Any = get_or_create_allocator()
        look = allocator.__ray_call__.remote(lambda self: [name for name in modules if name in sys.modules])
        return list(ray.get(look, timeout=180))

    assert loaded() == []
    get_or_create_allocator("sia")
    wait_until(lambda: loaded() == ["scipy"], "the solver is there")
    get_or_create_allocator("goodput")
    assert loaded() == []


@pytest.mark.thorough
def test_asking_for_the_allocator_again_and_again_makes_nothing(jobs: Jobs) -> None:
    """A controller asks for head actors every few seconds; each time Ray kept classes."""
    first = get_or_create_allocator()
    made = len(Allocator.__subclasses__())
    assert all(get_or_create_allocator() == first for _ in range(5))
    assert len(Allocator.__subclasses__()) == made


def test_jobs_arrive_share_and_end(jobs: Jobs) -> None:
    jobs.start("a", goodput=None)
    wait_until(lambda: jobs.held() == {"a": 8}, "one job has everything")
    jobs.start("b", goodput=None)
    wait_until(lambda: jobs.held() == {"a": 4, "b": 4}, "two jobs share")
    records = [record for record in snapshot().log if record.job == "a"]
    assert "8 -> 4 workers" in records[-1].reason.explained
    jobs.stop("a")
    wait_until(lambda: jobs.held() == {"b": 8}, "the other one grows")


def test_a_killed_allocator_comes_back_and_shuffles_nobody(jobs: Jobs) -> None:
    jobs.start("a")
    jobs.start("b")
    wait_until(lambda: jobs.held() == {"a": 4, "b": 4}, "two jobs share")
    before = {job: jobs.told(job)[-1][1] for job in "ab"}
    ray.kill(get_or_create_allocator(), no_restart=False)
    wait_until(lambda: set(snapshot().jobs) == {"a", "b"}, "both jobs are known again")
    wait_until(lambda: snapshot().settled, "it has settled")
    time.sleep(1.0)  # longer than a decision takes: nothing may change
    assert jobs.held() == {"a": 4, "b": 4}
    assert {job: jobs.told(job)[-1][1] for job in "ab"} == before
    assert snapshot().log == ()


def test_allocator_that_is_gone_for_good_is_made_again(jobs: Jobs) -> None:
    jobs.start("a")
    wait_until(lambda: jobs.held() == {"a": 8}, "the job has everything")
    ray.kill(get_or_create_allocator(), no_restart=True)
    wait_until(lambda: set(snapshot().jobs) == {"a"}, "the job is known again")
    assert jobs.held() == {"a": 8}


@pytest.mark.thorough
def test_allocator_of_another_release_takes_over_beside_running_jobs(jobs: Jobs) -> None:
    """An upgrade: the old one is ended, the first who misses it makes the new one, which knows all from heartbeats."""
    for job in "ab":
        jobs.start(job)
    wait_until(lambda: jobs.held() == {"a": 4, "b": 4}, "two jobs share")
    told = {job: len(jobs.told(job)) for job in "ab"}
    allocator: Any = get_or_create_allocator()
    ray.get(allocator.speak.remote(spoken()), timeout=180)
    with pytest.raises(VersionError, match=r"must speak the same protocol, but got 99 \(elastic-ray 9\.9\)"):
        ray.get(allocator.speak.remote(Spoken(protocol=99, release="9.9")), timeout=180)
    ray.kill(allocator, no_restart=True)
    wait_until(lambda: set(snapshot().jobs) == {"a", "b"} and snapshot().settled, "the next one has heard of both")
    assert jobs.held() == {"a": 4, "b": 4}
    since = [slots for job in "ab" for _, slots, _ in jobs.told(job)[told[job] :]]
    assert all(sum(slots.values()) == 4 for slots in since), "no other size is reported"
    jobs.stop("a")
    wait_until(lambda: jobs.held() == {"b": 8}, "it decides")


@pytest.mark.thorough
def test_other_users_of_the_cluster_are_left_alone(jobs: Jobs) -> None:
    class Other:
        pass

    others = [ray.remote(Other).options(num_cpus=1).remote() for _ in range(3)]
    ray.get([other.__ray_ready__.remote() for other in others], timeout=180)
    time.sleep(1.6)  # the allocator has seen that they take resources
    jobs.start("a")
    wait_until(lambda: jobs.held() == {"a": 5}, "the job takes what is left")
    for other in others:
        ray.kill(other)
    wait_until(lambda: jobs.held() == {"a": 8}, "the job grows when they go")


@pytest.mark.thorough
def test_a_dead_controller_is_noticed(jobs: Jobs) -> None:
    class Worker:
        def hold(self, groups: Sequence[str]) -> None:
            for each in groups:
                hold(each)

    jobs.start("a")
    jobs.start("b")
    wait_until(lambda: jobs.held() == {"a": 4, "b": 4}, "two jobs share")
    worker: Any = ray.remote(Worker).options(num_cpus=0).remote()
    ray.get(worker.hold.remote([group for group, job in of_jobs().items() if job == "a"]), timeout=180)
    ray.kill(jobs.handles.pop("a"))
    wait_until(lambda: set(snapshot().jobs) == {"b"}, "its end is known")
    time.sleep(2.0)  # longer than a decision takes: nothing may change
    assert jobs.held() == {"b": 4} == {"b": sum(jobs.told("b")[-1][1].values())}, "its workers may still be saving"
    ray.kill(worker)
    wait_until(lambda: jobs.held() == {"b": 8}, "its workers are shared out")


@pytest.mark.thorough
def test_impossible_jobs_are_told(jobs: Jobs) -> None:
    jobs.start("a", bundle={"CPU": 64.0})
    wait_until(lambda: bool(ray.get(jobs.handles["a"].state.remote())[2]), "told that it cannot run")
    assert "one worker needs 64 CPU, but the largest node has 4" in ray.get(jobs.handles["a"].state.remote())[2]


@pytest.mark.thorough
def test_lost_node_leaves_survivors_and_new_one_is_used(jobs: Jobs, ray_nodes: Any) -> None:
    third = ray_nodes.add_node(num_cpus=2)
    jobs.start("a", max_workers=16)
    wait_until(lambda: jobs.held() == {"a": 10}, "the new node is used")
    ray_nodes.remove_node(third, allow_graceful=False)
    disconnect(third)
    wait_until(lambda: sum(snapshot().jobs["a"].target.values()) == 8, "the lost node is noticed")


def one_each(jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> dict[str, int]:
    """A user's policy; with three jobs it makes a mistake."""
    return {job.job: 1 if len(jobs) < 3 else 99 for job in jobs}


@pytest.fixture
def ruled_by_one_each() -> Iterator[None]:
    get_or_create_allocator(one_each)
    yield
    get_or_create_allocator("goodput")


@pytest.mark.thorough
@pytest.mark.usefixtures("ruled_by_one_each")
def test_users_policy_rules_and_its_mistake_costs_nobody_anything(jobs: Jobs) -> None:
    for job in "ab":
        jobs.start(job)
    wait_until(lambda: jobs.held() == {"a": 1, "b": 1}, "the function decides")
    assert jobs.told("a")[-1][2] == "decided by one_each"
    jobs.start("c")
    wait_until(lambda: any(record.trigger == "refused" for record in snapshot().log), "its answer is refused")
    refused = next(record for record in snapshot().log if record.trigger == "refused")
    assert "policy 'one_each' broke rule 'maximum', the last allocation stays; " in refused.reason.explained
    assert jobs.held() == {"a": 1, "b": 1, "c": 0}
    jobs.stop("c")


@pytest.mark.thorough
def test_one_policy_at_a_time(jobs: Jobs, ruled_by_one_each: None) -> None:
    """With jobs another one is refused; without, it takes over, and survives a restart of the allocator."""
    jobs.start("a")
    wait_until(lambda: jobs.held() == {"a": 1}, "the function decides")
    with pytest.raises(PolicyConflictError, match=r"'fair_share' cannot rule .* runs policy 'one_each' for a, .* wait"):
        get_or_create_allocator("fair_share")
    for same in (one_each, f"{__name__}:one_each", None):
        get_or_create_allocator(same)
    assert snapshot().policy == "one_each"
    jobs.stop("a")
    get_or_create_allocator("fair_share")
    assert snapshot().policy == "fair_share"
    ray.kill(get_or_create_allocator(), no_restart=False)
    assert snapshot().policy == "fair_share"


@pytest.mark.slow
def test_one_configuration_at_a_time(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    """With jobs it stays, and that is said; without, a new one takes over, and a new policy leaves it alone."""

    def configured(allocator: Any) -> AllocatorConfig | None:
        config: AllocatorConfig | None = ray.get(allocator.rule_by.remote("nobody's", None), timeout=180).config
        return config

    first, second = AllocatorConfig(log_length=7), AllocatorConfig(log_length=9)
    get_or_create_allocator(config=first)
    assert configured(get_or_create_allocator("fair_share")) == first and snapshot().policy == "fair_share"
    jobs.start("a")
    wait_until(lambda: jobs.held() == {"a": 8}, "the job has everything")
    assert configured(get_or_create_allocator(config=first)) == first and not caplog.records
    assert configured(get_or_create_allocator(config=second)) == first
    assert "keeps its AllocatorConfig instead of the one given here, for a;" in caplog.text
    jobs.stop("a")
    wait_until(lambda: not snapshot().jobs, "no job is known any more")
    assert configured(get_or_create_allocator(config=second)) == second and snapshot().policy == "fair_share"
    get_or_create_allocator("goodput", config=AllocatorConfig())


@pytest.mark.thorough
def test_what_it_was_told_is_recorded_and_replayed_exactly(jobs: Jobs, tmp_path: Path) -> None:
    """Over two lives: the second is made beside jobs that it has yet to hear of."""
    path = tmp_path / "events.jsonl"
    get_or_create_allocator("goodput", config=AllocatorConfig(record=str(path)))
    jobs.start("a", fingerprint="net")
    wait_until(lambda: jobs.held() == {"a": 8}, "one job has everything")
    jobs.start("b", fingerprint="net")
    wait_until(lambda: jobs.held() == {"a": 4, "b": 4}, "two jobs share")
    first = snapshot().log
    ray.kill(get_or_create_allocator(), no_restart=False)
    wait_until(lambda: set(snapshot().jobs) == {"a", "b"} and snapshot().settled, "it has heard of both again")
    jobs.stop("a")
    wait_until(lambda: jobs.held() == {"b": 8}, "the other one grows")
    second = snapshot().log
    with path.open() as file:
        lives = read_recording(file)
    assert [life.settling for life in lives] == [False, True]
    for life, log in zip(lives, (first, second), strict=True):
        assert log and life.decided[: len(log)] == log
        assert list(map(repr, replay(life))) == list(map(repr, life.decided))
    jobs.stop("b")
    wait_until(lambda: not snapshot().jobs, "no job is known any more")
    get_or_create_allocator("goodput", config=AllocatorConfig())


@pytest.mark.slow
def test_a_restart_gives_up_no_node_of_running_jobs(jobs: Jobs) -> None:
    """Jobs that it has yet to hear of hold nodes that would look empty to its autoscaling."""

    def decided() -> Any:
        return ray.get(get_or_create_allocator().scaling.remote(), timeout=180)[0]

    kind = NodeType(name="four", resources={"CPU": 4.0}, usd_per_h=1.0, max_nodes=2)
    times = AutoscalerConfig(linger_s=0.0)
    scaling = Autoscaling(node_types=(kind,), objective="throughput_efficiency", times=times, interval_s=0.2)
    get_or_create_allocator(config=AllocatorConfig(autoscaling=scaling))
    fixed = {"min_workers": 4, "max_workers": 4, "stop_cost_s": 20.0}
    for job in "ab":
        jobs.start(job, **fixed)
    wait_until(lambda: jobs.held() == {"a": 4, "b": 4}, "two jobs share")
    before = {job: jobs.told(job)[-1][1] for job in "ab"}
    ray.get([handle.speak.remote(False) for handle in jobs.handles.values()], timeout=180)
    ray.kill(get_or_create_allocator(), no_restart=False)
    assert not snapshot().settled
    time.sleep(1.5)  # three rounds
    assert decided() is None
    ray.get([handle.speak.remote(True) for handle in jobs.handles.values()], timeout=180)
    wait_until(lambda: decided() is not None, "a look")
    assert set(snapshot().jobs) == {"a", "b"} and decided().release == ()
    explained = ray.get(get_or_create_allocator().explain.remote("a"), timeout=180)
    assert explained.nodes_wanted == decided().explained("a") and "workers" in str(explained).rpartition("nodes: ")[2]
    assert {job: jobs.told(job)[-1][1] for job in "ab"} == before
    for job in "ab":
        jobs.stop(job)
    wait_until(lambda: not snapshot().jobs, "no job is known any more")
    get_or_create_allocator("goodput", config=AllocatorConfig())


class CountingViews:
    """Counts in the allocator's process how often the jobs' views are made for its autoscaling."""

    def __init__(self, views: Callable[[float], Any]) -> None:
        self.views, self.counted = views, 0

    def __call__(self, now_s: float) -> Any:
        self.counted += 1
        return self.views(now_s)


def count_views(allocator: Any) -> None:
    allocator._core.views_to_scale_for = CountingViews(allocator._core.views_to_scale_for)


@pytest.mark.thorough
def test_what_autoscaling_decides_by_is_made_when_due(jobs: Jobs) -> None:
    """The allocator's rounds come twice a second, and all views of a large cluster are work."""
    kind = NodeType(name="four", resources={"CPU": 4.0}, usd_per_h=1.0, max_nodes=2)
    scaling = Autoscaling(node_types=(kind,), objective="throughput_efficiency", interval_s=4.0)
    allocator: Any = get_or_create_allocator(config=AllocatorConfig(autoscaling=scaling))
    jobs.start("a")
    wait_until(lambda: bool(snapshot().jobs) and snapshot().settled, "the job is known")
    ray.get(allocator.__ray_call__.remote(count_views), timeout=180)
    begin_s = time.monotonic()
    time.sleep(10.0)  # what is counted is in a time
    counted = ray.get(allocator.__ray_call__.remote(lambda it: it._core.views_to_scale_for.counted), timeout=180)
    assert 1 <= counted <= 1 + (time.monotonic() - begin_s) / 4.0
    jobs.stop("a")
    wait_until(lambda: not snapshot().jobs, "no job is known any more")
    get_or_create_allocator("goodput", config=AllocatorConfig())


def test_it_explains_itself(jobs: Jobs) -> None:
    jobs.start("a")
    wait_until(lambda: jobs.held() == {"a": 8}, "the job has everything")
    allocator: Any = get_or_create_allocator()
    explanation = ray.get(allocator.explain.remote("a"), timeout=180)
    assert sum(explanation.nodes.values()) == 8
    assert str(explanation).startswith("job a has 8 workers (4 on ")
    with pytest.raises(KeyError, match=r"job must be one of \['a'\], but got 'b'"):
        ray.get(allocator.explain.remote("b"), timeout=180)
