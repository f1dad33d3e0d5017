"""Jobs of units: workers that live and die together, in which torch's own parallelism runs unchanged."""

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
from elastic_ray.driver.handle import find_controller
from elastic_ray.events import EventKind
from elastic_ray.faults import Faults
from tests.job.controllers import kill_controller
from tests.job.jobs import kinds, wait_until
from tests.job.unit_jobs import check_close, parameters, submit

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000), pytest.mark.slow]


@pytest.mark.parametrize(
    ("kind", "unit", "whole"),
    [
        pytest.param("tp", 2, "plain", marks=pytest.mark.thorough),
        ("shard", er.Unit(shard=2), "plain"),
        ("pp", er.Unit(pp=2), "blocks"),
        ("cp", er.Unit(cp=2), "context"),
        ("ep", er.Unit(ep=2), "experts"),
    ],
)
def test_two_units_train_as_one_whole_worker(
    ray_cluster: Any, tmp_path: Path, kind: str, unit: Any, whole: str
) -> None:
    wanted = parameters(submit(tmp_path / "whole", whole, 1, 1))
    check_close(parameters(submit(tmp_path / "units", kind, 4, unit)), wanted)


def test_units_come_and_go_and_one_dies_undisturbed(ray_cluster: Any, tmp_path: Path) -> None:
    """Of the unit whose worker is killed the other process ends as well; no checkpoint is read."""
    wanted = parameters(submit(tmp_path / "whole", "plain", 1, 1, epochs=60))
    until = tmp_path / "done"
    handle = submit(tmp_path / "units", "tp", (2, 6), 2, epochs=60, until=str(until))
    for size in (2, 3, 2):
        handle.resize(size)
        wait_until(lambda size=size: handle.status().workers == size, handle)
    os.kill(handle.workers()[-1].pid, signal.SIGKILL)
    wait_until(lambda: EventKind.FAILURE in kinds(handle), handle)
    until.touch()
    check_close(parameters(handle), wanted)
    assert EventKind.RESIZE in kinds(handle) and EventKind.RESTART not in kinds(handle)


@pytest.mark.parametrize("moment", ["backward", "optimizer_step", "after_step", "edge"])
def test_steps_are_applied_by_whole_units(ray_cluster: Any, tmp_path: Path, moment: str) -> None:
    """One worker of three units dies, at moments at which some have what others lack."""
    wanted = parameters(submit(tmp_path / "whole", "plain", 1, 1))
    faults = Faults().kill(rank=1, step=9, moment=moment)
    handle = submit(tmp_path / "units", "tp", 6, 2, elastic={"faults": faults})
    check_close(parameters(handle), wanted)
    assert EventKind.FAILURE in kinds(handle) and EventKind.RESTART not in kinds(handle)


def test_a_job_resumes_from_parts_of_all_positions(ray_cluster: Any, tmp_path: Path) -> None:
    wanted = parameters(submit(tmp_path / "whole", "plain", 1, 1, epochs=12))
    until = tmp_path / "done"
    options: dict[str, Any] = {"epochs": 12, "until": str(until), "elastic": {"checkpoint_interval_s": 0.5}}
    handle = submit(tmp_path / "units", "tp", 4, 2, **options)
    wait_until(lambda: handle.status().step > 20, handle)
    for worker in handle.workers():
        os.kill(worker.pid, signal.SIGKILL)
    until.touch()
    check_close(parameters(handle), wanted)
    resumed = [event.reason for event in handle.events() if event.kind is EventKind.RESUMED]
    assert resumed and "from the automatic checkpoint at step" in resumed[0]


@pytest.mark.parametrize("dies", [False, True])
def test_units_train_on_while_their_controller_is_away(ray_cluster: Any, tmp_path: Path, dies: bool) -> None:
    """Both when all of them live and when a worker of one dies meanwhile, which is that unit's end alone."""
    wanted = parameters(submit(tmp_path / "whole", "plain", 1, 1, epochs=60))
    until = tmp_path / "done"
    handle = submit(tmp_path / "units", "tp", 4, 2, epochs=60, until=str(until))
    wait_until(lambda: handle.status().workers == 2 and handle.status().step > 5, handle)
    before = [worker.pid for worker in handle.workers()]
    kill_controller(handle)
    if dies:
        os.kill(before[-1], signal.SIGKILL)
    wait_until(lambda: EventKind.RECOVERED in kinds(handle), handle)
    wait_until(lambda: (EventKind.FAILURE in kinds(handle)) == dies, handle)
    wait_until(lambda: handle.status().workers == 2, handle, 90)
    now = [worker.pid for worker in handle.workers()]
    assert now != before if dies else now == before
    until.touch()
    check_close(parameters(handle), wanted)
    assert EventKind.RESTART not in kinds(handle)


def test_units_whose_controller_is_gone_for_good_save_job(ray_cluster: Any, tmp_path: Path) -> None:
    wanted = parameters(submit(tmp_path / "whole", "plain", 1, 1, epochs=20))
    until = tmp_path / "done"
    options: dict[str, Any] = {"epochs": 20, "until": str(until), "elastic": {"checkpoint_interval_s": 600.0}}
    handle = submit(tmp_path / "units", "tp", 4, 2, **options)
    wait_until(lambda: handle.status().workers == 2 and handle.status().step > 5, handle)
    pids = [worker.pid for worker in handle.workers()]
    ray.kill(find_controller(handle.job), no_restart=True)
    deadline = time.monotonic() + 90
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "the workers have not ended"
        time.sleep(0.1)  # until they have ended
    until.touch()
    again = submit(tmp_path / "units", "tp", 4, 2, **options)
    check_close(parameters(again), wanted)
    (resumed,) = [event.reason for event in again.events() if event.kind is EventKind.RESUMED]
    assert "from the automatic checkpoint at step" in resumed


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(("kind", "unit"), [("tp", 2), ("shard", er.Unit(shard=2))])
def test_noise_of_units_is_that_of_whole_workers(
    ray_cluster: Any, tmp_path: Path, kind: str, unit: Any, optimizer: str
) -> None:
    """What a worker holds a part of adds up, and what it holds as others do counts once."""
    results = [
        submit(tmp_path / name, *of, epochs=20, still=optimizer).result(timeout=300)
        for name, of in (("whole", ("plain", 2, 1)), ("units", (kind, 4, unit)))
    ]
    wanted, found = (dict(result.metrics or {})["noise"] for result in results)
    # The least denominator of Adam is a share of the typical one, which each worker knows of its own part alone.
    near = {("shard", "AdamW"): 0.15, ("tp", "AdamW"): 1e-3}.get((kind, optimizer), 1e-4)
    assert found == pytest.approx(wanted, rel=near) and wanted[1] > 0


def test_batch_of_units_adapts(ray_cluster: Any, tmp_path: Path) -> None:
    handle = submit(tmp_path / "units", "tp", 4, 2, epochs=80, largest=48)
    metrics = handle.result(timeout=300).metrics
    assert metrics is not None and metrics["noise"] and metrics["batch"] <= 48
    tried = [event.reason for event in handle.events() if event.kind is EventKind.BATCH]
    assert any("goodput" in reason or "is measured" in reason for reason in tried), tried
