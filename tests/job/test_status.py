"""What a real job's status tells of its time, its pauses, its end and what it waits for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import elastic_ray as er
from elastic_ray.events import EventKind, JobPhase, JobStatus
from tests.job.jobs import kinds, start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000)]


def parts_of(status: JobStatus) -> list[float]:
    return [status.waiting_s, status.starting_s, status.pausing_s, status.catching_up_s, status.training_s]


def check_sums(handle: er.JobHandle, began_s: float, called_s: float) -> JobStatus:
    """The parts sum to the time since submission, and every pause to its parts."""
    status = handle.status()
    assert min(parts_of(status)) >= 0
    assert time.time() - called_s >= sum(parts_of(status)) - 0.1 and sum(parts_of(status)) >= 0
    if not status.phase.ended:
        assert sum(parts_of(status)) == pytest.approx(time.time() - began_s, abs=3.0)
    for event in handle.events():
        if event.kind in (EventKind.RESIZE, EventKind.FAILURE):
            split = [event.detail[name] for name in ("vote_s", "group_s", "state_s")]
            assert min(split) >= 0 and sum(split) == pytest.approx(event.pause_s, abs=1e-6)
    return status


@pytest.mark.slow
def test_resize_and_killed_worker_are_pauses_of_known_parts(ray_cluster: Any, tmp_path: Path) -> None:
    called_s = time.time()
    handle = start(tmp_path, workers=(1, 2), epochs=400, pause_s=0.02)
    began_s = time.time()
    handle.resize(1)
    wait_until(lambda: handle.status().step > 5, handle)
    before = check_sums(handle, began_s, called_s)
    assert before.starting_s > 0 and before.last_pause is None and before.training_s > 0
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2, handle)
    wait_until(lambda: (pause := handle.status().last_pause) is not None and pause.first_step_s is not None, handle)
    resized = check_sums(handle, began_s, called_s)
    (event,) = [event for event in handle.events() if event.kind is EventKind.RESIZE]
    assert resized.last_pause is not None and resized.last_pause.pause_s == pytest.approx(event.pause_s)
    assert event.pause_s > 0 and resized.pausing_s == pytest.approx(event.pause_s)
    assert 0 < (resized.last_pause.first_step_s or 0) < 10

    os.kill(max(handle.workers(), key=lambda worker: worker.rank).pid, signal.SIGKILL)
    wait_until(lambda: EventKind.FAILURE in kinds(handle), handle)
    lost = check_sums(handle, began_s, called_s)
    assert lost.pausing_s > resized.pausing_s and lost.catching_up_s == 0
    wait_until(lambda: handle.status().eta_s is not None, handle)
    status = handle.status()
    assert status.eta_low_s is not None and status.eta_s is not None and status.eta_high_s is not None
    assert 0 < status.eta_low_s <= status.eta_s <= status.eta_high_s
    assert status.progress is not None and 0 < status.progress < 0.5
    assert status.samples_left is not None and status.steps_left is not None
    assert 192 * 200 < status.samples_left < 192 * 400 and status.steps_left == -(-status.samples_left // 24)
    handle.stop()
    handle.wait(30)
    ended = handle.status()
    time.sleep(0.2)  # time that must not count any more
    assert handle.status() == ended and ended.productive_share is not None and 0 < ended.productive_share < 1


@pytest.mark.slow
def test_job_waits_for_slots_and_catches_up_after_restarts(ray_cluster: Any, tmp_path: Path) -> None:
    ray_cluster.add_node(num_cpus=0, resources={"slot": 2})
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    called_s = time.time()
    first = start(
        tmp_path / "first",
        workers=2,
        name="first",
        epochs=40,
        pause_s=0.03,
        bundle={"slot": 1.0},
        max_failures=1,
        elastic={"automatic_checkpoints": False},
    )
    began_s = time.time()
    wait_until(lambda: first.status().eta_s is not None, first)
    second = start(tmp_path / "second", workers=2, name="second", epochs=1, bundle={"slot": 1.0})
    wait_until(lambda: second.status().start_s is not None, first)
    waiting = second.status()
    assert waiting.phase is JobPhase.WAITING and waiting.waits_for == "2 slots (slot 1)"
    assert waiting.start_s is not None and 0 < waiting.start_s < 120
    assert waiting.waiting_s > 0 and waiting.starting_s == waiting.training_s == 0

    for worker in first.workers():
        os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: EventKind.CAUGHT_UP in kinds(first), first)
    (restart,) = [event for event in first.events() if event.kind is EventKind.RESTART]
    assert restart.detail["reached_steps"] > restart.detail.get("steps", 0)
    caught_up = check_sums(first, began_s, called_s)
    assert caught_up.catching_up_s > 0 and caught_up.starting_s > 0
    first.result(timeout=180)
    assert second.wait(120)
    done = second.status()
    assert done.progress == 1.0 and done.waits_for == "" and done.start_s is None
    assert done.waiting_s > done.training_s and sum(parts_of(done)) < time.time() - called_s
