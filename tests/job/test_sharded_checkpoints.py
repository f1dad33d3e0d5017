"""Jobs whose optimizer state lies in tiles, and that continue from what all of their ranks have saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray.train

import elastic_ray as er
from elastic_ray.checkpoints.automatic import state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.events import EventKind
from elastic_ray.faults import Faults
from placement.allocator.actor import get_or_create_allocator
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from tests.job import sharded_rows, tiled
from tests.job.jobs import kinds, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8, resources={"slot": 3}), pytest.mark.timeout(1000)]


def last_come_first_served(jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, int]:
    """The newest job has the cluster for itself, if the others can be stopped without a loss."""
    newest = max(jobs, key=lambda view: view.submitted_s)
    stay = {view.job for view in jobs if view.allocation and view.stop_cost_s is None} or {newest.job}
    return {view.job: 3 * (view.job in stay) for view in jobs}


def start(
    folder: Path,
    *,
    name: str = "tiled",
    workers: int = 3,
    strategy: str = "zero1",
    train: Callable[[dict[str, Any]], None] = tiled.train,
    epochs: int = 5,
    interval_s: float = 0.05,
    faults: Faults | None = None,
    max_failures: int = 0,
    bundle: dict[str, float] | None = None,
    **config: Any,
) -> er.JobHandle:
    return er.ElasticTrainer(
        train,
        train_loop_config={"strategy": strategy, "optimizer": "adamw", "epochs": epochs, **config},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker=bundle or {"CPU": 1}),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(folder / "runs"),
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
        ),
        elastic_config=er.ElasticConfig(faults=faults, checkpoint_interval_s=interval_s, restart=False),
    ).submit()


def resumed_at(handle: er.JobHandle) -> int:
    (event,) = [event for event in handle.events() if event.kind is EventKind.RESUMED]
    return int(event.reason.split(" at step ")[1].split(";")[0])


def undisturbed(folder: Path, **config: Any) -> dict[str, Any]:
    result = start(folder, name="undisturbed", strategy="all_reduce", pause_s=0.0, **config).result(timeout=600)
    assert result.metrics is not None
    return dict(result.metrics)


@pytest.mark.slow
def test_all_members_lost_continue_from_the_parts_of_all(ray_cluster: Any, tmp_path: Path) -> None:
    faults = Faults()
    for rank in range(3):
        faults = faults.kill(rank=rank, step=25, moment="forward")
    handle = start(tmp_path, faults=faults, max_failures=1, pause_s=0.08)
    found = handle.result(timeout=600).metrics
    assert EventKind.RESTART in kinds(handle) and 4 <= resumed_at(handle) <= 25
    assert found is not None and found["epoch"] == 4
    wanted = undisturbed(tmp_path)
    assert found["weights"] == wanted["weights"] and found["moments"] == wanted["moments"]
    (state,) = state_files(RunStorage(str(tmp_path / "runs" / "tiled")))
    assert state.parts > 1, "all ranks have written what the job has ended with, and nothing else is kept"


@pytest.mark.slow
def test_all_members_lost_each_of_next_reads_its_rows(ray_cluster: Any, tmp_path: Path) -> None:
    faults = Faults()
    for rank in range(3):
        faults = faults.kill(rank=rank, step=25, moment="forward")
    handle = start(tmp_path, train=sharded_rows.train, faults=faults, max_failures=1, pause_s=0.08)
    found = handle.result(timeout=600).metrics
    assert EventKind.RESTART in kinds(handle) and 4 <= resumed_at(handle) <= 25
    wanted = start(tmp_path, name="undisturbed", train=sharded_rows.train, pause_s=0.0).result(timeout=600).metrics
    assert found is not None and wanted is not None and found["epoch"] == wanted["epoch"] == 4
    assert found["sums"] == pytest.approx(wanted["sums"], rel=1e-4)


@pytest.mark.slow
def test_worker_killed_in_a_save_costs_that_checkpoint_only(ray_cluster: Any, tmp_path: Path) -> None:
    faults = Faults().kill(rank=1, moment="save")
    handle = start(tmp_path, workers=4, epochs=400, faults=faults, pause_s=0.05)
    storage = RunStorage(str(tmp_path / "runs" / "tiled"))

    def together() -> bool:
        return EventKind.FAILURE in kinds(handle) and any(each.parts > 1 for each in state_files(storage))

    wait_until(together, handle, 600)
    assert EventKind.RESTART not in kinds(handle)
    handle.stop()
    handle.wait(30)


@pytest.mark.slow
def test_job_continues_at_another_size_from_last_good_one(ray_cluster: Any, tmp_path: Path) -> None:
    storage = RunStorage(str(tmp_path / "runs" / "tiled"))
    handle = start(tmp_path, epochs=10, pause_s=0.1)
    wait_until(lambda: len([state for state in state_files(storage) if state.parts > 1]) > 1, handle, 600)
    handle.stop()
    handle.wait(30)
    newest, older = state_files(storage)[:2]
    part = Path(newest.path) / "__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    handle = start(tmp_path, workers=1, epochs=10, strategy="all_reduce", pause_s=0.0)
    found = handle.result(timeout=600).metrics
    assert resumed_at(handle) == older.steps
    event = next(event for event in handle.events() if event.kind is EventKind.RESUMED)
    assert "__1_0.distcp does not have the checksum" in event.reason
    assert found is not None and found["epoch"] == 9


@pytest.mark.slow
def test_a_preempted_job_is_saved_by_all_ranks(ray_cluster: Any, tmp_path: Path) -> None:
    get_or_create_allocator(last_come_first_served)
    options: dict[str, Any] = {"bundle": {"slot": 1.0}}
    storage = RunStorage(str(tmp_path / "runs" / "tiled"))
    long = start(tmp_path, epochs=20, interval_s=0.3, pause_s=0.1, **options)
    wait_until(lambda: any(state.parts > 1 for state in state_files(storage)), long, 600)
    short = start(tmp_path, name="short", epochs=1, **options)
    short.result(timeout=600)
    assert EventKind.PREEMPTED in kinds(long)
    found = long.result(timeout=600).metrics
    assert EventKind.RESTART not in kinds(long) and EventKind.FAILURE not in kinds(long)
    assert kinds(long).count(EventKind.STARTED) == 2 and EventKind.RESUMED in kinds(long)
    assert found is not None and found["epoch"] == 19


@pytest.mark.slow
def test_a_worker_out_of_memory_continues_all_save(ray_cluster: Any, tmp_path: Path) -> None:
    faults = Faults().out_of_memory(rank=1, step=20, moment="forward")
    adapt = {"max_batch_size": 96, "local_bsz_bounds": (2, 96), "gradient_accumulation": True}
    storage = RunStorage(str(tmp_path / "runs" / "tiled"))
    handle = start(tmp_path, epochs=10_000, faults=faults, pause_s=0.05, adapt=adapt)
    wait_until(lambda: EventKind.OUT_OF_MEMORY in kinds(handle), handle, 600)
    step = handle.status().step
    wait_until(lambda: any(state.parts > 1 and state.steps > step for state in state_files(storage)), handle, 600)
    assert EventKind.RESTART not in kinds(handle)
    handle.stop()
    handle.wait(30)
