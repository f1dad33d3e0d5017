"""A preemption under way; no Ray."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from elastic_ray.background import Background
from elastic_ray.checkpoints.automatic import StateFile
from elastic_ray.events import Pause
from elastic_ray.job.journal import Journal
from elastic_ray.job.preemption import Preemption, save_time
from elastic_ray.job.supervisor import JobSupervisor
from elastic_ray.membership.signals import Allocated, Ready, Reserved, Switched
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.worker.messages import StateSaved
from tests.job.specs import spec

AWAY = Allocated(nodes={}, reason="others have more use for them")
BACK = Allocated(nodes={"n": 2}, reason="room again")


def test_last_that_was_said_and_the_first_reason_count() -> None:
    preemption = Preemption(timeout_s=60.0)
    assert not preemption.active and preemption.end() is None
    preemption.start(AWAY, 10.0)
    preemption.adapt(BACK)
    assert preemption.active and preemption.reason == AWAY.reason
    assert preemption.lasted_s(12.5) == 2.5 and preemption.end() == BACK
    assert not preemption.active


def test_workers_are_told_at_once_and_again_every_second() -> None:
    preemption = Preemption(timeout_s=60.0)
    assert not preemption.remind(5.0)
    preemption.start(AWAY, 10.0)
    assert [preemption.remind(10.0 + 0.25 * tick) for tick in range(9)] == [tick % 4 == 0 for tick in range(9)]


def test_it_fails_without_a_worker_to_save_or_time() -> None:
    preemption = Preemption(timeout_s=60.0)
    assert preemption.failed(1e9, ()) == "", "there is none"
    preemption.start(AWAY, 10.0)
    assert preemption.failed(70.0, {"w1"}) == ""
    assert "lost" in preemption.failed(11.0, ())
    assert "within join_timeout_s=60" in preemption.failed(70.1, {"w1"})


def test_job_on_nodes_that_go_is_saved_in_time() -> None:
    goes = Allocated(nodes={}, reason="n drains", draining={"n": 100.0, "m": 50.0}, nodes_may_come=True)
    assert save_time(goes, ["n"], write_s=3.0) == 94.0
    assert save_time(goes, ["m", "n"], write_s=3.0) == 44.0
    for places, write_s in (((), 3.0), (["n"], None), (["n", "other"], 3.0)):
        assert save_time(goes, places, write_s=write_s) == -math.inf
    moves = Allocated(nodes={"o": 1}, reason="n drains", draining=goes.draining)
    assert save_time(moves, ["n"], write_s=3.0) == 94.0, "workers on o may not be ready by then"
    assert save_time(AWAY, ["n"], write_s=3.0) == -math.inf
    never = Allocated(nodes={}, reason="n drains", draining=goes.draining)
    assert save_time(never, ["n"], write_s=3.0) == -math.inf


def enters(generation: int, *workers: str) -> list[Switched]:
    return [Switched(worker=each, generation=generation, pause=Pause()) for each in workers]


@pytest.mark.parametrize(("ready", "joins"), [(False, False), (True, True), (True, False)])
def test_job_is_saved_before_its_replacements_are_ready(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch, ready: bool, joins: bool
) -> None:
    job = JobSupervisor(spec(storage_path=str(tmp_path / "run")), None, Background(), journal)
    monkeypatch.setattr(job.group, "_perform", lambda instruction: None)
    monkeypatch.setattr(job.group.actors, "reserved", lambda: {"n": 1})
    for heard in (Allocated(nodes={"n": 1}, reason=""), Reserved(worker="w1"), Ready(worker="w1"), *enters(1, "w1")):
        job.group.take(heard)
    state = StateFile(path="state", size=1, sha256="", resume_point=ResumePoint(epoch=0, steps=1))
    job.saved(StateSaved(state=state, pause_s=0.0, cost_s=0.0, write_s=2.0))
    now_s = time.monotonic()

    def saves(after_s: float) -> bool:
        job._save_in_time(now_s + after_s)
        return job._preemption.active

    job.allocate({}, "n drains", {"n": 120.0}, nodes_may_come=True)
    assert not saves(60.0)
    job.allocate({"o": 1}, "o has come", {"n": 114.0})
    assert not saves(99.0)
    if ready:
        job.group.machine._retry_s = 0.0 if joins else math.inf
        job.group.take(Reserved(worker="w2"))
        job.group.take(Ready(worker="w2"))
    assert saves(102.0) == (not ready)
    assert saves(160.0) == (not joins), "also if the size of its group is not allowed"
    if joins:
        job.allocate({"o": 1}, "o has come", {"n": 0.0})
        for heard in enters(2, "w1", "w2"):
            job.group.take(heard)
        assert not saves(160.0), "w2 has its state"
