"""Datasets of Ray Data in jobs: each row once an epoch, whatever happens to workers and to the reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import ray.data
import ray.train

import elastic_ray as er
from tests.integrations.rows import order, train, used_rows, write_files

pytestmark = [pytest.mark.ray_cluster(num_cpus=6), pytest.mark.timeout(180)]


def submit(folder: Path, dataset: Any, *, workers: int | tuple[int, int], epochs: int = 2, **more: Any) -> er.JobHandle:
    trace = folder / "trace"
    trace.mkdir(exist_ok=True)
    return er.ElasticTrainer(
        train,
        train_loop_config={"trace": str(trace), "epochs": epochs},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
        datasets={"train": dataset},
        **more,
    ).submit()


def test_two_workers_share_the_rows_in_the_dataset_s_order(ray_cluster: Any, tmp_path: Path) -> None:
    handle = submit(tmp_path, ray.data.read_parquet(write_files(tmp_path / "data")), workers=2)
    handle.result(timeout=150)
    steps = used_rows(tmp_path / "trace")
    assert [order(steps[epoch]) for epoch in sorted(steps)] == [list(range(240))] * 2
