"""Foreign programs as elastic jobs that grow while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray.train

import elastic_ray as er
from elastic_ray.events import EventKind
from tests.job.jobs import kinds, wait_until
from tests.loop import foreign

pytestmark = [pytest.mark.ray_cluster(num_cpus=4), pytest.mark.timeout(1000)]

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("program", "epochs", "whole"),
    [
        pytest.param(
            foreign.ncf,
            20,
            {"users": foreign.USERS, "samples": foreign.USERS * 30, "positives": foreign.USERS * 6},
            marks=SLOW,
        ),
        pytest.param(foreign.language, 60, {"chunks": foreign.STREAMS * foreign.CHUNKS}, marks=SLOW),
        pytest.param(foreign.averaged_folds, 30, {"samples": 60.0}, marks=SLOW),
    ],
)
def test_a_foreign_program_grows_and_shrinks(
    ray_cluster: Any, tmp_path: Path, program: Any, epochs: int, whole: dict[str, float]
) -> None:
    """Each epoch is whole before and after the change; the joiner sees the present epoch's negatives, state, fold."""
    handle = er.ElasticTrainer(
        program,
        train_loop_config={"epochs": epochs, "pause_s": 0.03},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path)),
    ).submit()
    handle.resize(1)
    wait_until(lambda: handle.status().step > 2, handle)
    for size in (2, 1, 2):
        handle.resize(size)
        wait_until(lambda size=size: handle.status().workers == size, handle)
    result = handle.result(timeout=180)
    assert result.metrics is not None
    assert result.metrics["workers"] == 2
    assert {name: result.metrics[name] for name in whole} == whole
    assert EventKind.FAILURE not in kinds(handle) and EventKind.RESTART not in kinds(handle)
