"""Jobs of units: workers that live and die together, in which torch's own parallelism runs unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray.train

import elastic_ray as er
from elastic_ray.events import EventKind
from elastic_ray.faults import Faults
from tests.job import united
from tests.job.jobs import kinds, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(600), pytest.mark.thorough]


def submit(folder: Path, kind: str, workers: Any, unit: Any, faults: Faults | None = None, **config: Any) -> Any:
    return er.ElasticTrainer(
        united.train,
        train_loop_config={"kind": kind, "epochs": 6, **config},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
        elastic_config=er.ElasticConfig(faults=faults),
        scheduling_config=er.SchedulingConfig(unit=unit),
    ).submit()


def parameters(handle: Any) -> dict[str, list[float]]:
    result = handle.result(timeout=300)
    assert result.metrics is not None
    return dict(result.metrics["parameters"])


def check_close(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=1e-5, abs=1e-5), name


def test_units_train_as_one_plain_worker(ray_cluster: Any, tmp_path: Path) -> None:
    wanted = parameters(submit(tmp_path / "plain", "plain", 1, 1))
    check_close(parameters(submit(tmp_path / "units", "tp", 4, 2)), wanted)


def test_parameters_through_resizes_and_kill_are_undisturbed(ray_cluster: Any, tmp_path: Path) -> None:
    wanted = parameters(submit(tmp_path / "plain", "plain", 1, 1, epochs=60))
    until = tmp_path / "done"
    handle = submit(tmp_path / "units", "tp", (2, 6), 2, epochs=60, until=str(until))
    handle.resize(2)
    for size in (2, 3, 2):
        handle.resize(size)
        wait_until(lambda size=size: handle.status().workers == size, handle, 120)
    until.touch()
    check_close(parameters(handle), wanted)
    assert EventKind.RESIZE in kinds(handle) and EventKind.FAILURE not in kinds(handle)
