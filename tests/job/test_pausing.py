"""Jobs that are paused: saved between two steps, without slots, and resumed where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_ray.adaptation import Pause, Policy, PolicyView
from elastic_ray.driver.handle import JobHandle
from elastic_ray.events import EventKind, JobPhase
from placement.ray_cluster.named_actors import ALLOCATOR, find_actor
from tests.job import traced
from tests.job.controllers import kill_controller
from tests.job.jobs import kinds, start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=4, resources={"slot": 2}), pytest.mark.timeout(1000)]

SLOT = {"slot": 1.0}


def paused(handle: JobHandle) -> bool:
    return handle.status().phase is JobPhase.PAUSED


@pytest.mark.thorough
def test_paused_job_returns_slots_and_continues_where_it_was(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "long").mkdir()
    (tmp_path / "short").mkdir()
    long = start(tmp_path / "long", workers=2, epochs=24, pause_s=0.05, bundle=SLOT, name="long")
    with pytest.raises(ValueError, match="'long' cannot be resumed: it is not paused"):
        long.resume()
    wait_until(lambda: long.status().step >= 5, long)
    long.pause("room for another")
    with pytest.raises(ValueError, match="it is paused already \\(room for another\\)"):
        long.pause()
    wait_until(lambda: paused(long), long)
    before = long.status()
    assert (before.workers, before.message, before.waits_for) == (0, "room for another", "")
    assert before.checkpoint and before.step > 0

    ray.kill(find_actor(ALLOCATOR), no_restart=False)
    short = start(tmp_path / "short", workers=2, epochs=2, bundle=SLOT)  # needs every slot there is
    short.result(timeout=180)
    assert paused(long) and EventKind.RESTART not in kinds(long)
    kill_controller(long)
    wait_until(lambda: EventKind.RECOVERED in kinds(long), long)
    assert paused(long) and long.status().message == "room for another"

    long.resume()
    long.result(timeout=180)
    happened = kinds(long)
    assert happened.count(EventKind.STARTED) == 2 and EventKind.RESTART not in happened
    (event,) = [event for event in long.events() if event.kind is EventKind.PAUSED]
    assert (event.from_workers, event.to_workers, event.reason) == (2, 0, "room for another")
    lines = [line for line in traced.read(tmp_path / "long" / "trace") if line["kind"] == "step" and line["rank"] == 0]
    steps = [line["step"] for line in sorted(lines, key=lambda line: line["time"])]
    assert steps == list(range(len(steps)))


@pytest.mark.thorough
def test_a_paused_job_can_stop_unsaved_jobs_cannot_pause(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    unsaved = {"automatic_checkpoints": False}
    other = start(tmp_path / "other", workers=1, epochs=100_000, bundle=SLOT, elastic=unsaved)
    with pytest.raises(ValueError, match="automatic_checkpoints=False\\) saves no state"):
        other.pause()
    other.stop(now=True)
    handle = start(tmp_path, workers=1, epochs=100_000, bundle=SLOT)
    handle.pause()  # before it has begun
    wait_until(lambda: paused(handle), handle)
    handle.resume()
    wait_until(lambda: handle.status().step >= 3, handle)
    handle.pause()
    wait_until(lambda: paused(handle), handle)
    handle.stop()
    assert handle.result(timeout=180).error is None and handle.status().phase is JobPhase.STOPPED
    with pytest.raises(ValueError, match="cannot be paused: it has ended \\(stopped\\)"):
        handle.pause()


class PausesOnce(Policy):
    """Pauses the job after its third step."""

    def after_step(self, view: PolicyView) -> Pause | None:
        return Pause("three steps are enough for now") if view.step == 3 else None


@pytest.mark.thorough
def test_a_policy_pauses_its_job_once(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=1, epochs=3, pause_s=0.05, bundle=SLOT, own_policy=PausesOnce())
    wait_until(lambda: paused(handle), handle)
    assert "PausesOnce.after_step" in handle.status().message
    handle.resume()
    handle.result(timeout=180)
    assert kinds(handle).count(EventKind.PAUSED) == 1
