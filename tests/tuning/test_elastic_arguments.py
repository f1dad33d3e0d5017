"""What cannot be meant is refused where it is said, with the way out; no cluster needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import ray.train
from fsspec.implementations.memory import MemoryFileSystem
from ray import tune
from ray.train._internal.session import _TrainingResult
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    MedianStoppingRule,
    PopulationBasedTraining,
    ResourceChangingScheduler,
)

import elastic_ray
import tuning
from elastic_ray.worker.train_loop import call, pack, with_config
from tests.tuning.sweeps import trainable
from tuning.ray_tune import in_tune, read_promise


def loop(config: dict[str, Any]) -> None:
    """Never run."""


class Bucket(MemoryFileSystem):
    """A file system that is not a plain directory and notes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "r" in mode:
            self.opened.append(path)
        return super()._open(path, mode, **options)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a trainable that is made without Tune has its directory."""
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))


def test_fixed_resources_are_refused() -> None:
    with pytest.raises(ValueError, match=r"leave tune\.with_resources out, say what a worker needs in ScalingConfig"):
        tune.with_resources(trainable(), {"CPU": 2})


_ASHA = {"max_t": 27, "grace_period": 3, "reduction_factor": 3}
_BY_REPORTS = {"time_attr": "training_iteration", "grace_period": 5}


@pytest.mark.parametrize(
    ("scheduler", "stop", "says"),
    [
        (ASHAScheduler(**_ASHA), None, (27, 3, 3)),
        (ASHAScheduler(**_ASHA, brackets=2), {"training_iteration": 10}, (10, 3, 3)),
        (ASHAScheduler(**_ASHA), {"training_iteration": 2}, (2, 2, 3)),
        (ResourceChangingScheduler(ASHAScheduler(**_ASHA)), None, (27, 3, 3)),
        (HyperBandForBOHB(max_t=81, reduction_factor=3), None, (81, 1, 3)),
        (MedianStoppingRule(**_BY_REPORTS), None, (None, 5, 2)),
        (MedianStoppingRule(**_BY_REPORTS), {"training_iteration": 20}, (20, 5, 2)),
        (ASHAScheduler(time_attr="seconds"), None, None),
        (MedianStoppingRule(), None, None),
        (PopulationBasedTraining(hyperparam_mutations={"lr": tune.uniform(0, 1)}), None, None),
        (FIFOScheduler(), None, None),
        (None, None, None),
    ],
)
def test_the_promise_is_read_off_the_scheduler(scheduler: Any, stop: Any, says: Any) -> None:
    if scheduler is not None:
        scheduler.set_search_properties("accuracy", "max")
    found = read_promise(scheduler, stop)
    read = found and (found.metric, found.mode, found.max_t, found.grace_period, found.reduction_factor)
    assert read == (says and ("accuracy", "max", *says))


@pytest.mark.parametrize("name", ["num_workers", "scaling_config"])
def test_workers_are_not_searched(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r} cannot be searched: the allocator changes"):
        trainable().default_resource_request({"lr": 0.1, name: 2})


def test_constants_are_checked_like_parameters(place: None) -> None:
    with pytest.raises(ValueError, match="'num_workers' cannot be searched"):
        tune.with_parameters(trainable(), num_workers=2)({})


def test_a_restored_trial_leaves_its_checkpoint_where_it_is(place: None) -> None:
    """The workers read it; what restores the trial may be small, and is not where they are."""
    bucket = Bucket()
    bucket.pipe("/bucket/checkpoint/state.pt", b"large")
    checkpoint = ray.train.Checkpoint("/bucket/checkpoint", pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(bucket)))
    metrics = {"training_iteration": 3, "time_total_s": 7.0}
    trial = trainable()({})
    trial.restore(_TrainingResult(checkpoint=checkpoint, metrics=metrics))
    assert trial.iteration == 3
    assert trial.get_state()["time_total"] == 7.0
    assert bucket.opened == []
    with checkpoint.as_directory():
        assert bucket.opened == ["/bucket/checkpoint/state.pt"]  # as it would have been
    bucket.rm("/bucket", recursive=True)
    with pytest.raises(ValueError, match="does not exist on storage anymore"):
        trial.restore(_TrainingResult(checkpoint=checkpoint, metrics=metrics))


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"promise": "accuracy"}, TypeError, r"promise must be a tuning\.Promise or None, but got 'accuracy'"),
        ({"sweep": "a b"}, ValueError, "sweep must be letters, digits or .* but got 'a b'"),
        ({"weight": 0.0}, ValueError, "weight"),
    ],
)
def test_arguments_that_make_no_sense(wrong: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        tuning.elastic(loop, scaling_config=ray.train.ScalingConfig(num_workers=(1, 2)), **wrong)


def test_a_trainers_settings_are_not_given_twice() -> None:
    scaling = ray.train.ScalingConfig(num_workers=(1, 2))
    trainer = elastic_ray.ElasticTrainer(loop, scaling_config=scaling)
    with pytest.raises(ValueError, match="an ElasticTrainer has its own scaling_config"):
        tuning.elastic(trainer, scaling_config=scaling)


_IN_TUNE = """
import elastic_ray
from elastic_ray.worker.train_loop import call, pack, with_config
from tuning.ray_tune import in_tune

def loop(config):
    from ray import tune
    tune.report({"lr": config["lr"] + config["base"]})
    assert tune.get_checkpoint() is None

call(with_config(in_tune(pack(loop, {"base": 1.0, "lr": 5.0})), {"lr": 0.5}))
print(elastic_ray.loop.api.current_session().controller.metrics)
from ray.train._internal.session import get_session
assert get_session() is None
"""


@pytest.mark.slow
def test_ray_tunes_report_is_ours_in_a_worker() -> None:
    answer = subprocess.run([sys.executable, "-c", _IN_TUNE], capture_output=True, text=True, timeout=180, check=False)
    assert answer.stdout.strip() == "{'lr': 1.5}", answer.stderr


def test_what_worker_does_not_know_of_tune_is_error() -> None:
    def asks(_: dict[str, Any]) -> None:
        tune.get_context().get_trial_dir()

    with pytest.raises(AttributeError, match="the workers of an elastic trial do not know Ray's 'trial_dir'"):
        call(with_config(in_tune(pack(asks, {})), {}))
