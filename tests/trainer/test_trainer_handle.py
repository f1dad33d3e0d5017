"""The driver's end of a job: submission, the lease thread, and a handle that outlives its job.

STAND-IN: ``PlayController`` plays the job controller's interface with no worker behind it, so that these
tests are about the driver's side alone; jobs that train are tested with the real controller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray.train import RunConfig, ScalingConfig

from elastic_ray import trainer as trainer_module
from elastic_ray.config import ElasticConfig
from elastic_ray.errors import ImpossibleResourcesError, JobLostError, JobNameTakenError, TrainFunctionError
from elastic_ray.events import EventKind, JobEvent, JobOutcome, JobPhase, JobStatus, WorkerInfo
from elastic_ray.handle import JobHandle
from elastic_ray.job.nodes import living_nodes, may_autoscale
from elastic_ray.job.train_loop import call
from elastic_ray.trainer import ElasticTrainer

# A stand-in controller; tests/job has the real one.
pytestmark = [pytest.mark.ray_cluster(num_cpus=4), pytest.mark.slow]


@ray.remote(num_cpus=0)
class PlayController:
    """STAND-IN for ``JobController``: trains nothing, ends when told to."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self._workers = spec.min_workers
        self._phase = JobPhase.RUNNING
        self._outcome: JobOutcome | None = None
        self._events: list[JobEvent] = []
        self.renewals = 0

    def spec(self) -> Any:
        return self._spec

    def status(self) -> JobStatus:
        return JobStatus(
            job=self._spec.job, phase=self._phase, workers=self._workers, target_workers=self._workers, step=7
        )

    def renew_lease(self) -> JobStatus:
        self.renewals += 1
        return self.status()

    def renewed(self) -> int:
        return self.renewals

    def workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(WorkerInfo(rank=r, node="n", pid=1, generation=1, worker=f"w{r}") for r in range(self._workers))

    def events(self, since: int = 0) -> tuple[JobEvent, ...]:
        return tuple(self._events[since:])

    def resize(self, workers: int) -> None:
        event = JobEvent(
            kind=EventKind.RESIZE,
            time_s=0.0,
            from_workers=self._workers,
            to_workers=workers,
            reason="held by the user",
        )
        self._events.append(event)
        self._workers = workers

    def release(self) -> None:
        pass

    def stop(self) -> None:
        self.end(JobOutcome(phase=JobPhase.STOPPED))

    def train(self) -> None:
        try:
            value = call(self._spec.train_loop)
        except Exception as caught:
            error = TrainFunctionError.from_exception(caught, rank=1, node="n")
            self.end(JobOutcome(phase=JobPhase.FAILED, error=error))
        else:
            self.end(JobOutcome(phase=JobPhase.FINISHED, return_value=value, metrics={"loss": 0.5}))

    def end(self, outcome: JobOutcome) -> None:
        self._phase, self._outcome = outcome.phase, outcome

    def outcome(self) -> JobOutcome | None:
        return self._outcome

    def close(self) -> None:
        ray.actor.exit_actor()


def play(spec: Any) -> Any:
    return PlayController.options(  # type: ignore[attr-defined]
        name=f"job:{spec.job}", namespace="elastic_ray", lifetime="detached"
    ).remote(spec)


@pytest.fixture
def make(ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes trainers whose jobs are played; jobs still running at the test's end are stopped."""
    import sys
    import types

    module = types.ModuleType("elastic_ray.job.controller")
    module.start = play  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elastic_ray.job.controller", module)
    handles: list[JobHandle] = []

    def make(loop: Any = lambda: None, workers: Any = (1, 4), name: str | None = None, **scaling: Any) -> Any:
        made = ElasticTrainer(
            loop,
            scaling_config=ScalingConfig(num_workers=workers, **scaling),
            run_config=RunConfig(name=name, storage_path=str(tmp_path)),
            elastic_config=ElasticConfig(lease_s=1.0),
        )
        submit = made.submit
        made.submit = lambda: handles.append(submit()) or handles[-1]  # type: ignore[func-returns-value]
        return made

    yield make
    for handle in handles:
        handle.stop()
        handle.wait(30)


def controller(handle: JobHandle) -> Any:
    return ray.get_actor(f"job:{handle.job}", namespace="elastic_ray")


def train(handle: JobHandle) -> None:
    controller(handle).train.remote()


def test_a_finished_job_answers_from_what_was_kept(make: Any) -> None:
    handle = make(lambda config: config.get("x", 3), name="finishes").submit()
    assert not handle.done()
    handle.resize(3)
    assert [w.rank for w in handle.workers()] == [0, 1, 2]
    train(handle)
    result = handle.result(timeout=60)
    assert (result.return_value, result.metrics, result.error) == (3, {"loss": 0.5}, None)
    assert Path(result.path).name == "finishes"
    assert handle.done()
    assert handle.status().phase is JobPhase.FINISHED
    assert [(e.from_workers, e.to_workers) for e in handle.events()] == [(1, 3)]
    assert handle.events(since=1) == ()
    assert handle.workers() == ()
    handle.resize(2)
    handle.release()
    handle.stop()
    assert handle.result(timeout=0).return_value == 3
    for thread in threading.enumerate():
        if thread.name == "elastic_ray-lease-finishes":  # nothing is left to do for it
            thread.join(timeout=10)
            assert not thread.is_alive()


def test_the_users_exception_is_raised_by_result(make: Any) -> None:
    def loop() -> None:
        raise KeyError("no such column")

    handle = make(loop).submit()
    train(handle)
    with pytest.raises(KeyError, match="no such column") as caught:
        handle.result(timeout=60)
    assert isinstance(caught.value, TrainFunctionError)
    assert isinstance(caught.value, ray.train.TrainingFailedError)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.rank == 1


def test_the_lease_is_renewed_while_the_driver_is_busy(make: Any) -> None:
    handle = make().submit()
    before = ray.get(controller(handle).renewed.remote(), timeout=60)
    time.sleep(1.2)
    assert ray.get(controller(handle).renewed.remote(), timeout=60) - before >= 3


def test_waiting_has_an_end(make: Any) -> None:
    handle = make().submit()
    assert handle.status().workers == 1
    with pytest.raises(TimeoutError, match=r"has not ended within 0.2 s \(running, 1 worker"):
        handle.result(timeout=0.2)
    assert not handle.done()


def test_a_stopped_job_has_a_result(make: Any) -> None:
    handle = make().submit()
    handle.stop()
    assert handle.result(timeout=60).error is None
    assert handle.status().phase is JobPhase.STOPPED


def test_a_lost_controller_is_named_with_the_last_state(make: Any) -> None:
    handle = make(name="lost").submit()
    assert handle.status().workers == 1
    ray.kill(controller(handle))
    with pytest.raises(JobLostError, match=r"job 'lost' was lost.*Last known state: running.*step 7"):
        handle.result(timeout=60)
    assert handle.status().phase is JobPhase.FAILED
    assert handle.events() == ()


@pytest.mark.parametrize("workers, error", [(0, ValueError), (5, ValueError), (2.0, TypeError), (True, TypeError)])
def test_sizes_out_of_range_are_refused(make: Any, workers: Any, error: Any) -> None:
    with pytest.raises(error, match="but got"):
        make().submit().resize(workers)


def test_a_name_is_taken_while_its_job_is_active_only(make: Any) -> None:
    handle = make(name="one").submit()
    with pytest.raises(JobNameTakenError, match=r"'one' is active.*JobHandle.attach\('one'\)"):
        make(name="one").submit()
    attached = JobHandle.attach("one")
    assert attached.status().job == "one"
    attached._lease.leave()
    handle.stop()
    assert make(name="one").submit().status().phase is JobPhase.RUNNING


def test_attaching_to_nothing(make: Any) -> None:
    with pytest.raises(ValueError, match="no job 'nobody' to attach to"):
        JobHandle.attach("nobody")


def test_impossible_resources_are_refused_within_seconds(make: Any) -> None:
    assert not may_autoscale()
    begun = time.monotonic()
    with pytest.raises(ImpossibleResourcesError, match="needs 1 GPU, but no node has more than 0"):
        make(use_gpu=True).submit()
    with pytest.raises(ImpossibleResourcesError, match=r"at least 9 workers .*room for 4"):
        make(workers=(9, 12)).submit()
    assert time.monotonic() - begun < 10
    assert living_nodes()[0].total["CPU"] == 4


def test_an_autoscaler_may_bring_what_is_missing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "may_autoscale", lambda: True)
    assert make(use_gpu=True).submit().status().phase is JobPhase.RUNNING


def test_fit_shows_events_and_returns_the_result(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = make(lambda: 5, name="fits")
    submit = made.submit

    def submit_and_train() -> JobHandle:
        handle: JobHandle = submit()
        handle.resize(2)
        train(handle)
        return handle

    made.submit = submit_and_train
    assert made.fit().return_value == 5
    output = capsys.readouterr().out
    assert "job fits: 1 -> 2 workers, held by the user" in output
    assert "job fits: finished, workers 2" in output


def test_ctrl_c_stops_the_job(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(name="interrupted")
    handles: list[JobHandle] = []
    submit = made.submit
    made.submit = lambda: handles.append(submit()) or handles[-1]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer_module, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        made.fit()
    assert handles[0].status().phase is JobPhase.STOPPED
