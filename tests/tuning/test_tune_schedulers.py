"""Ray Tune's schedulers and searchers, each with a small sweep of elastic trials; what ends them, and how."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.tune.schedulers import HyperBandForBOHB, MedianStoppingRule
from ray.tune.schedulers.pb2 import PB2
from ray.tune.search import BasicVariantGenerator
from ray.tune.search.bohb import TuneBOHB
from ray.tune.search.hyperopt import HyperOptSearch
from ray.tune.search.optuna import OptunaSearch

import elastic_ray as er
import tuning
from placement.allocator.actor import get_or_create_allocator
from placement.ray_cluster.named_actors import ALLOCATOR, NAMESPACE
from tests.local_cluster import LocalCluster
from tests.tuning.sweeps import fit, in_tune_words, train, trainable

pytestmark = [
    pytest.mark.ray_cluster(num_cpus=4, resources={"slot": 4}),
    pytest.mark.usefixtures("sweep_cluster"),
    pytest.mark.slow,
    pytest.mark.timeout(1000),
]
ROOT = Path(__file__).parents[2]


def slots_of_trials() -> dict[str, int]:
    """Workers that jobs hold now, by job, as the allocator has it."""
    allocator: Any = ray.get_actor(ALLOCATOR, namespace=NAMESPACE)
    jobs = ray.get(allocator.snapshot.remote()).jobs
    return {job: sum(state.view.allocation.values()) for job, state in jobs.items()}


def wait_for(condition: Callable[[], Any], timeout_s: float) -> Any:
    """What the condition comes to, or an error."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.05)
    return value


# -- searchers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("searcher", [OptunaSearch, HyperOptSearch, BasicVariantGenerator])
def test_a_searcher_proposes_and_is_told(searcher: type, tmp_path: Path) -> None:
    space = {"quality": tune.uniform(0.5, 2.0), "epochs": 2, "pause_s": 0.0}
    one = {"max_concurrent_trials": 1, "reuse_actors": True}
    grid = fit(tmp_path, space, elastic=trainable(workers=1), search_alg=searcher(), num_samples=3, **one)
    assert not grid.errors
    assert len({result.config["quality"] for result in grid}) == 3
    for result in grid:
        assert result.metrics["score"] == pytest.approx(2 * result.config["quality"])


def test_bohb_pauses_trials_and_continues_with_the_better_ones(tmp_path: Path) -> None:
    pytest.importorskip("hpbandster", reason="BOHB needs the extra elastic-ray[bohb]")
    grid = fit(
        tmp_path,
        {"quality": tune.uniform(0.5, 2.0), "epochs": 9, "checkpoint": True, "pause_s": 0.0},
        elastic=trainable(workers=1),
        search_alg=TuneBOHB(seed=1),
        scheduler=HyperBandForBOHB(time_attr="training_iteration", max_t=4, reduction_factor=2),
        num_samples=4,
        max_concurrent_trials=None,
        reuse_actors=True,
    )
    assert not grid.errors
    lengths = sorted(int(result.metrics["training_iteration"]) for result in grid)
    assert lengths[-1] == 4
    assert lengths[0] < 4
    longest = max(grid, key=lambda result: int(result.metrics["training_iteration"]))
    assert longest.metrics["score"] == pytest.approx(4 * longest.config["quality"])  # nothing lost at the pause


# -- schedulers ----------------------------------------------------------------------------------------------


def test_median_stopping_ends_the_worse_ones(tmp_path: Path) -> None:
    rule = MedianStoppingRule(time_attr="training_iteration", grace_period=2, min_samples_required=2)
    space = {"quality": tune.grid_search([2.0, 2.0, 0.1]), "epochs": 8, "pause_s": 0.0}
    grid = fit(tmp_path, space, elastic=trainable(workers=1), scheduler=rule, max_concurrent_trials=1)
    assert not grid.errors
    lengths = {(result.config["quality"], result.metrics["trial_id"]): len(result.metrics_dataframe) for result in grid}
    assert min(lengths, key=lambda trial: lengths[trial])[0] == 0.1
    assert max(lengths.values()) == 8


def test_pb2_exploits(tmp_path: Path) -> None:
    pb2 = PB2(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.5,
        synch=True,
        hyperparam_bounds={"quality": [0.1, 5.0]},
    )
    space = {"quality": tune.grid_search([0.1, 5.0]), "epochs": 6, "checkpoint": True, "pause_s": 0.0}
    grid = fit(tmp_path, space, scheduler=pb2, reuse_actors=True)
    assert not grid.errors
    assert max(result.metrics["inherited"] for result in grid) >= 10.0


def test_no_more_trials_at_a_time_than_asked_for(tmp_path: Path) -> None:
    most: list[int] = []

    class Look(tune.Callback):
        def on_trial_result(self, **_: Any) -> None:
            most.append(len(slots_of_trials()))

    space = {"quality": tune.grid_search([1.0, 2.0, 3.0, 4.0]), "epochs": 2}
    fit(tmp_path, space, elastic=trainable(workers=1), max_concurrent_trials=2, run={"callbacks": [Look()]})
    assert max(most) <= 2


# -- the words of Ray Tune -----------------------------------------------------------------------------------


def test_a_loop_in_the_words_of_ray_tune(tmp_path: Path) -> None:
    """The results' files are left out: Tune fetches its last copy of them, which may be older than the failure."""
    epochs: list[int] = []

    class Ear(tune.Callback):
        def on_trial_result(self, result: dict[str, Any], **_: Any) -> None:
            epochs.append(result["epoch"])

    space = {"raise_at": 2, "once": str(tmp_path / "once")}
    run = {"failure_config": tune.FailureConfig(max_failures=1), "callbacks": [Ear()]}
    (result,) = fit(tmp_path, space, elastic=trainable(loop=in_tune_words, workers=1), run=run)
    assert epochs == [0, 1, 2, 3]
    assert result.metrics["resumed_from"] == 2
    assert result.checkpoint is not None
    assert result.metrics["trial"] == result.metrics["trial_id"]


def test_loggers_and_callbacks_hear_of_every_result(tmp_path: Path) -> None:
    heard: list[str] = []

    class Ear(tune.Callback):
        def on_trial_start(self, **_: Any) -> None:
            heard.append("start")

        def on_trial_result(self, result: dict[str, Any], **_: Any) -> None:
            heard.append(f"{result['epoch']}")

        def on_checkpoint(self, **_: Any) -> None:
            heard.append("checkpoint")

        def on_trial_complete(self, **_: Any) -> None:
            heard.append("complete")

    ears = {"callbacks": [Ear()]}
    (result,) = fit(tmp_path, {"epochs": 2, "checkpoint": True}, elastic=trainable(workers=1), run=ears)
    assert [each for each in heard if each != "checkpoint"] == ["start", "0", "1", "complete"]
    assert heard.count("checkpoint") >= 2
    assert {"result.json", "progress.csv", "params.json"} <= {path.name for path in Path(result.path).iterdir()}
    rows = [json.loads(line) for line in (Path(result.path) / "result.json").read_text().splitlines()]
    assert [row["workers"] >= 1 for row in rows] == [True, True]


# -- how sweeps end ------------------------------------------------------------------------------------------


def test_a_stopped_trials_workers_are_gone_within_a_second(tmp_path: Path) -> None:
    """Two trials of two workers; when one is stopped, the other one is given all four slots."""
    said: dict[str, float] = {}

    class Stop(tune.Stopper):
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            wanted = result["config"]["quality"] == 0.1 and result["epoch"] >= 3
            # Not before both are at their size, which takes the start of some processes.
            if wanted and "stopped" not in said and sorted(slots_of_trials().values()) == [2, 2]:
                said["stopped"] = time.time()
                return True
            return False

        def stop_all(self) -> bool:
            return False

    class Watch(tune.Callback):
        def on_step_end(self, **_: Any) -> None:
            if "stopped" in said and "gone" not in said and len(slots_of_trials()) == 1:
                said["gone"] = time.time()
            if "stopped" in said and "grown" not in said and list(slots_of_trials().values()) == [4]:
                said["grown"] = time.time()

    space = {"quality": tune.grid_search([1.0, 0.1]), "epochs": 60, "pause_s": 0.1}
    scaling = ray.train.ScalingConfig(num_workers=(1, 4), resources_per_worker={"slot": 1})
    get_or_create_allocator("fair_share")  # whatever the speeds here
    trainer = er.ElasticTrainer(train, scaling_config=scaling)
    elastic = tuning.elastic(trainer, sweep="tests")
    fit(tmp_path, space, elastic=elastic, run={"stop": Stop(), "callbacks": [Watch()]})
    assert said["gone"] - said["stopped"] < 1.0
    assert said["grown"] - said["stopped"] < 1.5  # one look of Tune's loop more


def test_a_stopped_trials_process_is_the_next_ones(tmp_path: Path) -> None:
    space = {"quality": tune.grid_search([1.0, 2.0]), "epochs": 3, "pause_s": 1.0}
    run = {"stop": {"training_iteration": 1}}
    grid = fit(tmp_path, space, elastic=trainable(workers=1), run=run, max_concurrent_trials=1)
    assert not grid.errors
    assert [result.metrics["epoch"] for result in grid] == [0, 0]
    assert len({result.metrics["process"] for result in grid}) == 1


_DRIVER = """
import sys
from pathlib import Path
import ray
ray.init(address=sys.argv[1], namespace="tests")
from ray import tune
from tests.tuning.sweeps import fit, trainable
space = {"quality": tune.grid_search([1.0, 2.0]), "epochs": int(sys.argv[3]), "checkpoint": True, "pause_s": 0.1}
grid = fit(Path(sys.argv[2]), space, elastic=trainable(sweep="other", workers=1), run={"name": "sweep"})
print("RESULTS", [len(result.metrics_dataframe) for result in grid if result.metrics_dataframe is not None], flush=True)
"""


@contextlib.contextmanager
def driver(cluster: LocalCluster, folder: Path, epochs: int) -> Iterator[subprocess.Popen[str]]:
    """A sweep in a process of its own, which ends with the test."""
    command = [sys.executable, "-c", _DRIVER, cluster.address, str(folder), str(epochs)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def reports(folder: Path) -> list[int]:
    """How many results every trial of that sweep has."""
    return [len(file.read_text().splitlines()) for file in sorted(folder.glob("sweep/*/result.json"))]


def test_a_killed_drivers_sweep_is_restored_without_losses(sweep_cluster: LocalCluster, tmp_path: Path) -> None:
    with driver(sweep_cluster, tmp_path, epochs=25):  # SIGKILL at the end
        wait_for(lambda: len(rows := reports(tmp_path)) == 2 and min(rows) >= 3, 100)
    grid = tune.Tuner.restore(
        str(tmp_path / "sweep"), trainable(sweep="other", workers=1), resume_unfinished=True
    ).fit()
    assert not grid.errors
    for result in grid:  # type: ignore[attr-defined]
        assert result.metrics["epoch"] == 24
        assert result.metrics["score"] == pytest.approx(25 * result.config["quality"])


def test_ctrl_c_ends_trials_and_keeps_results(sweep_cluster: LocalCluster, tmp_path: Path) -> None:
    with driver(sweep_cluster, tmp_path, epochs=500) as running:
        wait_for(lambda: len(rows := reports(tmp_path)) == 2 and min(rows) >= 2, 100)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=180)
    assert "RESULTS" in output
    wait_for(lambda: not slots_of_trials(), 15)  # the lease, where Tune did not wait for a step to end
    assert min(reports(tmp_path)) >= 2


def test_nothing_is_left(sweep_cluster: LocalCluster) -> None:
    wait_for(lambda: not sweep_cluster.leaks(), 25)
    assert ray.available_resources()["slot"] == 4


# -- bad input -----------------------------------------------------------------------------------------------


def test_a_metric_never_reported_is_named_results_kept(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="accuracy") as raised:
        fit(
            tmp_path,
            {"epochs": 2},
            elastic=trainable(workers=1),
            metric="accuracy",
            scheduler=tune.schedulers.ASHAScheduler(),
        )
    assert "score" in str(raised.value) or "metric" in str(raised.value)
