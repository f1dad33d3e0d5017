"""What jobs have measured survives in files, whoever writes them, and nothing in them can harm an allocator."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from placement.cluster.cluster import GPU_TYPE_LABEL, Cluster
from placement.cluster.jobs import FoundStrategy
from placement.goodput.fitting import Observation
from placement.knowledge.knowledge import Knowledge
from placement.knowledge.records import KnownStep, Measurements
from placement.knowledge.store import FOLDER, KnowledgeStore, StorageRoot
from tests.placement.measured import fresh, measured
from tests.placement.stored_knowledge import NOW_S, knowing, root_at
from tests.placement.views import node


def known_sizes(knowledge: Knowledge) -> set[int]:
    told = knowledge.complete(fresh(), NOW_S + 1.0)
    return {o.replicas for o in told.observations.get("T4", ())}


def files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file() and FOLDER in str(p))


@pytest.mark.parametrize("private", [True, False])
def test_what_is_kept_is_its_users_own(tmp_path: Path, private: bool) -> None:
    (runs := tmp_path / "runs").mkdir(mode=0o755)
    root = StorageRoot(path=str(runs), filesystem=pyarrow.fs.LocalFileSystem(), private=private)
    KnowledgeStore(root, "first").save(knowing(1).measurements(["resnet"], NOW_S))
    modes = [path.stat().st_mode & 0o777 for path in (runs, runs / ".elastic_ray", runs / FOLDER, *files(runs))]
    assert modes == ([0o755, 0o700, 0o700, 0o600] if private else [0o755, 0o755, 0o755, 0o644])


@pytest.mark.parametrize("local", [True, False])
def test_what_is_written_comes_back_to_the_bit(tmp_path: Path, local: bool) -> None:
    root = root_at(tmp_path, local=local)
    assert KnowledgeStore(root, "first").load() == Measurements()
    measurements = knowing(1, 2, 4).measurements(["resnet"], NOW_S)
    assert len(measurements.steps) == 3 and len(measurements.noises) == 1
    KnowledgeStore(root, "first").save(measurements)
    assert [path.name for path in files(tmp_path)] == ["first.parquet"]
    assert KnowledgeStore(root, "second").load() == measurements
    later = knowing()
    later.recall(KnowledgeStore(root, "second").load(), NOW_S)
    assert known_sizes(later) == {1, 2, 4}
    assert later.complete(fresh(), NOW_S).goodput == knowing(1, 2, 4).complete(fresh(), NOW_S).goodput


def test_strategies_are_kept_too(tmp_path: Path) -> None:
    knowledge = knowing(1)
    found = {"0 gloo 0,1": FoundStrategy(name="two_level", step_s=0.125)}
    knowledge.learn(dataclasses.replace(fresh(), strategies=found), NOW_S)
    measurements = knowledge.measurements(["resnet"], NOW_S)
    KnowledgeStore(root_at(tmp_path), "first").save(measurements)
    assert KnowledgeStore(root_at(tmp_path), "second").load() == measurements and len(measurements.strategies) == 1


def test_two_writers_lose_nothing_to_each_other(tmp_path: Path) -> None:
    root = root_at(tmp_path)
    one, two = KnowledgeStore(root, "one"), KnowledgeStore(root, "two")
    one.load(), two.load()
    one.save(knowing(1, 2).measurements(["resnet"], NOW_S))
    two.save(knowing(4).measurements(["resnet"], NOW_S))
    one.save(knowing(1, 2, 8).measurements(["resnet"], NOW_S))
    both = knowing()
    both.recall(KnowledgeStore(root, "three").load(), NOW_S)
    assert known_sizes(both) == {1, 2, 4, 8}


def test_what_the_dead_left_is_folded_in_once_old(tmp_path: Path) -> None:
    root = root_at(tmp_path)
    KnowledgeStore(root, "dead").save(knowing(1, 2).measurements(["resnet"], NOW_S))
    KnowledgeStore(root, "elsewhere").save(knowing(1, 2, cpus=64).measurements(["resnet"], NOW_S))
    store, knowledge = KnowledgeStore(root, "living"), knowing()
    knowledge.recall(store.load(), NOW_S)
    store.save(knowledge.measurements(["resnet"], NOW_S))
    assert len(files(tmp_path)) == 3, "a young file may have a living writer"
    for path in files(tmp_path):
        os.utime(path, (NOW_S - 7200, NOW_S - 7200))
    store.save(knowledge.measurements(["resnet"], NOW_S))
    assert [path.name for path in files(tmp_path)] == ["elsewhere.parquet", "living.parquet"], "other machines' stays"
    assert {o.observation.replicas for o in KnowledgeStore(root, "next").load().steps} == {1, 2}


@pytest.mark.parametrize("harm", ["torn", "foreign", "no format", "text", "wrong value"])
def test_a_bad_file_is_reported_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str) -> None:
    root = root_at(tmp_path)
    KnowledgeStore(root, "good").save(knowing(1, 2).measurements(["resnet"], NOW_S))
    good = files(tmp_path)[0]
    bad = good.with_name("bad.parquet")
    if harm == "torn":
        bad.write_bytes(good.read_bytes()[:-100])
    elif harm == "foreign":
        pq.write_table(pa.table({"a": [1]}), bad)
    elif harm == "no format":
        pq.write_table(pq.read_table(good).replace_schema_metadata(None), bad)
    elif harm == "text":
        bad.write_text("hello")
    else:
        table = pq.read_table(good)
        times = pa.array([-1.0] * table.num_rows)
        pq.write_table(table.set_column(table.schema.get_field_index("step_time_s"), "step_time_s", times), bad)
    with caplog.at_level(logging.WARNING):
        measurements = KnowledgeStore(root, "reader").load()
    assert {o.observation.replicas for o in measurements.steps} == {1, 2}
    assert "bad.parquet, and is left out" in caplog.text and "good.parquet" not in caplog.text


def test_another_machine_is_recognised_when_the_file_is_read(tmp_path: Path) -> None:
    root = root_at(tmp_path)
    KnowledgeStore(root, "old").save(knowing(1, 2).measurements(["resnet"], NOW_S))
    measurements = KnowledgeStore(root, "new").load()
    here, there, unsure = knowing(cpus=8), knowing(cpus=64), Knowledge()
    for knowledge in (here, there, unsure):
        knowledge.recall(measurements, NOW_S)
    assert (known_sizes(here), known_sizes(there), known_sizes(unsure)) == ({1, 2}, set(), {1, 2})
    unsure.machines(Cluster(nodes=(node("n9", 64, labels={GPU_TYPE_LABEL: "T4"}),)))
    assert known_sizes(unsure) == set(), "the nodes came after the file"


def test_the_newest_counts_and_the_too_old_does_not(tmp_path: Path) -> None:
    knowledge = knowing(1, 2)
    slow = dataclasses.replace(measured("slow", (2,)), observations={"T4": (Observation(1, 2, 64, 0, step_time=9.0),)})
    older = knowing(at_s=NOW_S)
    older.learn(slow, NOW_S - 60.0)
    before = known(knowledge)
    knowledge.recall(older.measurements(["resnet"], NOW_S), NOW_S)
    assert known(knowledge) == before
    ancient = knowing(4, at_s=NOW_S - 31 * 86400.0)
    knowledge.recall(ancient.measurements(["resnet"], NOW_S), NOW_S)
    assert known_sizes(knowledge) == {1, 2}


def known(knowledge: Knowledge) -> Any:
    return [step.observation for step in knowledge.measurements(["resnet"], NOW_S).steps]


def stored(replicas: int, step_time: float, seen_s: float) -> Measurements:
    """One measurement as a file holds it, of another writer with a clock of its own."""
    observation = dataclasses.replace(measured("x", (replicas,)).observations["T4"][0], step_time=step_time)
    machines = frozenset({"8 CPU"})
    step = KnownStep(fingerprint="resnet", gpu_type="T4", machines=machines, observation=observation, seen_s=seen_s)
    return Measurements(steps=(step,))


@pytest.mark.parametrize("ahead_s", [-10.0, 10.0, 1e9])
@pytest.mark.parametrize("stored_first", [True, False])
def test_stored_measurement_never_replaces_one_that_job_has_told(ahead_s: float, stored_first: bool) -> None:
    knowledge, file = knowing(), stored(2, 9.0, NOW_S + ahead_s)
    job = measured("a", (2,))
    for recalls in (stored_first, not stored_first):
        if recalls:
            knowledge.recall(file, NOW_S)
        else:
            knowledge.learn(job, NOW_S - 60.0)
    assert known(knowledge) == list(job.observations["T4"])


def test_future_times_count_as_now_old_are_not_rewritten() -> None:
    knowledge, days = knowing(), 86400.0
    knowledge.recall(stored(2, 0.5, NOW_S + 365 * days), NOW_S)
    assert [step.seen_s for step in knowledge.measurements(["resnet"], NOW_S).steps] == [NOW_S]
    knowledge.learn(measured("a", (4,)), NOW_S + 29 * days)
    kept = knowledge.measurements(["resnet"], NOW_S + 31 * days)
    assert {step.observation.replicas for step in kept.steps} == {4}
    assert knowledge.measurements(["resnet"], NOW_S + 61 * days) == Measurements()
