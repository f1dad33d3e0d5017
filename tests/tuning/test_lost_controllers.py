"""Trials outlive the process that their controllers share; each report comes once."""

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
from ray import tune
from ray.train import ScalingConfig

from elastic_ray.driver.handle import find_controller
from placement.ray_cluster.named_actors import insist
from tests.tuning.sweeps import fit, train, trainable
from tuning.trial_job import TrialJob, make_template

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray_cluster(num_cpus=4, resources={"slot": 4}),
    pytest.mark.usefixtures("sweep_cluster"),
    pytest.mark.timeout(1000),
]


def begin(folder: Path, trial: str, **config: Any) -> TrialJob:
    (folder / trial).mkdir(exist_ok=True)
    scaling = ScalingConfig(num_workers=1, resources_per_worker={"slot": 1})
    return TrialJob(
        make_template(train, scaling_config=scaling, reports_ahead=0),
        sweep="lost",
        trial=trial,
        config={"epochs": 6, "checkpoint": True, **config},
        directory=str(folder / trial),
        filesystem=pyarrow.fs.LocalFileSystem(),
        knowledge_path=str(folder),
    )


def controller(folder: Path, trial: str) -> str:
    """Name of the controller that runs the trial."""
    return str(json.loads((folder / trial / "elastic_trial.json").read_text())["controller"])


def process(name: str) -> int:
    found: Any = find_controller(name)
    return int(insist(lambda: found.host.__ray_call__.remote(lambda _: os.getpid()), timeout_s=180))


def take_three(trial: TrialJob) -> list[int]:
    """Numbers of the first three reports."""
    deadline, taken = time.monotonic() + 120, list[int]()
    while len(taken) < 3:
        assert time.monotonic() < deadline, f"{trial.status} after {taken}"
        if (report := trial.next_report(1.0)) is not None:
            taken.append(report.index)
    return taken


def take_all(trial: TrialJob) -> list[tuple[int, float]]:
    """Number and score of each report until the trial is done."""
    reports = []
    deadline = time.monotonic() + 180
    while not trial.done:
        assert time.monotonic() < deadline, f"{trial.status} after {reports}"
        if (report := trial.next_report(1.0)) is not None:
            reports.append((report.index, float(report.metrics["score"])))
    trial.raise_error()
    return reports


def reports(quality: float, first: int = 1) -> list[tuple[int, float]]:
    """All of a trial that has lost nothing and repeats nothing."""
    return [(number, quality * number) for number in range(first, 7)]


def test_two_trials_share_a_process_and_outlive_it(tmp_path: Path) -> None:
    first, second = begin(tmp_path, "first"), begin(tmp_path, "second", quality=0.5)
    names = [controller(tmp_path, each) for each in ("first", "second")]
    killed = process(names[0])
    assert process(names[1]) == killed, "a controller costs a start"
    before = [take_three(trial) for trial in (first, second)]
    os.kill(killed, signal.SIGKILL)
    assert before == [[1, 2, 3]] * 2
    assert {process(each) for each in names}.isdisjoint({killed})
    assert take_all(first) == reports(1.0, first=4)
    assert take_all(second) == reports(0.5, first=4)
    first.stop()
    second.stop()
    third = begin(tmp_path, "third", quality=2.0)
    assert take_all(third) == reports(2.0)
    third.stop()


def test_a_process_that_dies_between_two_trials_costs_neither(tmp_path: Path) -> None:
    first = begin(tmp_path, "early")
    killed = process(controller(tmp_path, "early"))
    assert take_all(first) == reports(1.0)
    first.stop()
    os.kill(killed, signal.SIGKILL)
    second = begin(tmp_path, "late", quality=0.5)
    assert take_all(second) == reports(0.5)
    second.stop()


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.2, None])
def test_a_process_dies_while_its_second_trial_starts(tmp_path: Path, after_s: float | None) -> None:
    """``after_s``: counted from the question; None: once it is answered."""
    first = begin(tmp_path, "one", epochs=1)
    killed = process(controller(tmp_path, "one"))
    take_all(first)
    first.stop()
    if after_s is not None:
        threading.Timer(after_s, os.kill, (killed, signal.SIGKILL)).start()
    second = begin(tmp_path, "two", quality=0.5)
    if after_s is None:
        os.kill(killed, signal.SIGKILL)
    assert take_all(second) == reports(0.5)
    second.stop()


class Killer(tune.Callback):
    """Kills the process of each trial's controller after the trial's third report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.killed: list[tuple[str, int]] = []

    def on_trial_result(self, trial: Any, result: dict[str, Any], **_: Any) -> None:
        if result["epoch"] == 2:
            (note,) = self.folder.rglob(f"*{trial.trial_id}*/elastic_trial.json")
            name = str(json.loads(note.read_text())["controller"])
            self.killed.append((name, process(name)))
            os.kill(self.killed[-1][1], signal.SIGKILL)


def test_each_trial_of_a_search_loses_its_controller(tmp_path: Path) -> None:
    killer = Killer(tmp_path)
    space = {"quality": tune.grid_search([1.0, 2.0, 3.0]), "epochs": 5}
    run = {"callbacks": [killer]}
    grid = fit(tmp_path, space, elastic=trainable(workers=1, sweep="kills"), max_concurrent_trials=1, run=run)
    assert not grid.errors
    assert len({pid for _, pid in killer.killed}) == 3
    for each in grid:
        assert [*each.metrics_dataframe["epoch"]] == list(range(5))
        assert [*each.metrics_dataframe["score"]] == [each.config["quality"] * (epoch + 1) for epoch in range(5)]
