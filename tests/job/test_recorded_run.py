"""A short real run, recorded: decided anew to the letter, and simulated from what its jobs had measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from placement.allocator.actor import get_or_create_allocator
from placement.allocator.config import AllocatorConfig
from placement.allocator.recording import read_recording, replay
from placement.simulator import simulate
from placement.simulator.workloads.recorded import recorded_workload
from placement.simulator.workloads.traces import Lengths
from placement.simulator.world.rules import LIVE_PACE, LiveRules
from tests.job.jobs import start

pytestmark = [pytest.mark.ray_cluster(num_cpus=3, _system_config={}), pytest.mark.timeout(1000)]

NET = {"model_fingerprint": "little-net", "samples": 240, "batch_size": 24, "workers": (1, 3), "pause_s": 0.1}


@pytest.mark.slow
def test_two_jobs_are_recorded_decided_anew_and_simulated(ray_cluster: Any, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    get_or_create_allocator("goodput", config=AllocatorConfig(record=str(path)))
    first = start(tmp_path, name="first", epochs=16, **NET)
    time.sleep(5.0)  # the first is to hold nodes before the second comes
    second = start(tmp_path, name="second", epochs=8, **NET)
    for handle in (first, second):
        handle.result(timeout=300)
    deadline = time.monotonic() + 60
    while '"JobEnded":{"job":"second"' not in path.read_text() or '"JobEnded":{"job":"first"' not in path.read_text():
        assert time.monotonic() < deadline, "both ends are recorded"
        time.sleep(0.1)
    get_or_create_allocator("goodput", config=AllocatorConfig())
    with path.open() as file:
        (life,) = read_recording(file)
    assert {record.job for record in life.decided} == {"first", "second"}
    assert list(map(repr, replay(life))) == list(map(repr, life.decided))
    work = recorded_workload(life)
    assert work.epochs == {"first": 16, "second": 8} and work.cluster == "t4:1x3" and work.most_workers == 3
    rules = LiveRules(pause=0.2, start=3.0, first=3.0, slow_sia=False, most_workers=3, pace=LIVE_PACE)
    report = simulate(
        work.trace,
        work.applications,
        work.cluster,
        rules=rules,
        policy="goodput",
        knowledge=True,
        lengths=Lengths(epochs=work.epochs),
    )
    steps_s = {"first": 16.0, "second": 8.0}  # of sleep alone; process starts take as long as the machine lets them
    for job in report.jobs:
        assert job.finish_s - job.arrival_s >= 0.95 * steps_s.pop(job.job)
    assert not steps_s and all(job.end_s is not None for job in work.jobs)
