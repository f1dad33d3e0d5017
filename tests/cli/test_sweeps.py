"""A sweep is one line and one status, whatever its trials do."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ray.cli.listings import JobRow
from elastic_ray.cli.sweeps import (
    TRIAL_COLUMNS,
    best_first,
    called,
    grouped,
    parameters_text,
    sweep_status,
    sweeps_of,
    trial_cells,
)
from elastic_ray.events import TrialFacts


def trial(job: str, phase: str, score: float | None = None, *, mode: str = "max", **fields: Any) -> JobRow:
    parameters = {"lr": 0.1 / len(job), "net/width": 8 * len(job), "seed": 3}
    facts = TrialFacts(sweep="s", parameters=parameters, metric="accuracy", mode=mode, rungs=(1, 3, 9))
    ended = {"ended_s": 50.0} if phase in ("finished", "stopped", "failed") else {"workers": 2, "target_workers": 2}
    metrics = {} if score is None else {"accuracy": score}
    return JobRow(job=job, phase=phase, trial=facts, metrics=metrics, **{"submitted_s": 10.0, **ended, **fields})


TRIALS = [
    trial("a", "running", 0.5, eta_s=65.0, reports=3),
    trial("bb", "waiting", eta_s=float("inf"), workers=0, target_workers=0),
    trial("ccc", "stopped", 0.2, reports=1),
    trial("dddd", "stopped", 0.9, reports=9),
    trial("eeeee", "failed", float("nan"), ended_s=None),  # its controller still answers
    trial("ffffff", "finished", 0.7),
]


def test_a_sweep_is_summed_up() -> None:
    found = sweep_status("s", TRIALS)
    counts = (found.running, found.done, found.cut, found.failed)
    assert counts == (2, 2, 1, 1), "one that was stopped after its last rung is done"
    best = (found.metric, found.best, found.best_trial, found.eta_s)
    assert best == ("accuracy", 0.9, "dddd", 65.0) and found.parameters["net/width"] == 32
    unknown = sweep_status("s", [trial("a", "starting")])
    assert (unknown.best, unknown.best_trial, unknown.eta_s) == (None, "", None)


def test_a_sweep_stands_before_its_trials() -> None:
    other = JobRow(job="other", phase="failed", ended_s=40.0)
    rows = grouped([*TRIALS, other])
    assert [row.job for row in rows] == ["s", "a", "bb", "other"]
    line = "6 trials: 2 running, 2 done, 1 cut, 1 failed, best accuracy 0.9 at lr=0.025 width=32, those that run end in"
    assert rows[0].message == f"{line} 1m05s"
    assert (rows[0].phase, rows[0].workers, rows[0].submitted_s, rows[0].ended_s) == ("sweep", 2, 10.0, None)
    over = grouped([*TRIALS[2:], other], ended=False)
    assert [(row.job, row.ended_s) for row in over] == [("s", 50.0)], "one that has ended keeps its line"
    assert sweeps_of([other]) == {}


def test_of_sweeps_of_one_name_the_last_one_counts() -> None:
    earlier = trial("a", "finished", 0.9, submitted_s=1.0, storage_path="/runs/first/a/run_00")
    later = [trial(job, "running", storage_path=f"/runs/second/{job}/run_01") for job in ("b", "c")]
    assert sweeps_of([earlier, *later]) == {"s": later}
    assert [row.job for row in grouped([earlier, *later])] == ["s", "b", "c"]


@pytest.mark.parametrize(("mode", "order"), [("max", ["b", "a", "c"]), ("min", ["a", "b", "c"])])
def test_trials_are_listed_best_first(mode: str, order: list[str]) -> None:
    trials = [trial(job, "running", score, mode=mode) for job, score in (("c", None), ("b", 0.9), ("a", 0.1))]
    assert [row.job for row in best_first(trials)] == order


def test_trials_are_called_by_what_differs() -> None:
    names = called(TRIALS[:2])
    assert names == {"a": "lr=0.1 width=8", "bb": "lr=0.05 width=16"}
    assert trial_cells(TRIALS[0], names["a"]) == ("lr=0.1 width=8", "0.5", "3", "running", "2", "1m05s", "a")
    assert trial_cells(TRIALS[2], "") == ("ccc", "0.2", "1", "stopped", "", "", "ccc")
    assert len(TRIAL_COLUMNS) == 7
    assert parameters_text({"opt": "sgd", "fast": True, "lr": 3e-4}) == "opt=sgd fast=True lr=0.0003"
