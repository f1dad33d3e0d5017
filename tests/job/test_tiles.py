"""Jobs whose optimizer state lies in tiles, with worker processes that get SIGKILL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray.train

import elastic_ray as er
from elastic_ray.events import EventKind
from elastic_ray.faults import Faults
from elastic_ray.sync.spec import Owner
from tests.job import tiled
from tests.job.jobs import kinds

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000)]


def run(
    folder: Path, strategy: Any, optimizer: str, faults: Faults, workers: Any = 4, **failure: Any
) -> tuple[dict[str, Any], Any]:
    handle = er.ElasticTrainer(
        tiled.train,
        train_loop_config={"strategy": strategy, "optimizer": optimizer, "epochs": 4},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "runs"), failure_config=ray.train.FailureConfig(**failure)
        ),
        elastic_config=er.ElasticConfig(faults=faults, checkpoint_interval_s=0.1),
    ).submit()
    result = handle.result(timeout=180)
    assert result.metrics is not None
    return dict(result.metrics), handle


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("zero1", "adamw"),
        pytest.param("zero1", "sgd", marks=pytest.mark.slow),
        pytest.param("zero2", "adamw", marks=pytest.mark.slow),
    ],
)
def test_killed_processes_lose_no_state_and_change_no_training(
    ray_cluster: Any, tmp_path: Path, strategy: str, optimizer: str
) -> None:
    """Two are killed, one after the other, in steps that are drawn again."""
    faults = Faults().kill(rank=1, step=9, moment="backward").kill(rank=0, step=20, moment="backward")
    found, handle = run(tmp_path / "tiles", strategy, optimizer, faults)
    wanted, _ = run(tmp_path / "replicated", "all_reduce", optimizer, faults)
    assert kinds(handle).count(EventKind.FAILURE) == 2 and EventKind.RESTART not in kinds(handle)
    for name in ("weights", "moments"):
        if strategy == "zero1":
            assert found[name] == wanted[name], f"{name}: bit by bit"
        for one, other in zip(found[name], wanted[name], strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5), name


@pytest.mark.slow
def test_with_one_owner_kill_ends_the_group_by_name(ray_cluster: Any, tmp_path: Path) -> None:
    faults = Faults().kill(rank=1, step=14, moment="backward")
    found, handle = run(tmp_path, Owner(unit="tile", copies=1), "sgd", faults, (2, 4), max_failures=1)
    (reason,) = [event.reason for event in handle.events() if event.kind is EventKind.RESTART]
    assert "of the optimizer state of model 0 was lost with all workers that held it (" in reason, reason
    assert EventKind.RESUMED in kinds(handle) and found["epoch"] == 3
