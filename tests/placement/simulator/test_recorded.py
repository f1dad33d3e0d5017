"""What was recorded of a cluster, simulated: the same jobs end when they did."""

from __future__ import annotations

import collections
import dataclasses
import functools
from pathlib import Path

import pytest

from placement.allocator.config import AllocatorConfig
from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobEnded, JobHeartbeat, NodesChanged
from placement.allocator.recording import Life, read_recording, replay
from placement.cluster.cluster import Cluster, Node
from placement.cluster.jobs import JobView, Progress
from placement.cluster.sizes import ANY_SIZE, AllowedSizes, MemoryNeed
from placement.errors import InputError
from placement.goodput.fitting import Observation
from placement.goodput.model import NoiseScale
from placement.goodput.step_time import ThroughputModel
from placement.policies import make_policy
from placement.simulator import SimulationReport, simulate
from placement.simulator.nodes.disturbances import Disturbances
from placement.simulator.results.outlook import outlook
from placement.simulator.workloads.profiles import Application, load_profiles
from placement.simulator.workloads.recorded import FittedTimes, recorded_workload
from placement.simulator.workloads.traces import Lengths, TraceJob
from placement.simulator.world.rules import LIVE_PACE, LiveRules, Location, Pace
from tests.placement.simulator.worlds import profiles
from tests.placement.telling import tell
from tests.placement.views import cluster, view

RULES = LiveRules(pause=0.3, start=4.0, first=7.0, slow_sia=False, most_workers=6, pace=LIVE_PACE)
TRUE = {
    "small": ThroughputModel(0.05, 0.02, 0.10, 0.01, 0.04, 0.01, 1.0),
    "large": ThroughputModel(0.10, 0.04, 0.30, 0.02, 0.10, 0.02, 1.0),
}
STILL = NoiseScale(sqr=1.0, var=0.0)
EPOCHS = {"a": 12, "b": 20, "c": 8, "d": 14, "e": 10}


def application(name: str, batch_sizes: tuple[int, ...] = (32,), noise: NoiseScale = STILL) -> Application:
    times = {"t4": FittedTimes(TRUE[name], (1, 32))}
    return Application.fitted(name, batch_sizes=batch_sizes, epochs=10, epoch=10.0, noise=noise, step_times=times)


APPLICATIONS = {name: application(name) for name in TRUE}
TRACE = tuple(
    TraceJob(name=name, time_s=20.0 * i, application=kind, num_replicas=6, batch_size=32)
    for i, (name, kind) in enumerate(zip(EPOCHS, ("large", "small", "small", "large", "small"), strict=True))
)


@functools.cache
def recorded(policy: str) -> tuple[Life, dict[str, float]]:
    """A run whose measurements are off by 3 %, and when its jobs truly ended [s]."""
    core = tell(
        TRACE,
        APPLICATIONS,
        "t4:2x3",
        make_policy(policy),
        AllocatorConfig(),
        rules=RULES,
        disturbances=Disturbances(noise=0.03),
        lengths=Lengths(epochs=EPOCHS),
    )
    (life,) = read_recording(core.lines)
    return life, {event.job: now_s for now_s, event in life.events if isinstance(event, JobEnded)}


def again(life: Life, policy: str) -> SimulationReport:
    work = recorded_workload(life)
    lengths = Lengths(epochs=work.epochs)
    return simulate(
        work.trace, work.applications, work.cluster, rules=RULES, policy=policy, knowledge=True, lengths=lengths
    )


def test_jobs_lengths_nodes_and_profiles_are_read_from_recording() -> None:
    life, ends = recorded("goodput")
    work = recorded_workload(life)
    assert [(job.job, job.arrival_s, job.application) for job in work.jobs] == [
        (each.name, each.time_s, each.application) for each in TRACE
    ]
    assert work.epochs == EPOCHS and work.cluster == "t4:2x3" and work.most_workers == 6
    assert {job.job: job.end_s for job in work.jobs} == ends
    for job in work.jobs:
        own = [record for record in life.decided if record.job == job.job]
        assert job.granted_s == own[0].time_s >= job.arrival_s
    assert len(life.decided) > len(work.jobs), "later decisions are no grants"
    for name, true in TRUE.items():
        found = work.applications[name].step_times["t4"]
        for counts in ((1,), (2,), (3,), (1, 1), (3, 3)):
            local = 32 / sum(counts)
            expected = true.step_time(len(counts), sum(counts), local, 0)
            assert found.times(counts, local)[0] == pytest.approx(expected, rel=0.2)


def test_nodes_that_a_recorded_unit_spans_count_as_one() -> None:
    def united(event: object) -> object:
        if isinstance(event, JobHeartbeat):
            return JobHeartbeat(view=dataclasses.replace(event.view, bundle={"GPU": 4.0}, unit=4))
        return dataclasses.replace(event, view=None) if isinstance(event, JobEnded) else event

    life, _ = recorded("goodput")
    events = tuple((now_s, united(event)) for now_s, event in life.events)
    assert recorded_workload(dataclasses.replace(life, events=events)).cluster == "t4:1x1"


def test_larger_node_beside_recorded_unit_counts_once() -> None:
    nodes = [Node(node_id=f"n{i}", total={"CPU": n}, free={"CPU": n}) for i, n in enumerate((2.0, 2.0, 4.0))]
    seen = {"": (Observation(1, 1, 64.0, 0, 0.1),)}
    progress = Progress(done=9.0, epoch_ends=(8.0,), epochs=4.0)
    unit = {"bundle": {"CPU": 4.0}, "unit": 4, "allocation": {"n0*2+n1*2": 1}}
    held = view("a", **unit, fingerprint="net", progress=progress, observations=seen)
    life, _ = recorded("goodput")
    events = ((0.0, NodesChanged(cluster=Cluster(nodes=tuple(nodes)))), (1.0, JobHeartbeat(view=held)))
    assert recorded_workload(dataclasses.replace(life, events=events), gpu="x").cluster == "x:2x1"


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("policy", ["goodput", "fair_share"])
def test_simulator_predicts_average_from_what_the_jobs_had_measured(policy: str) -> None:
    """By the profiles of a run under ``goodput``, under either policy."""
    life, _ = recorded("goodput")
    _, ends = recorded(policy)
    true_s = sum(ends[each.name] - each.time_s for each in TRACE) / len(TRACE)
    assert again(life, policy).avg_jct_s == pytest.approx(true_s, rel=0.05)


def test_recorded_jobs_sizes_are_those_of_the_simulated_one() -> None:
    """And what its memory allows: from 4 workers on."""
    need = MemoryNeed(available_bytes=50, sharded_bytes=100)
    own = {"a": AllowedSizes(multiple_of=2), "b": AllowedSizes(sizes=(1, 3)), "d": AllowedSizes(memory=need)}
    trace = tuple(dataclasses.replace(each, sizes=own.get(each.name, ANY_SIZE)) for each in TRACE)
    lengths = Lengths(epochs=EPOCHS)
    core = tell(trace, APPLICATIONS, "t4:2x3", make_policy("goodput"), AllocatorConfig(), rules=RULES, lengths=lengths)
    (life,) = read_recording(core.lines)
    work = recorded_workload(life)
    assert {each.name: each.sizes for each in work.trace} == {each.name: each.sizes for each in trace}
    had = collections.defaultdict[str, set[int]](set)
    for placed in again(life, "goodput").placed:
        had[placed.job].add(sum(placed.nodes.values()))
    for job, sizes in own.items():
        assert had[job] - {0} and all(map(sizes.allow, had[job] - {0})), (job, had)
    assert any(size % 2 for job in ("c", "e") for size in had[job]), "the others have any"


@pytest.mark.parametrize("policy", ["goodput", "fair_share"])
def test_ends_of_running_jobs_are_foreseen(policy: str) -> None:
    life, ends = recorded(policy)
    (nodes,) = (event.cluster for _, event in life.events if isinstance(event, NodesChanged))
    errors: list[float] = []

    def ask(core: AllocatorCore, now_s: float) -> None:
        if now_s == 110.0 and not errors:
            for row in outlook(core.views(now_s), nodes, policy, now_s, stay=True):
                assert row.ends_s is not None
                errors.append(abs(row.ends_s / (ends[row.job] - now_s) - 1.0))

    replay(life, watch=ask)
    assert len(errors) >= 3 and max(errors) < 0.15, errors


def told(life: Life, view_of: JobView) -> Life:
    beats = ((1.0, NodesChanged(cluster=cluster(4))), (2.0, JobHeartbeat(view=view_of)))
    return dataclasses.replace(life, events=beats)


def test_what_cannot_be_simulated_is_refused() -> None:
    life, _ = recorded("goodput")
    seen = {"": (Observation(1, 1, 64.0, 0, 0.1),)}
    good = view("a", fingerprint="net", progress=Progress(done=9.0, epoch_ends=(8.0,), epochs=4.0), observations=seen)
    work = recorded_workload(told(life, good), gpu="x")
    assert work.epochs == {"a": 4} and work.cluster == "x:1x4" and work.jobs[0].end_s is None
    assert work.applications["net"].batch_sizes == (64, 4096) and work.applications["net"].progress_at(2) == 16.0
    with pytest.raises(InputError, match="no heartbeat"):
        recorded_workload(dataclasses.replace(life, events=()))
    for wrong, message in (
        (dataclasses.replace(good, observations={}), "must have measured steps"),
        (dataclasses.replace(good, fingerprint=None), "must have measured steps"),
        (dataclasses.replace(good, progress=Progress(done=1.0)), "finished or declared an epoch"),
    ):
        with pytest.raises(InputError, match=message):
            recorded_workload(told(life, wrong))
    other = JobHeartbeat(view=dataclasses.replace(good, job="b", bundle={"CPU": 2.0}))
    with pytest.raises(InputError, match="workers of one kind"):
        recorded_workload(dataclasses.replace(life, events=(*told(life, good).events, (3.0, other))))
    unlike = told(life, good).events[1:]
    with pytest.raises(InputError, match="equally many workers"):
        recorded_workload(dataclasses.replace(life, events=((1.0, NodesChanged(cluster=cluster(4, 2))), *unlike)))
    with pytest.raises(InputError, match="equally many workers"):
        recorded_workload(dataclasses.replace(life, events=((1.0, NodesChanged(cluster=Cluster())), *unlike)))


def test_a_fitted_profile_has_even_epochs_and_its_noise() -> None:
    app = application("small", batch_sizes=(32, 256), noise=NoiseScale(sqr=1.0, var=3.0))
    assert [app.progress_at(e) for e in (0, 1, 10)] == [0.0, 10.0, 100.0]
    assert app.noise(64, 4) == NoiseScale(sqr=1.0, var=3.0) and not app.fixed_batch
    assert app.gain(128, 0) == pytest.approx(4.0 / (3.0 / 4 + 1.0))
    assert app.iterations_at(256, 1) == pytest.approx(20.0 / app.gain(256, 0))
    assert app.stretched(3).progress_at(3) == 30.0


def test_with_one_profiled_batch_it_never_changes(tmp_path: Path) -> None:
    folder = profiles(tmp_path)
    for batch in (128, 512):
        (folder / "toy" / f"validation-{batch}.csv").unlink()
    toy = load_profiles(folder, ("t4",))["toy"]
    assert toy.gain(36, 1) == 1.0, "three times a third of 32, rounded up, are no larger batch"
    assert toy.fixed_batch and toy.batch_sizes == (32,) and toy.noise(32, 1) == NoiseScale(sqr=0.5, var=4.0)
    trace = [TraceJob(name="j", time_s=0.0, application="toy", num_replicas=1, batch_size=32)]
    core = tell(trace, {"toy": toy}, "t4:1x4", make_policy("fixed"), AllocatorConfig(), rules=RULES)
    (life,) = read_recording(core.lines)
    views = [event.view for _, event in life.events if isinstance(event, JobHeartbeat)]
    assert {each.max_batch_size for each in views} == {None} and not any(each.accumulation for each in views)
    end_s = next(now_s for now_s, event in life.events if isinstance(event, JobEnded))
    at_4, sync_s = toy.step_times["t4"].times((4,), 8)
    assert sync_s > 0 and end_s == pytest.approx(RULES.first + 4000 * at_4, abs=3.0)


def test_first_workers_start_slower_where_that_is_said() -> None:
    here, there = (Location(nodes={node: 2}, gpu="t4") for node in ("n0", "n1"))
    assert RULES.change("a", None, None, here).pause_s == 7.0
    assert RULES.change("a", here, here, there).pause_s == 4.0
    assert dataclasses.replace(RULES, first=None).change("a", None, None, here).pause_s == 4.0
    with pytest.raises(InputError, match="first must be 0 seconds or more"):
        LiveRules(first=-1.0)
    with pytest.raises(InputError, match="heartbeat_s must be above 0"):
        Pace(heartbeat_s=0.0)
    with pytest.raises(InputError, match="epochs of job 'a' must be 1 or more"):
        Lengths(epochs={"a": 0})


def test_live_jobs_with_model_may_grow_to_any_size() -> None:
    sizes = {}
    for doubling in (True, False):
        pace = dataclasses.replace(LIVE_PACE, doubling=doubling)
        rules = dataclasses.replace(RULES, pace=pace)
        report = simulate(
            TRACE[:1], APPLICATIONS, "t4:1x6", rules=rules, policy="goodput", lengths=Lengths(epochs=EPOCHS)
        )
        sizes[doubling] = [sum(each.nodes.values()) for each in report.placed]
    assert sizes[True][:3] == [1, 2, 4] and sizes[False][:2] == [2, 6]
