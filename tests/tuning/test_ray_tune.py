"""Sweeps of Ray Tune on a real cluster of this machine; one leaves its processes to the next."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

from elastic_ray.driver.handle import find_controller
from placement.ray_cluster.named_actors import ALLOCATOR, NAMESPACE
from tests.local_cluster import LocalCluster
from tests.tuning.sweeps import fit, trainable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray_cluster(num_cpus=4, resources={"slot": 4}),
    pytest.mark.usefixtures("sweep_cluster"),
]


def events(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Events of every run of every trial, by the run's directory."""
    files = sorted(folder.glob("*/*/run_*/events.jsonl"))
    return {str(file.parent): [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def epochs(result: Any) -> list[int]:
    return [int(epoch) for epoch in result.metrics_dataframe["epoch"]]


def test_reports_become_results_in_order_and_none_is_lost(tmp_path: Path) -> None:
    grid = fit(tmp_path, {"quality": tune.grid_search([1.0, 2.0]), "epochs": 5})
    assert not grid.errors
    for result in grid:
        rows = result.metrics_dataframe
        assert rows["training_iteration"].tolist() == [1, 2, 3, 4, 5]
        assert epochs(result) == [0, 1, 2, 3, 4]
        assert rows["score"].tolist() == [result.config["quality"] * k for k in range(1, 6)]
    assert grid.get_best_result().config["quality"] == 2.0


def test_what_asha_stops_returns_everything_within_one_report(tmp_path: Path) -> None:
    asha = ASHAScheduler(max_t=9, grace_period=2, reduction_factor=3)
    space = {"quality": tune.grid_search([3.0, 0.1, 0.2, 0.3]), "epochs": 9, "checkpoint": True}
    grid = fit(tmp_path, space, scheduler=asha, max_concurrent_trials=2)
    assert not grid.errors
    lengths = {result.config["quality"]: len(epochs(result)) for result in grid}
    assert lengths[3.0] == 9
    assert min(lengths.values()) < 9
    assert all(history[-1]["kind"] == "finished" for history in events(tmp_path).values())
    for result in grid:
        kept = [int(path.name.rpartition("_")[2]) for path in Path(result.path).glob("run_00/checkpoint_*")]
        assert max(kept) == len(epochs(result))  # none of a report that Tune never saw


def test_a_failed_trial_is_tried_again_from_its_checkpoint(tmp_path: Path) -> None:
    space = {"epochs": 6, "raise_at": 3, "checkpoint": True, "once": str(tmp_path / "once")}
    run = {"failure_config": tune.FailureConfig(max_failures=1)}
    (result,) = fit(tmp_path, space, elastic=trainable(workers=1), run=run)  # of two workers one would be replaced
    assert epochs(result)[-1] == 5
    assert result.metrics["inherited"] >= 3.0
    assert sorted({*epochs(result)}) == epochs(result)


def test_killed_trial_continues_with_the_job_that_still_runs(tmp_path: Path) -> None:
    """Its workers never stop; Tune sees every report once."""
    killer = threading.Thread(target=_kill_the_trial, args=(tmp_path,), daemon=True)
    killer.start()
    space = {"epochs": 12, "checkpoint": True, "hold": str(tmp_path / "killed")}
    (result,) = fit(tmp_path, space, run={"failure_config": tune.FailureConfig(max_failures=1)})
    killer.join(10)
    assert epochs(result) == list(range(12))
    assert result.metrics["inherited"] == 0.0  # it never started again
    (history,) = events(tmp_path).values()
    assert [event["kind"] for event in history].count("started") == 1


def _kill_the_trial(folder: Path) -> None:
    """SIGKILL to the trial's own process once it has reported three times."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        for file in folder.glob("*/*/result.json"):
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            if len(rows) >= 3:
                os.kill(rows[-1]["pid"], signal.SIGKILL)
                (folder / "killed").touch()
                return
        time.sleep(0.05)


def test_pbt_exploits_from_the_donors_checkpoint(tmp_path: Path) -> None:
    pbt = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=3,
        quantile_fraction=0.5,
        synch=True,
        hyperparam_mutations={"quality": [0.1, 5.0]},
    )
    space = {"quality": tune.grid_search([0.1, 5.0]), "epochs": 9, "checkpoint": True}
    grid = fit(tmp_path, space, scheduler=pbt, reuse_actors=True)
    assert not grid.errors
    # The worse one continued from the better one's 3 x 5.0 or more.
    assert min(result.metrics["score"] for result in grid) > 15.0
    assert max(result.metrics["inherited"] for result in grid) >= 15.0


def test_a_clone_reads_its_donors_checkpoint_from_memory(tmp_path: Path) -> None:
    """Storage is anything but a plain directory here, as a bucket would be."""
    pbt = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.5,
        hyperparam_mutations={"quality": [0.1, 5.0]},
        log_config=False,
    )
    far = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    space = {"quality": tune.grid_search([0.1, 5.0]), "epochs": 10, "checkpoint": True, "pause_s": 0.1}
    run = {"storage_path": "results", "storage_filesystem": far}
    grid = fit(tmp_path, space, scheduler=pbt, reuse_actors=True, run=run)
    assert not grid.errors
    assert max(result.metrics["inherited"] for result in grid) >= 5.0
    assert "py::fsspec+memory" in [result.metrics["read_from"] for result in grid]


def test_sweep_is_tenant_with_weight_that_it_was_given(tmp_path: Path) -> None:
    seen: dict[str, tuple[str, float | None]] = {}

    class Look(tune.Callback):
        def on_trial_result(self, **_: Any) -> None:
            allocator: Any = ray.get_actor(ALLOCATOR, namespace=NAMESPACE)
            jobs = ray.get(allocator.snapshot.remote()).jobs
            seen.update({job: (state.view.tenant, state.view.tenant_weight) for job, state in jobs.items()})

    fit(tmp_path, {"epochs": 2}, elastic=trainable(weight=2.5), run={"callbacks": [Look()]})
    assert set(seen.values()) == {("sweep tests", 2.5)}


@pytest.mark.parametrize("reuse", [False, True])
def test_a_trial_without_reports_fails_with_advice_alone(reuse: bool, tmp_path: Path) -> None:
    space = {"silent": tune.grid_search([False, True]), "epochs": 2, "pause_s": 0.0}
    grid = fit(tmp_path, space, reuse_actors=reuse, max_concurrent_trials=1)
    (error,) = grid.errors
    assert "has ended without a report: call elastic_ray.report" in str(error)
    (good,) = [result for result in grid if result.error is None]
    assert epochs(good) == [0, 1]


def test_with_parameters_values_are_below_each_trials_own(tmp_path: Path) -> None:
    elastic = tune.with_parameters(trainable(workers=1), quality=2.0, epochs=5)
    space = {"epochs": tune.grid_search([1, 2]), "pause_s": 0.0}
    grid = fit(tmp_path, space, elastic=elastic, max_concurrent_trials=1, reuse_actors=True)
    assert not grid.errors
    assert [result.metrics["score"] for result in grid] == [2.0, 4.0]


def test_pbt_without_checkpoints_says_what_is_missing(tmp_path: Path) -> None:
    pbt = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.5,
        synch=True,
        hyperparam_mutations={"quality": [0.1, 5.0]},
    )
    space = {"quality": tune.grid_search([0.1, 5.0]), "epochs": 6}
    grid = fit(tmp_path, space, scheduler=pbt)
    assert any("the train loop has not reported any" in str(error) for error in grid.errors), grid.errors
    assert len(grid) == 2


def test_when_all_is_over_no_trial_controller_is_found(tmp_path: Path) -> None:
    fit(tmp_path, {"epochs": 1})
    notes = [json.loads(file.read_text()) for file in tmp_path.glob("*/*/elastic_trial.json")]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(find_controller(note["controller"]) for note in notes):
        time.sleep(0.2)
    assert [find_controller(note["controller"]) for note in notes] == [None]


def test_the_cluster_is_whole_again(sweep_cluster: LocalCluster) -> None:
    deadline = time.monotonic() + 60  # Ray's own view lags behind
    while time.monotonic() < deadline and ray.available_resources().get("slot", 0) < 4:
        time.sleep(0.1)
    assert ray.available_resources()["slot"] == 4
