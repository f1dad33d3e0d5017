"""Trials by hand, with no sweep's loop above them: what they tell, and what the allocator makes of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import ray
from ray.train import ScalingConfig

from placement.allocator.actor import get_or_create_allocator
from placement.allocator.snapshot import CoreSnapshot, DecisionRecord
from placement.cluster.jobs import JobView
from tests.tuning.sweeps import train
from tuning import Promise
from tuning.trial_job import TrialJob, make_template

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray_cluster(num_cpus=4, resources={"slot": 4}),
    pytest.mark.usefixtures("sweep_cluster"),
    pytest.mark.timeout(1000),
]
PROMISE = Promise(metric="score", mode="max", max_t=27, grace_period=1, reduction_factor=3)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., TrialJob]]:
    """Starts trials, which train on when their reports are taken; all are stopped at the end."""
    started = []

    def begin(
        trial: str, start_from: str | None = None, *, workers: Any = 1, promise: Promise = PROMISE, **config: Any
    ) -> TrialJob:
        scaling = ScalingConfig(num_workers=workers, resources_per_worker={"slot": 1})
        (tmp_path / trial).mkdir(exist_ok=True)
        job = TrialJob(
            make_template(train, scaling_config=scaling, promise=promise, reports_ahead=0),
            sweep="byhand",
            trial=trial,
            config={"epochs": 27, "checkpoint": True, **config},
            directory=str(tmp_path / trial),
            filesystem=pyarrow.fs.LocalFileSystem(),
            knowledge_path=str(tmp_path),
            start_from=start_from,
        )
        started.append(job)
        return job

    yield begin
    for job in started:
        job.stop()


def take(trial: TrialJob, reports: int) -> Any:
    """The last of so many reports."""
    last = None
    for _ in range(reports):
        last = trial.next_report(60)
    assert last is not None
    return last


def snapshot() -> CoreSnapshot:
    """The allocator's."""
    found: CoreSnapshot = ray.get(get_or_create_allocator().snapshot.remote(), timeout=180)
    return found


def look(trial: TrialJob) -> JobView | None:
    """The trial as the allocator has it."""
    state = snapshot().jobs.get(trial.job)
    return None if state is None else state.view


def weight(trial: TrialJob) -> float:
    """What its speed counts, as the allocator has it."""
    view = look(trial)
    return 0.0 if view is None else view.weight


def growth(trial: TrialJob) -> list[DecisionRecord]:
    """The allocator's decisions about it, but for the first one."""
    return [each for each in snapshot().log if each.job == trial.job and each.from_workers > 0]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "not within 120 s"
        time.sleep(0.05)


def test_allocator_weighs_trials_by_their_promise_also_after_pause(start: Callable[..., TrialJob]) -> None:
    good, poor = start("good", quality=1.0), start("poor", quality=0.5)
    take(good, 3)
    paused = take(poor, 3)
    wait_for(lambda: weight(good) > 1.1 and 0.0 < weight(poor) < 0.9)
    poor.stop()
    take(good, 1)
    poor = start("poor", quality=0.5, start_from=paused.checkpoint)
    resumed = take(poor, 1)
    # As a first report it would beat the other one's, as the fourth it does not.
    assert (resumed.index, resumed.metrics["score"]) == (4, 2.0)
    wait_for(lambda: weight(good) > 1.1 and 0.0 < weight(poor) < 0.9)


def test_a_promise_that_cannot_be_kept_is_noticed(start: Callable[..., TrialJob], caplog: Any) -> None:
    start("right")
    typed = start("typed", promise=dataclasses.replace(PROMISE, metric="scor"))
    assert "byhand-typed is weighed by Promise(metric='score', mode='max'" in caplog.text, "the sweep's first promise"
    take(typed, 2)
    (warning,) = [each.getMessage() for each in caplog.records if "what was reported is" in each.getMessage()]
    assert "byhand-typed counts as the worst after report 1" in warning
    assert "Promise(metric='scor'), but what was reported is 'score', 'epoch', 'inherited'" in warning
    with pytest.raises(ValueError, match=r"byhand-typed, 3 reports: trials are compared by Promise\(metric='scor'\)"):
        take(typed, 1)


def test_only_the_first_trial_of_a_net_explores_sizes(start: Callable[..., TrialJob]) -> None:
    """Its first worker makes the net; what is known of it shows in the next decision."""
    reasons = {}
    for name, width in {"first": 4, "second": 4, "wider": 8}.items():
        trial = start(name, workers=(1, 2), width=width)
        while not (grown := growth(trial)) or not (seen := look(trial)) or not seen.models:
            take(trial, 1)
        reasons[name] = grown[0].reason
        trial.stop()
    explores = {name: "no model yet" in str(reason) for name, reason in reasons.items()}
    assert explores == {"first": True, "second": False, "wider": True}, reasons
