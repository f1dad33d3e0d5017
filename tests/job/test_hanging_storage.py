"""Storage that hangs holds up neither training, nor stopping, nor placement, nor other jobs, and the status says so."""

from __future__ import annotations

import re
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import ray.train

import elastic_ray as er
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.events import EventKind, JobPhase
from tests.hanging_storage import HangingStorage
from tests.job import traced
from tests.job.jobs import run, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=6), pytest.mark.timeout(1000)]

_START_S = 150.0


@pytest.fixture
def remote(tmp_path: Path) -> Any:
    storage = HangingStorage(tmp_path)
    yield storage
    storage.answer()


def start(
    remote: HangingStorage, folder: Path, name: str, elastic: dict[str, Any], *, most: int = 1, **config: Any
) -> er.JobHandle:
    (trace := folder / f"trace_{name}").mkdir()
    return er.ElasticTrainer(
        traced.train,
        train_loop_config={"trace": str(trace), **config},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, most)),
        run_config=ray.train.RunConfig(name=name, storage_path="runs", storage_filesystem=remote.filesystem),
        elastic_config=er.ElasticConfig(**elastic),
    ).submit()


@pytest.mark.slow
def test_training_resizing_stopping_and_other_jobs_go_on(ray_cluster: Any, remote: Any, tmp_path: Path) -> None:
    handle = start(remote, tmp_path, "a", {"checkpoint_interval_s": 0.3}, most=2, epochs=10_000)
    wait_until(lambda: handle.status().step >= 5 and handle.status().workers == 2, handle, _START_S)
    storage = RunStorage("runs/a", remote.filesystem)

    remote.hang()
    handle.resize(1)
    wait_until(lambda: handle.status().workers == 1, handle)
    step = handle.status().step
    wait_until(lambda: handle.status().step >= step + 20, handle)
    # Of the two that hang, the one that began first is named.
    wait_until(lambda: re.search("writing (events|reports)", handle.status().note) is not None, handle)
    wait_until(lambda: "writing the automatic checkpoint" in handle.status().note, handle)
    assert "storage hanging://runs/a has not answered for" in handle.status().note

    other, _ = run(tmp_path, workers=1, epochs=1)
    assert other.status().workers == 0

    remote.answer()
    wait_until(lambda: storage.read_events() == handle.events(), handle)
    wait_until(lambda: handle.status().note == "", handle)
    assert EventKind.RESIZE in [event.kind for event in storage.read_events()]

    remote.hang()
    wait_until(lambda: "has not answered" in handle.status().note, handle)
    begin_s = time.monotonic()
    handle.stop()
    assert handle.wait(120)
    assert time.monotonic() - begin_s < 60
    remote.answer()


@pytest.mark.thorough
def test_report_whose_checkpoint_hangs_is_ended_by_a_stop(ray_cluster: Any, remote: Any, tmp_path: Path) -> None:
    handle = start(remote, tmp_path, "b", {"automatic_checkpoints": False}, checkpoint=True, epochs=10_000)
    wait_until(lambda: handle.status().epoch >= 1, handle, _START_S)
    remote.hang("checkpoint_")
    wait_until(lambda: "storing the checkpoint of report" in handle.status().note, handle)
    begin_s = time.monotonic()
    handle.stop()
    assert handle.wait(120)
    assert time.monotonic() - begin_s < 60
    assert handle.status().phase is JobPhase.STOPPED
    complete = list(remote.root.glob("runs/b/*/.elastic_ray.json"))
    remote.answer()
    stored = RunStorage("runs/b", remote.filesystem).stored_checkpoints()
    assert len(stored) == len(complete), "nothing is completed afterwards"


@pytest.mark.thorough
def test_checkpoint_that_storage_refuses_is_given_up_and_told(ray_cluster: Any, remote: Any, tmp_path: Path) -> None:
    elastic = {"automatic_checkpoints": False, "storage_timeout_s": 3.0}
    handle = start(remote, tmp_path, "c", elastic, checkpoint=True, epochs=12)
    wait_until(lambda: handle.status().epoch >= 1, handle, _START_S)
    remote.hang("checkpoint_")
    wait_until(lambda: any(event.kind is EventKind.STORAGE for event in handle.events()), handle)
    remote.answer()
    result = handle.result(timeout=180)
    assert result.metrics_dataframe is not None and len(result.metrics_dataframe) == 12
    assert result.checkpoint is not None and result.checkpoint.path.endswith("checkpoint_000012")
    told = [event.reason for event in handle.events() if event.kind is EventKind.STORAGE]
    assert told and all("was given up: storage hanging://runs/c has not answered for" in reason for reason in told)
    assert 12 > len(result.best_checkpoints or ()) >= 12 - len(told)
    traced.account(tmp_path / "trace_c")


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("private", [True, False])
def test_files_of_a_run_are_their_users_own(ray_cluster: Any, tmp_path: Path, private: bool) -> None:
    elastic = {"private_files": private, "checkpoint_interval_s": 0.2}
    handle, _ = run(tmp_path, workers=1, checkpoint=True, epochs=3, elastic=elastic)
    runs = tmp_path / "runs"
    assert {path.name for path in (runs / handle.job).iterdir()} >= {
        "events.jsonl",
        "reports.jsonl",
        "checkpoint_000001",
    }
    found = [runs, runs / handle.job, *(runs / handle.job).rglob("*")]
    others = [path for path in found if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert len(found) > 8 and others == ([] if private else found)
