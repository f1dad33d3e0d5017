"""Callbacks of Ray Train and loggers of Ray Tune hear of a job, once of each report, and cannot hold it up."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray.train
import ray.tune

import elastic_ray as er
from elastic_ray.events import EventKind
from tests.job import traced
from tests.job.controllers import kill_controller
from tests.job.jobs import kinds, wait_until
from tests.observe.listeners import Hangs, Listener, Logger, Raises, lines

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000)]


def start(folder: Path, callbacks: Sequence[Any], *, elastic: Any = None, **config: Any) -> er.JobHandle:
    """Submit a traced job with these callbacks."""
    trace = folder / "trace"
    trace.mkdir(exist_ok=True)
    return er.ElasticTrainer(
        traced.train,
        train_loop_config={"trace": str(trace), **config},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 3), resources_per_worker={"CPU": 1}),
        run_config=er.RunConfig(name="tracked", storage_path=str(folder / "runs"), callbacks=list(callbacks)),
        elastic_config=er.ElasticConfig(**(elastic or {})),
    ).submit()


def check_once(heard: list[int], all_reports: range) -> None:
    """Each comes once, in order; but what was told in the controller's last moment may come again."""
    at = next((i for i in range(1, len(heard)) if heard[i] <= heard[i - 1]), len(heard))
    repeated = set(heard[:at]) & set(heard[at:])
    assert len(repeated) <= 5, heard
    assert heard[:at] + [number for number in heard[at:] if number not in repeated] == list(all_reports)


@pytest.mark.slow
def test_callbacks_hear_of_each_report_once_whatever_is_lost(ray_cluster: Any, tmp_path: Path) -> None:
    told, logged = tmp_path / "told", tmp_path / "logged"
    handle = start(tmp_path, [Listener(told), Logger(logged)], epochs=80)
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2 and handle.status().step > 10, handle)
    os.kill(handle.workers()[0].pid, signal.SIGKILL)
    wait_until(lambda: any(line["kind"] == "exception" for line in lines(told)), handle)
    kill_controller(handle)
    wait_until(lambda: EventKind.RECOVERED in kinds(handle), handle)
    assert handle.result(timeout=180).error is None
    heard = lines(told)
    reports = [line for line in heard if line["kind"] == "report"]
    check_once([line["metrics"][0]["epoch"] for line in reports], range(80))
    assert len({line["run"] for line in reports}) == 1 and {line["name"] for line in reports} == {"tracked"}
    (exception, *_), (resize, *_) = (
        [line for line in heard if line["kind"] == kind] for kind in ("exception", "resize")
    )
    assert list(exception["errors"]) == ["0"] and "w1" in exception["errors"]["0"]
    assert resize["before"] == 2
    results = [line for line in lines(logged) if line[0] == "result"]
    check_once([line[1] for line in results], range(1, 81))
    assert results[-1][2] >= 79, "its state has come along"
    ends = [line for line in lines(logged) if line[0] not in ("result", "save")]
    assert [line[0] for line in ends] == ["setup", "start", "setup", "start", "end"] and ends[-1] == ["end", False]
    assert len({line[2] for line in ends if line[0] == "start"}) == 1


@pytest.mark.slow
def test_callbacks_that_raise_or_hang_are_told_and_harmless(ray_cluster: Any, tmp_path: Path) -> None:
    told = tmp_path / "told"
    callbacks = [Raises(), Hangs(), Listener(told)]
    handle = start(tmp_path, callbacks, epochs=4, elastic={"tracker_timeout_s": 2.0}, checkpoint="final")
    assert handle.result(timeout=180).error is None
    warnings = [event.reason for event in handle.events() if event.kind is EventKind.WARNING]
    assert len(warnings) == 1, "said once"
    assert "callback Raises raised in report" in warnings[0] and "SystemExit: no more" in warnings[0]
    assert len([line for line in lines(told) if line["kind"] == "report"]) == 4


@pytest.mark.thorough
def test_a_train_functions_error_is_told_with_its_rank(ray_cluster: Any, tmp_path: Path) -> None:
    told, logged = tmp_path / "told", tmp_path / "logged"
    handle = start(tmp_path, [Listener(told), Logger(logged)], epochs=4, raise_at=10)
    handle.resize(2)
    with pytest.raises(er.errors.TrainFunctionError):
        handle.result(timeout=180)
    (exception,) = (line for line in lines(told) if line["kind"] == "exception")
    [(rank, error)] = exception["errors"].items()
    assert rank in ("0", "1") and "the user's own mistake" in error
    assert lines(logged)[-1] == ["end", True]


def test_other_things_in_the_list_are_refused_by_name(tmp_path: Path) -> None:
    class Other(ray.tune.Callback):
        pass

    for wrong, said in ((Other(), "but got a .*Other"), (Logger, "the class Logger; pass an instance")):
        config = er.RunConfig(storage_path=str(tmp_path), callbacks=[wrong])
        with pytest.raises(TypeError, match=said):
            er.ElasticTrainer(traced.train, run_config=config)


def test_mlflow_has_one_run_with_every_report(ray_cluster: Any, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    from ray.air.integrations.mlflow import MLflowLoggerCallback

    uri = f"sqlite:///{tmp_path}/mlflow.db" if _has("sqlalchemy") else f"file://{tmp_path}/mlflow"
    handle = start(tmp_path, [MLflowLoggerCallback(uri, experiment_name="tracked")], epochs=40)
    wait_until(lambda: handle.status().step > 20, handle)
    kill_controller(handle)
    assert handle.result(timeout=180).error is None
    client = mlflow.tracking.MlflowClient(uri)
    experiment = client.get_experiment_by_name("tracked")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["epochs"] == "40"
    points = client.get_metric_history(run.info.run_id, "loss")
    assert sorted(point.step for point in points) == list(range(1, 41))
    assert client.get_metric_history(run.info.run_id, "elastic/workers")


def test_weights_and_biases_offline_keep_the_runs_id(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from ray.air.integrations.wandb import WandbLoggerCallback

    handle = start(tmp_path, [WandbLoggerCallback(project="tracked", api_key="0" * 40, mode="offline")], epochs=40)
    folder = tmp_path / "runs" / "tracked" / "trackers" / "wandb"
    wait_until(lambda: handle.status().step > 20 and folder.exists(), handle)
    kill_controller(handle)
    assert handle.result(timeout=180).error is None
    runs = [path.name for path in folder.iterdir() if path.name.startswith("offline-run-")]
    assert len({name.rsplit("-", 1)[1] for name in runs}) == 1, runs


def _has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None
