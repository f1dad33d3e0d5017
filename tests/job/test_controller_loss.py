"""A job outlives its controller's process: workers train on, and the next controller knows everything again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

import elastic_ray as er
from elastic_ray.events import EventKind, JobPhase
from elastic_ray.handle import find_controller
from tests.job import traced
from tests.job.jobs import kinds, start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(180)]


def controller_pid(handle: er.JobHandle) -> int:
    """Process of the job's controller."""
    deadline = time.monotonic() + 30
    while True:
        try:
            ready: Any = find_controller(handle.job).__ray_call__.remote(lambda _: os.getpid())  # type: ignore[union-attr]
            return int(ray.get(ready, timeout=30))
        except ray.exceptions.ActorUnavailableError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def kill_controller(handle: er.JobHandle) -> int:
    """SIGKILL; returns the process that was killed."""
    pid = controller_pid(handle)
    assert "Controller" in " ".join(psutil.Process(pid).cmdline())
    os.kill(pid, signal.SIGKILL)
    return pid


def step_times(folder: Path) -> list[float]:
    """When committed steps began."""
    return [line["time"] for line in traced.read(folder / "trace") if line["kind"] == "step"]


def test_training_goes_on_while_the_controller_is_away(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=2, epochs=40)
    wait_until(lambda: handle.status().workers == 2 and handle.status().step > 10, handle)
    before = handle.events()
    workers = {worker.pid for worker in handle.workers()}
    killed_s = time.time()
    pid = kill_controller(handle)
    wait_until(lambda: EventKind.RECOVERED in kinds(handle), handle)
    known_s = time.time()
    assert known_s - killed_s < 10.0
    assert handle.status().workers == 2
    assert handle.events()[: len(before)] == before
    assert {worker.pid for worker in handle.workers()} == workers
    assert controller_pid(handle) != pid
    assert handle.result(timeout=90).error is None
    assert handle.status().phase is JobPhase.FINISHED
    during = [at for at in step_times(tmp_path) if killed_s < at < known_s]
    edges = [killed_s, *during, known_s]
    assert max(b - a for a, b in zip(edges, edges[1:], strict=False)) < 1.5, "training goes on meanwhile"
    account = traced.account(tmp_path / "trace")
    assert account.worlds == [2] and len(account.final) == 1
    assert EventKind.FAILURE not in kinds(handle)
