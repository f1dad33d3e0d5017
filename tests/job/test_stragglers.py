"""A worker becomes three times slower in the middle of a job: it is found, reported, relieved and replaced."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import ray.train

import elastic_ray as er
from elastic_ray.events import EventKind, JobEvent
from tests.job import straggling
from tests.job.jobs import kinds, wait_until
from tests.job.straggling_epochs import SAMPLES, WORKERS, check_epochs

pytestmark = [pytest.mark.ray_cluster(num_cpus=4), pytest.mark.timeout(1000)]


def start(folder: Path, most: int = SAMPLES, **elastic: Any) -> er.JobHandle:
    """A job of three workers, none of which is slow yet; ``most`` samples fit into the memory of one of them."""
    for name in ("trace", "slow"):
        (folder / name).mkdir()
    config = {
        "trace": str(folder / "trace"),
        "slow": str(folder / "slow"),
        "samples": SAMPLES,
        "batch_size": 36,
        "sample_s": 0.003,
        "epochs": 100_000,
        "most": most,
    }
    return er.ElasticTrainer(
        straggling.train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS),
        run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
        elastic_config=er.ElasticConfig(**elastic),
    ).submit()


def told(handle: er.JobHandle, state: str) -> list[JobEvent]:
    """What was reported of stragglers."""
    return [e for e in handle.events() if e.kind is EventKind.STRAGGLER and e.detail["state"] == state]


def slow_down(handle: er.JobHandle, folder: Path, rank: int) -> er.events.WorkerInfo:
    """Make a worker three times slower, once the job has trained for a while."""
    wait_until(lambda: handle.status().workers == WORKERS and handle.status().step > 30, handle)
    worker = handle.workers()[rank]
    (folder / "slow" / str(worker.pid)).write_text("3")
    return worker


@pytest.mark.slow
def test_a_slow_worker_is_told_and_takes_fewer_samples(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, stragglers="share")
    worker = slow_down(handle, tmp_path, rank=1)
    wait_until(lambda: bool(told(handle, "shares")), handle)
    found = told(handle, "slow")[0]
    assert found.detail["worker"] == worker.worker and found.detail["node"] == worker.node
    assert found.detail["rank"] == 1 and found.detail["cause"] == "worker" and 2 < found.detail["ratio"] < 4.5
    wait_until(lambda: worker.worker in handle.status().note, handle)
    at = handle.status().step
    wait_until(lambda: handle.status().step > at + 60, handle)
    (tmp_path / "slow" / str(worker.pid)).unlink()
    wait_until(lambda: bool(told(handle, "recovered")), handle)
    wait_until(lambda: worker.worker not in handle.status().note, handle)
    handle.stop()
    handle.result(timeout=180)
    assert {EventKind.RESIZE, EventKind.FAILURE, EventKind.RESTART}.isdisjoint(kinds(handle))
    sizes = check_epochs(tmp_path)
    relieved = [sizes[at + step, 1] for step in range(30, 60)]
    assert sum(relieved) / len(relieved) < 9 < 12 < sizes[at + 50, 0]
    batches = collections.Counter[int]()
    for (step, _), count in sizes.items():
        batches[step] += count
    assert {batches[at + step] for step in range(60)} == {36}, "the global batch stays"


@pytest.mark.slow
def test_shares_that_do_not_fit_into_memory_are_withdrawn(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, most=13, stragglers="share")
    worker = slow_down(handle, tmp_path, rank=1)

    def failures() -> list[JobEvent]:
        return [event for event in handle.events() if event.kind is EventKind.OUT_OF_MEMORY]

    wait_until(lambda: bool(failures()), handle)
    wait_until(lambda: handle.status().generation > 1 and len(handle.workers()) == WORKERS, handle)
    at = handle.status().step
    wait_until(lambda: handle.status().step > at + 60, handle)
    assert worker.worker in handle.status().note, "it is still known as slow"
    handle.stop()
    handle.result(timeout=180)
    assert "shares are equal from now on" in failures()[0].reason and len(failures()) <= 2, "one a worker at most"
    assert len(told(handle, "shares")) == 1
    sizes = check_epochs(tmp_path)
    assert {sizes[at + step, rank] for step in range(1, 60) for rank in range(WORKERS)} == {12}


@pytest.mark.slow
def test_by_default_it_is_only_told_of(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path)
    worker = slow_down(handle, tmp_path, rank=2)
    wait_until(lambda: bool(told(handle, "slow")), handle)
    at = handle.status().step
    wait_until(lambda: handle.status().step > at + 20, handle)
    handle.stop()
    handle.result(timeout=180)
    assert [event.detail["worker"] for event in told(handle, "slow")] == [worker.worker]
    assert not told(handle, "shares")
    sizes = check_epochs(tmp_path)
    assert {sizes[at + step, rank] for step in range(20) for rank in range(WORKERS)} == {12}


@pytest.mark.slow
@pytest.mark.parametrize("rank", (0, 2))
def test_one_that_stays_slow_is_replaced_while_it_trains(ray_cluster: Any, tmp_path: Path, rank: int) -> None:
    handle = start(tmp_path, stragglers="replace", straggler_patience_s=2.0)
    worker = slow_down(handle, tmp_path, rank=rank)
    wait_until(lambda: worker.pid not in {each.pid for each in handle.workers()} and bool(handle.workers()), handle)
    at = handle.status().step
    wait_until(lambda: handle.status().step > at + 40 and not handle.status().note, handle)
    handle.stop()
    handle.result(timeout=180)
    assert {EventKind.FAILURE, EventKind.RESTART}.isdisjoint(kinds(handle))
    moves = [event for event in handle.events() if event.kind is EventKind.RESIZE]
    assert [(event.from_workers, event.to_workers) for event in moves] == [(WORKERS, WORKERS)]
    assert f"in place of worker {worker.worker}" in moves[0].reason and moves[0].pause_s < 5
    sizes = check_epochs(tmp_path)
    assert {sizes[at + 30, other] for other in range(WORKERS)} == {12}, "the newcomer has a whole share"
