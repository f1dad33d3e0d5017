"""Datasets of Ray Data in jobs: each row once an epoch, whatever happens to workers and to the reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.data
import ray.train

import elastic_ray as er
from elastic_ray.events import EventKind
from placement.ray_cluster.named_actors import actors_named
from tests.integrations.rows import NoteReads, order, train, used_rows, write_files
from tests.job.jobs import kinds, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=4), pytest.mark.timeout(1000)]


def submit(
    folder: Path,
    dataset: Any,
    *,
    workers: int | tuple[int, int],
    epochs: int = 2,
    max_failures: int = 0,
    valid: Any = None,
    **more: Any,
) -> er.JobHandle:
    trace = folder / "trace"
    trace.mkdir(exist_ok=True)
    failures = ray.train.FailureConfig(max_failures=max_failures)
    return er.ElasticTrainer(
        train,
        train_loop_config={"trace": str(trace), "epochs": epochs, "valid": valid is not None},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(folder / "runs"), failure_config=failures),
        datasets={"train": dataset} if valid is None else {"train": dataset, "valid": valid},
        **more,
    ).submit()


@pytest.mark.slow
def test_two_workers_share_the_rows_in_the_datasets_order(ray_cluster: Any, tmp_path: Path) -> None:
    valid = ray.data.from_items([{"id": number} for number in range(10)])
    handle = submit(tmp_path, ray.data.read_parquet(write_files(tmp_path / "data")), workers=2, valid=valid)
    metrics = handle.result(timeout=350).metrics
    assert metrics == {"epoch": 1, "rows": 10, "sum": 45, "steps": 3}
    steps = used_rows(tmp_path / "trace")
    assert [order(steps[epoch]) for epoch in sorted(steps)] == [list(range(240))] * 2


def reader() -> Any:
    """The actor that reads the job's datasets."""
    ((_, found),) = actors_named("data:")
    return found


def set_pause(folder: Path, pause_s: float) -> None:
    """What each step of the train function takes besides."""
    (folder / "trace").mkdir(exist_ok=True)
    written = folder / "pause.new"
    written.write_text(str(pause_s))
    written.replace(folder / "trace" / "pause")


@pytest.mark.slow
def test_rows_are_used_and_read_once_while_workers_change(ray_cluster: Any, tmp_path: Path) -> None:
    reads = tmp_path / "reads"
    reads.mkdir()
    dataset = ray.data.read_parquet(write_files(tmp_path / "data")).map_batches(NoteReads(str(reads)))
    set_pause(tmp_path, 1.0)
    handle = submit(tmp_path, dataset, workers=(1, 3), epochs=3)
    for workers in (1, 3, 2):
        handle.resize(workers)
        wait_until(lambda workers=workers: handle.status().workers == workers, handle, 120)
    os.kill(handle.workers()[0].pid, signal.SIGKILL)
    wait_until(lambda: EventKind.FAILURE in kinds(handle), handle, 120)
    set_pause(tmp_path, 0.0)
    handle.result(timeout=200)
    steps = used_rows(tmp_path / "trace")
    assert [order(steps[epoch]) for epoch in sorted(steps)] == [list(range(240))] * 3
    read = sorted(int(row) for file in reads.iterdir() for row in file.read_text().split())
    assert read == sorted([*range(240)] * 3)


@pytest.mark.slow
def test_a_reader_that_dies_continues_in_the_same_order(ray_cluster: Any, tmp_path: Path) -> None:
    dataset = ray.data.read_parquet(write_files(tmp_path / "data")).random_shuffle().repartition(12)
    set_pause(tmp_path, 1.0)
    handle = submit(tmp_path, dataset, workers=2)  # which know of few blocks in advance
    wait_until(lambda: handle.status().step >= 5, handle, 120)
    os.kill(ray.get(reader().__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    set_pause(tmp_path, 0.0)
    handle.result(timeout=200)
    steps = used_rows(tmp_path / "trace")
    orders = [order(steps[epoch]) for epoch in sorted(steps)]
    assert [sorted(each) for each in orders] == [list(range(240))] * 2
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])


@pytest.mark.slow
def test_job_restarted_from_a_checkpoint_uses_the_epochs_rest(ray_cluster: Any, tmp_path: Path) -> None:
    dataset = ray.data.read_parquet(write_files(tmp_path / "data")).random_shuffle()
    set_pause(tmp_path, 1.0)
    handle = submit(
        tmp_path,
        dataset,
        workers=2,
        elastic_config=er.ElasticConfig(checkpoint_interval_s=0.5),
        max_failures=1,
    )
    wait_until(lambda: handle.status().step >= 9, handle, 120)
    for worker in handle.workers():
        os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: EventKind.RESTART in kinds(handle), handle, 120)
    set_pause(tmp_path, 0.0)
    handle.result(timeout=200)
    (restart,) = [event for event in handle.events() if event.kind is EventKind.RESTART]
    assert 0 < restart.detail["steps"] < 15, "in the middle of the first epoch"
    steps = used_rows(tmp_path / "trace")
    assert [sorted(order(steps[epoch])) for epoch in sorted(steps)] == [list(range(240))] * 2


DRIVER = """
import sys, time
from pathlib import Path
import ray, ray.data
ray.init(address=sys.argv[1])
from tests.integrations.rows import write_files
from tests.integrations.test_ray_data_jobs import submit
folder = Path(sys.argv[2])
handle = submit(folder, ray.data.read_parquet(write_files(folder / "data")), workers=1)
while handle.status().step < 2:
    time.sleep(0.1)
print("trains", flush=True)
time.sleep(100)
"""


@pytest.mark.slow
def test_reader_ends_with_a_job_whose_driver_was_killed(ray_cluster: Any, tmp_path: Path) -> None:
    set_pause(tmp_path, 0.5)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, ray_cluster.address, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    while "trains" not in driver.stdout.readline():
        assert driver.poll() is None
    assert list(actors_named("data:"))
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 60
    while list(actors_named("data:")):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def elsewhere(batch: dict[str, Any]) -> dict[str, Any]:
    """Comes from a module that the head node does not have."""
    return batch


@pytest.mark.thorough
def test_functions_whose_module_is_not_there_are_named(ray_cluster: Any, tmp_path: Path) -> None:
    made = types.ModuleType("module_of_the_driver_alone")
    made.elsewhere, elsewhere.__module__ = elsewhere, made.__name__  # type: ignore[attr-defined]
    sys.modules[made.__name__] = made
    dataset = ray.data.read_parquet(write_files(tmp_path / "data")).map_batches(elsewhere)
    words = r"No module named 'module_of_the_driver_alone'.*worker_runtime_env"
    with pytest.raises(er.errors.TrainFunctionError, match=words):
        submit(tmp_path, dataset, workers=1).result(timeout=200)
