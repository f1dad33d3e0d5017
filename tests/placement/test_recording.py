"""What an allocator is told and decides, written as JSON lines, read back and decided anew."""

from __future__ import annotations

import dataclasses
import json
import logging
import stat
import typing
from pathlib import Path

import numpy as np
import pytest

from placement.allocator.config import AllocatorConfig
from placement.allocator.events import (
    Event,
    JobEnded,
    JobHeartbeat,
    NodeForgiven,
    NodesChanged,
    Recalled,
    SettingsChanged,
    TimePassed,
)
from placement.allocator.recording import Life, Recorder, event_line, read_recording, replay, start_line
from placement.cluster.cluster import Cluster, Node
from placement.cluster.jobs import Bill, FoundStrategy, JobView, Progress
from placement.cluster.node_record import NodeFailure
from placement.cluster.sizes import AllowedSizes, MemoryNeed
from placement.cluster.utility import Utility
from placement.errors import InputError
from placement.goodput.fitting import Observation
from placement.goodput.forecast import BatchForecast
from placement.goodput.model import NoiseScale
from placement.knowledge.knowledge import Knowledge
from placement.knowledge.records import Batches, KnownLength, KnownNoise, KnownStep, KnownStrategy, Measurements
from placement.planning.tenants import Tenant
from placement.policies import Policy, make_policy
from placement.policies.baselines.fixed import FixedPolicy
from placement.policies.goodput.policy import GoodputPolicy
from placement.simulator.nodes.disturbances import Disturbances
from placement.simulator.workloads.profiles import load_profiles
from placement.simulator.workloads.traces import TraceJob
from placement.storage.private_files import LineFile
from tests.placement.simulator.worlds import profiles
from tests.placement.telling import TellingCore, tell
from tests.placement.views import AT_ONCE, cluster, model, node, view

SEEN = Observation(1, 2, 32.0, 1, 0.1 + 0.2, grad_time=1 / 3, count=7.0)
FULL = JobView(
    noise_growth=1.25,
    job="a",
    bundle={"CPU": 1, "GPU": 0.5},
    min_workers=2,
    max_workers=8,
    submitted_s=1764000000.123456,
    held_at=4,
    paused="by hand",
    wished=3,
    allocation={"n0": 2, "n1": 1},
    most_workers=3,
    goodput=model(),
    init_batch_size=64,
    max_batch_size=4096,
    held_batch=128,
    forecast=BatchForecast(steps=((1000.5, 256), (2e6, 512))),
    atomic_bsz_range=(8, 512),
    accumulation=True,
    resize_cost_s=0.25,
    stop_cost_s=3.5,
    label_selector={"ray.io/accelerator-type": "in(T4,A100)"},
    growth_limit=6,
    attained_s=12.75,
    bill=Bill(usd=1.25, attained_s=12.5, worker_usd_per_h=0.5),
    restarts=2,
    fingerprint="net on 1 CPU",
    progress=Progress(done=5.5, epoch_ends=(2.0, 4.0), epochs=9.0, stride=2, usual_epoch=2.1, usual_ends=(3.0,)),
    models={"T4": model(noise=3.0)},
    observations={"T4": (SEEN,), "": ()},
    atomic_bsz_ranges={"T4": (8, 64)},
    priority=1,
    tenant="research",
    user="ann",
    preemptible=False,
    deadline_s=1764000900.5,
    whole_nodes=True,
    weight=2.0,
    tenant_weight=3.0,
    spot="mixed",
    budget_usd=12.5,
    utility=Utility(((0.0, 10.0), (3600.0, 0.0))),
    slow_nodes={"n1": 1.5},
    node_failures=(NodeFailure(node="n1", worker="w2", cause="OSError", age_s=1.25, starting=True),),
    mixed_gpu_types=True,
    unit=2,
    sizes=AllowedSizes(sizes=(2, 4, 8), memory=MemoryNeed(available_bytes=80 << 30, sharded_bytes=90 << 30, copies=3)),
    strategies={"0 gloo 0,1": FoundStrategy(name="ring", step_s=0.25)},
)
NODES = Cluster(
    nodes=(
        Node(node_id="n0", total={"CPU": 4.0, "memory": 1e9}, free={"CPU": 3}, labels={"zone": "a"}),
        node("n1", 4, draining=True),
    )
)
KNOWN = Measurements(
    steps=(
        KnownStep(
            fingerprint="net", gpu_type="T4", machines=frozenset({"1 CPU", "2 CPU"}), observation=SEEN, seen_s=5.0
        ),
    ),
    noises=(
        KnownNoise(
            fingerprint="net",
            gpu_type="T4",
            epoch=3,
            noise=NoiseScale(sqr=-0.5, var=2.0),
            batches=Batches(init_batch_size=64, atomic_bsz_range=(8, 64)),
            seen_s=6.0,
        ),
    ),
    lengths=(KnownLength(fingerprint="net", samples=1e6, part=None, seen_s=7.0),),
    strategies=(
        KnownStrategy(fingerprint="net", form="0 gloo 0,1", found=FoundStrategy(name="ps", step_s=0.5), seen_s=8.0),
    ),
)
EVENTS: tuple[Event, ...] = (
    JobHeartbeat(view=FULL, cluster=NODES),
    JobHeartbeat(view=view("b")),
    JobEnded(job="a", view=FULL, cluster=NODES),
    JobEnded(job="b"),
    NodesChanged(cluster=NODES, obtainable=(node("n9", 2),)),
    NodeForgiven(node="n1"),
    SettingsChanged(tenants=(Tenant(name="a", weight=2.5, quota={"GPU": 3}),), priorities={"prod-*": 7}),
    TimePassed(),
    Recalled(measurements=KNOWN),
)


def lines_of(events: typing.Iterable[Event], policy: Policy, config: AllocatorConfig | None = None) -> list[str]:
    return [start_line(policy, config, settling=True), *(event_line(event, 1.5 + i) for i, event in enumerate(events))]


def only_life(lines: typing.Iterable[str]) -> Life:
    (life,) = read_recording(lines)
    return life


def test_every_event_comes_back_exactly_with_every_digit() -> None:
    default = JobView(job="a", bundle={"CPU": 1}, max_workers=8)
    same = {f.name for f in dataclasses.fields(JobView) if getattr(FULL, f.name) == getattr(default, f.name)}
    assert same <= {"job", "max_workers"}, "the view of this test sets every field"
    life = only_life(lines_of(EVENTS, make_policy("goodput")))
    assert [event for _, event in life.events] == list(EVENTS)
    assert [now_s for now_s, _ in life.events] == [1.5 + i for i in range(len(EVENTS))]
    assert repr(life.events[0][1]) == repr(EVENTS[0]), "a whole number stays one"


def test_a_view_from_before_memory_was_known_is_read() -> None:
    lines = lines_of(EVENTS[:1], make_policy("goodput"))
    said = json.loads(lines[1])
    sizes = said["JobHeartbeat"]["view"]["sizes"]
    assert sizes.pop("memory") == {"available_bytes": 80 << 30, "sharded_bytes": 90 << 30, "copies": 3}
    ((_, event),) = only_life([lines[0], json.dumps(said) + "\n"]).events
    assert event == JobHeartbeat(view=dataclasses.replace(FULL, sizes=AllowedSizes(sizes=(2, 4, 8))), cluster=NODES)


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    told = view("a", init_batch_size=np.int64(64), allocation={"n0": np.int64(3)}, resize_cost_s=np.float64(0.1))
    life = only_life(lines_of([JobHeartbeat(view=told)], make_policy("goodput")))
    assert life.events == ((1.5, JobHeartbeat(view=told)),)


def test_policy_settings_and_configuration_come_back() -> None:
    config = AllocatorConfig(
        min_interval_s=0.5, tenants=(Tenant(name="a", weight=2.0),), record="/tmp/x", metrics=False
    )
    for policy in (FixedPolicy(workers=2), GoodputPolicy(horizon_s=60.0, lengths=False), make_policy("fair_share")):
        life = only_life([start_line(policy, config, settling=True)])
        assert life.make_policy() == policy
        assert life.config == AllocatorConfig(min_interval_s=0.5, tenants=config.tenants) and life.settling


def said_of(kind: typing.Any, plain: typing.Mapping[str, typing.Any]) -> set[str]:
    """Fields of a dataclass that a recording leaves out."""
    return {field.name for field in dataclasses.fields(kind) if field.init} - plain.keys()


def test_replay_does_not_depend_on_defaults_of_its_day() -> None:
    config = AllocatorConfig(tenants=(Tenant(name="a"),))
    said = json.loads(start_line(make_policy("goodput"), config, settling=False))["start"]
    shells_own = {"notices", "autoscaling", "dashboard", "metrics", "record", "storage", "orphan_timeout_s"}
    assert said_of(AllocatorConfig, said["config"]) == shells_own, "which the core does not read"
    assert said_of(Tenant, said["config"]["tenants"][0]) == set()
    assert said_of(GoodputPolicy, said["settings"]) == set()


def test_start_that_was_written_without_its_defaults_is_read() -> None:
    said = {"format": 1, "policy": "goodput", "settings": {"lengths": False}, "config": {"gather_s": 0.5}}
    life = only_life([json.dumps({"start": {**said, "settling": False}}) + "\n"])
    assert life.config == AllocatorConfig(gather_s=0.5) and life.make_policy() == GoodputPolicy(lengths=False)


@pytest.mark.parametrize("set_by_s", [-3600.0, 3600.0])
def test_replay_decides_same_where_time_of_day_was_set(set_by_s: float) -> None:
    core = TellingCore(make_policy("fair_share"), AllocatorConfig(min_interval_s=5.0), Knowledge())
    core.handle(NodesChanged(cluster=cluster(4, 4)), 1e9, 1e9)
    jobs: dict[str, JobView] = {}
    for second in range(40):
        now_s, steady_s = 1e9 + second + (set_by_s if second >= 15 else 0.0), 1e9 + second
        if second in (1, 10, 14, 25):  # the third waits for its decision as the time is set
            jobs[f"j{second}"] = view(f"j{second}", submitted_s=now_s)
        if second == 35:
            del jobs["j10"]
            core.handle(JobEnded(job="j10"), now_s, steady_s)
        for name, told in jobs.items():
            place = dict(core.snapshot().jobs[name].target) if core.knows(name) else {}
            jobs[name] = dataclasses.replace(told, allocation=place)
            core.handle(JobHeartbeat(view=jobs[name]), now_s, steady_s)
        core.handle(TimePassed(), now_s, steady_s)
    life = only_life(core.lines)
    sides = [abs(record.time_s - 1e9) > 1000 for record in core.log]
    assert min(sides.count(True), sides.count(False)) >= 2, "it decides before and after"
    assert replay(life) == life.decided == core.log


def told(folder: Path, policy: Policy) -> TellingCore:
    """Five jobs of two applications, on nodes that fail now and then, with measurements that are off by a fifth."""
    applications = load_profiles(profiles(folder, names=("toy", "other")), ("t4",))
    names = ("toy", "other", "toy", "toy", "other")
    trace = [
        TraceJob(name=f"j{i}", time_s=40.0 * i, application=name, num_replicas=1, batch_size=64)
        for i, name in enumerate(names)
    ]
    config = AllocatorConfig(min_interval_s=5.0, silence_s=1e9)
    failing = Disturbances(node_mtbf_h=0.5, repair_s=120.0, noise=0.2)
    return tell(trace, applications, "t4:2x4", policy, config, disturbances=failing)


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("policy", ["goodput", "fair_share", "pollux", "fixed", "tiresias"])
def test_a_replay_decides_the_same_to_the_letter(policy: str, tmp_path: Path) -> None:
    core = told(tmp_path, make_policy(policy))
    life = only_life(core.lines)
    assert len(core.log) >= 10 and life.decided == core.log
    again = replay(life)
    assert again == core.log
    assert [repr(record) for record in again] == [repr(record) for record in core.log]


def test_a_replay_under_another_policy_decides_otherwise(tmp_path: Path) -> None:
    core = told(tmp_path, make_policy("goodput"))
    life = only_life(core.lines)
    assert replay(life, policy=make_policy("fair_share")) != core.log
    short = dataclasses.replace(life, config=dataclasses.replace(life.config, log_length=3))
    assert replay(short) == core.log, "however many decisions the allocator itself has kept"


def test_who_asks_for_what_others_know_changes_no_model() -> None:
    def heard(asks: bool) -> JobView:
        knowledge = Knowledge()
        for at_s, step_s in ((1.0, 0.100), (2.0, 0.115)):  # the second is no news, but differs
            own = (Observation(1, 1, 64.0, 0, step_s), Observation(1, 2, 32.0, 0, 0.06))
            knowledge.learn(view("a", fingerprint="net", models={"": model()}, observations={"": own}), at_s)
            if asks:
                knowledge.priors(view("b", fingerprint="net"), at_s)
        return knowledge.complete(view("b", fingerprint="net"), 3.0)

    assert heard(asks=True) == heard(asks=False)


def test_line_cut_off_at_the_end_is_left_out() -> None:
    lines = lines_of(EVENTS, make_policy("goodput"))
    assert only_life([*lines[:-1], lines[-1][:-5]]).events == only_life(lines[:-1]).events
    again = read_recording([*lines, *lines[:3]])
    assert [len(life.events) for life in again] == [len(EVENTS), 2]


@pytest.mark.parametrize(
    "bad, says",
    [
        ("[]\n", "line 3"),
        ("{\n", "line 3"),
        ("[" * 100_000 + "\n", "line 3"),
        ('{"now_s":1.0,"Surprise":{}}\n', "Surprise"),
        ('{"now_s":"soon","TimePassed":{}}\n', "soon"),
        ('{"now_s":1.0,"JobEnded":{"job":"a","vew":{}}}\n', "vew"),
        ('{"now_s":1.0,"JobEnded":{}}\n', "job"),
        ('{"now_s":1.0,"JobHeartbeat":{"view":{"job":"a","bundle":{"CPU":1},"spot":"always"}}}\n', "always"),
        ('{"now_s":1.0,"JobHeartbeat":{"view":{"job":"a","bundle":{"CPU":1},"min_workers":true}}}\n', "line 3"),
        ('{"now_s":1.0,"JobHeartbeat":{"view":{"job":"a","bundle":{"CPU":1},"min_workers":9}}}\n', "min_workers"),
    ],
)
def test_bad_lines_are_named(bad: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_recording([*lines_of(EVENTS[:1], make_policy("goodput")), bad])
    with pytest.raises(InputError, match="line 1"):
        read_recording([event_line(TimePassed(), 1.0)])


def test_a_recording_imports_no_policy_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'was here')!r}, 'w')\ndef decide(*_): ...\n")
    (line,) = lines_of([], make_policy("goodput"))
    life = only_life([line.replace('"goodput"', f'"{tmp_path}/evil.py:decide"')])
    with pytest.raises(InputError, match=r"give replay\(policy=\.\.\.\)"):
        replay(life)
    assert not (tmp_path / "was here").exists()
    with pytest.raises(InputError, match="settings of policy 'fixed'"):
        replay(dataclasses.replace(life, policy="fixed", settings={"workers": 0}))


def test_a_policy_of_the_users_own_is_given(tmp_path: Path) -> None:
    def mine(jobs: typing.Sequence[JobView], cluster: Cluster, now_s: float) -> dict[str, int]:
        return {each.job: 1 for each in jobs}

    mine.__name__ = "goodput"  # the name alone says nothing
    policy = make_policy(mine)
    life = only_life(lines_of([NodesChanged(cluster=cluster(4)), JobHeartbeat(view=view("a"))], policy, AT_ONCE))
    with pytest.raises(InputError, match="of the user's own"):
        replay(life)
    (record,) = replay(dataclasses.replace(life, settling=False), policy=policy)
    assert record.job == "a" and record.to_workers == 1


def test_file_is_users_own_and_ends_with_first_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    for event in EVENTS[:2]:  # two lives
        recorder = Recorder(LineFile(str(path)).append)
        recorder.begun(make_policy("goodput"), None, settling=False)
        recorder.told(event, 1.5)
    with path.open() as lines:
        assert [life.events for life in read_recording(lines)] == [((1.5, event),) for event in EVENTS[:2]]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and not caplog.records
    with caplog.at_level(logging.WARNING, logger="placement.storage"):
        nowhere, full = LineFile(str(tmp_path / "missing" / "x")), LineFile("/dev/full")
        for _ in range(2):
            nowhere.append(["a line\n"])
            full.append(["a line\n"])
    assert len(caplog.records) == 2 and "missing" in caplog.text and "/dev/full any more" in caplog.text
    with pytest.raises(ValueError, match="absolute path"):
        AllocatorConfig(record="events.jsonl")
