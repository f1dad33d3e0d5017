"""Starting jobs of units, for the tests beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray.train

import elastic_ray as er
from tests.job import united


def submit(folder: Path, kind: str, workers: Any, unit: Any, **config: Any) -> er.JobHandle:
    elastic, resource = config.pop("elastic", {}), config.pop("resource", "CPU")
    return er.ElasticTrainer(
        united.train,
        train_loop_config={"kind": kind, "epochs": 6, **config},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={resource: 1}),
        run_config=ray.train.RunConfig(name=folder.name, storage_path=str(folder)),
        elastic_config=er.ElasticConfig(**elastic),
        scheduling_config=er.SchedulingConfig(unit=unit),
    ).submit()


def parameters(handle: er.JobHandle) -> dict[str, list[float]]:
    result = handle.result(timeout=300)
    assert result.metrics is not None
    return dict(result.metrics["parameters"])


def check_close(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=1e-5, abs=1e-5), name
