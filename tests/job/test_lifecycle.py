"""How jobs begin and end: errors, restarts, lost drivers and allocators, and what is left behind (nothing)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import torch
from ray.train.v2.api.exceptions import TrainingFailedError

import elastic_ray as er
from elastic_ray.consensus.intents import RanksDisagreeError
from elastic_ray.driver.handle import JobHandle
from elastic_ray.errors import TrainFunctionError, WorkersLostError
from elastic_ray.events import EventKind, JobPhase
from elastic_ray.faults import Faults
from elastic_ray.job.controller import start as start_controller
from placement import MemoryNeed
from tests.job import traced
from tests.job.jobs import kinds, run, start, wait_until
from tests.job.specs import spec

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000)]


def test_programs_exception_ends_the_job_and_is_never_retried(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=2, max_failures=3, raise_at=3)
    with pytest.raises(KeyError, match="the user's own mistake") as caught:
        handle.result(timeout=180)
    assert isinstance(caught.value, TrainFunctionError)
    assert caught.value.rank in (0, 1) and "traced.py" in str(caught.value)
    assert EventKind.RESTART not in kinds(handle)
    assert handle.status().phase is JobPhase.FAILED
    assert 'KeyError: "the user\'s own mistake"' in handle.events()[-1].reason


def test_what_ray_refuses_of_process_is_the_jobs_error(ray_cluster: Any, tmp_path: Path) -> None:
    """Another try would end the same way: the job does not wait for ever."""
    refused = spec(job="refused", storage_path=str(tmp_path), runtime_env={"working_dir": str(tmp_path)})
    handle = JobHandle(start_controller(refused), refused)
    with pytest.raises(TrainingFailedError, match="not a valid URI"):
        handle.result(timeout=180)


@pytest.mark.slow
def test_environment_that_cannot_be_set_up_is_jobs_error(ray_cluster: Any, tmp_path: Path) -> None:
    refused = spec(job="refused", storage_path=str(tmp_path), runtime_env={"conda": "there-is-none"})
    handle = JobHandle(start_controller(refused), refused)
    with pytest.raises(TrainingFailedError, match="Failed to set up runtime environment"):
        handle.result(timeout=180)


@pytest.mark.slow
def test_all_members_lost_restart_from_the_last_checkpoint(ray_cluster: Any, tmp_path: Path) -> None:
    """8 steps an epoch: both die in the second epoch; the first one's checkpoint is where the job continues."""
    faults = Faults().kill(rank=0, step=10, moment="forward").kill(rank=1, step=10, moment="forward")
    handle = start(tmp_path, workers=2, faults=faults, max_failures=1, checkpoint=True, epochs=3)
    result = handle.result(timeout=180)
    assert EventKind.RESTART in kinds(handle)
    assert result.metrics is not None and result.metrics["epoch"] == 2
    assert result.checkpoint is not None
    steps = [line for line in traced.read(tmp_path / "trace") if line["kind"] == "step"]
    after = min(line["step"] for line in steps if line["generation"] == max(s["generation"] for s in steps))
    assert after == 8, "the second epoch begins anew"
    assert [row["epoch"] for row in result.metrics_dataframe.to_dict("records")] == [0, 1, 2]
    finals = [line for line in traced.read(tmp_path / "trace") if line["kind"] == "final"]
    assert {(line["done"], *line["epoch_ends"]) for line in finals} == {(24.0, 8.0, 16.0, 24.0)}  # none counts twice


@pytest.mark.slow
def test_without_restarts_losing_all_members_ends_the_job(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=1, faults=Faults().kill(step=4, moment="backward"), elastic={"restart": False})
    with pytest.raises(WorkersLostError, match=r"restart=False.*max_failures"):
        handle.result(timeout=180)


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_out_of_memory_lowers_local_bound_and_training_continues(
    ray_cluster: Any, tmp_path: Path, workers: int
) -> None:
    faults = Faults().out_of_memory(rank=0, step=5, moment="forward")
    adapt = {"max_batch_size": 96, "local_bsz_bounds": (2, 96), "gradient_accumulation": True}
    handle, account = run(tmp_path, workers=workers, faults=faults, adapt=adapt, epochs=6)
    event = next(event for event in handle.events() if event.kind is EventKind.OUT_OF_MEMORY)
    assert "bound" in event.reason
    assert len(account.final) == 1
    assert handle.result().metrics["samples"] == 192


@pytest.mark.slow
def test_out_of_memory_at_least_size_says_the_declaration(ray_cluster: Any, tmp_path: Path) -> None:
    faults = Faults().out_of_memory(rank=0, step=5, moment="forward")
    adapt = {"max_batch_size": 96, "local_bsz_bounds": (2, 96), "gradient_accumulation": True}
    need = MemoryNeed(available_bytes=6 << 30, sharded_bytes=10 << 30, copies=1)  # from 2 workers on
    config = er.SchedulingConfig(memory=need)
    handle, account = run(tmp_path, workers=2, faults=faults, adapt=adapt, epochs=6, scheduling=config)
    event = next(event for event in handle.events() if event.kind is EventKind.OUT_OF_MEMORY)
    assert re.search(r"bound.*; SchedulingConfig.*needs 5.00 GiB in a group of 2, and has 6.00 GiB: it", event.reason)
    assert len(account.final) == 1 and handle.result().metrics["samples"] == 192
    assert (event.from_workers, event.to_workers) == (2, 2), "both workers continue"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("skip_at", "rank 1 has come to the end of a step"),
        pytest.param("return_at", "rank 1 has returned from the train function", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_disagree_end_job_with_who_did_what(ray_cluster: Any, tmp_path: Path, where: str, what: str) -> None:
    handle = start(tmp_path, workers=2, epochs=10_000, **{where: 6})
    with pytest.raises(RanksDisagreeError, match=what) as error:
        handle.result(timeout=180)
    times_s = {event.kind: event.time_s for event in handle.events()}
    assert times_s[EventKind.FINISHED] - times_s[EventKind.STARTED] < 60.0
    assert re.search("rank 0 (reduces the gradients of model 0|begins another step)", str(error.value))
    assert handle.status().phase is JobPhase.FAILED


@pytest.mark.slow
def test_a_rank_that_returned_early_is_named_without_waiting(ray_cluster: Any, tmp_path: Path) -> None:
    """The other one comes to its next collective when the connections of the first are closed."""
    handle = start(tmp_path, workers=2, epochs=10_000, return_at=6, linger_at=6)
    with pytest.raises(RanksDisagreeError, match="rank 1 has returned from the train function after 6 steps; rank 0"):
        handle.result(timeout=180)
    assert handle.status().phase is JobPhase.FAILED


@pytest.mark.slow
def test_gradients_not_finite_are_told_or_left_out(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=2, epochs=10_000, nan_at=6, nonfinite="skip")
    wait_until(lambda: EventKind.NOT_FINITE in kinds(handle), handle)
    event = next(event for event in handle.events() if event.kind is EventKind.NOT_FINITE)
    assert event.reason == "gradients of model 0 were NaN or infinite on rank 1 in step 6; the update was left out"
    assert event.detail == {"step": 6, "ranks": [1], "model": 0}
    assert event.reason in handle.status().note
    handle.stop()
    handle.result(timeout=180)


@pytest.mark.slow
@pytest.mark.parametrize("tear", [[1], [0, 1]])
def test_out_of_memory_in_optimizer_step_leaves_no_half(ray_cluster: Any, tmp_path: Path, tear: list[int]) -> None:
    """One rank takes over the state of the other, which has applied the step; where none has, the job starts again."""
    adapt = {"max_batch_size": 96, "local_bsz_bounds": (2, 96), "gradient_accumulation": True}
    handle, account = run(tmp_path, workers=2, tear_at=5, tear=tear, adapt=adapt, epochs=6)
    assert sorted(path.name for path in (tmp_path / "trace").glob("torn-*")) == [f"torn-{rank}" for rank in tear]
    assert EventKind.OUT_OF_MEMORY in kinds(handle)
    assert (EventKind.RESTART in kinds(handle)) == (len(tear) == 2)
    assert len(account.final) == 1 and len(account.epochs) == 6


@pytest.mark.slow
def test_a_batch_that_falls_ten_times_ends(ray_cluster: Any, tmp_path: Path) -> None:
    """Each time the train function begins again, since the memory is that of its loss."""

    def train() -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        loader = er.AdaptiveDataLoader([torch.ones(4)] * 2048, batch_size=2048)
        for _ in er.remaining_epochs_until(1):
            totals = er.Accumulator()
            for x in loader:
                output = wrapped(x)
                if len(x) > 2:
                    raise torch.OutOfMemoryError("as if, in the loss")
                output.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                totals["samples"] += len(x)
            er.report({"samples": totals["samples"]})

    run_config = ray.train.RunConfig(storage_path=str(tmp_path))
    scaling = ray.train.ScalingConfig(num_workers=1)
    handle = er.ElasticTrainer(train, scaling_config=scaling, run_config=run_config).submit()
    assert handle.result(timeout=180).metrics["samples"] == 2048
    assert kinds(handle).count(EventKind.OUT_OF_MEMORY) == 10


@pytest.mark.slow
def test_an_evaluation_without_room_bounds_no_training(ray_cluster: Any, tmp_path: Path) -> None:
    """Its output is one number, which no parts give; the job ends with its error at once."""

    class Mean(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training and len(x) > 48:
                raise torch.OutOfMemoryError("as if, in the evaluation")
            return super().forward(x).square().mean()

    def train() -> None:
        model = Mean(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        loader = er.AdaptiveDataLoader([torch.ones(4)] * 128, batch_size=32)
        for _ in er.remaining_epochs_until(1):
            for x in loader:
                wrapped(x).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    wrapped.eval()(torch.ones(64, 4))
                wrapped.train()

    run_config = ray.train.RunConfig(storage_path=str(tmp_path))
    scaling = ray.train.ScalingConfig(num_workers=1)
    handle = er.ElasticTrainer(train, scaling_config=scaling, run_config=run_config).submit()
    with pytest.raises(torch.OutOfMemoryError, match="evaluate with smaller batches"):
        handle.result(timeout=180)
    assert EventKind.OUT_OF_MEMORY not in kinds(handle)


@pytest.mark.slow
def test_joiner_without_room_for_its_model_costs_others_nothing(ray_cluster: Any, tmp_path: Path) -> None:
    """One worker trains; the one that is to join it runs out of memory before it has a model, its successor not."""
    starve = tmp_path / "starve"
    starve.mkdir()
    handle = start(tmp_path, workers=(1, 2), epochs=10_000, starve=str(starve))
    handle.resize(1)
    wait_until(lambda: handle.status().step > 5, handle)
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2, handle)
    handle.stop()
    handle.result(timeout=180)
    assert EventKind.FAILURE not in kinds(handle)
    assert sorted(path.name for path in starve.iterdir()) == ["first", "second"]


@pytest.mark.slow
def test_a_checkpoint_with_fewer_samples_than_workers_is_continued(ray_cluster: Any, tmp_path: Path) -> None:
    """28 samples, 24 in the first step: of four workers two can take two each, the others join a pass later."""
    options: dict[str, Any] = {"name": "run", "samples": 28, "epochs": 20, "pause_s": 0.2}
    faults = Faults().kill(step=1, moment="forward")
    with pytest.raises(WorkersLostError):
        start(tmp_path, workers=1, faults=faults, checkpoint_at=0, **options).result(timeout=180)
    (tmp_path / "trace").rename(tmp_path / "before")
    handle = start(tmp_path, workers=4, **options)
    handle.result(timeout=180)
    used = next(line["indices"] for line in traced.read(tmp_path / "before") if line["kind"] == "step")
    lines = [line for line in traced.read(tmp_path / "trace") if line["kind"] == "step"]
    assert {line["world"] for line in lines if line["step"] == 1} == {2}
    assert sorted(used + [index for line in lines if line["step"] == 1 for index in line["indices"]]) == list(range(28))
    assert max(line["world"] for line in lines) == 4
    traced.check_identical(traced.read(tmp_path / "trace"))


@pytest.mark.thorough
def test_stop_ends_after_a_whole_step(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=2, epochs=10_000)
    wait_until(lambda: handle.status().step > 5, handle)
    handle.stop(reason="lunch")
    result = handle.result(timeout=180)
    assert handle.status().phase is JobPhase.STOPPED and result.error is None
    stopped = re.fullmatch(r"lunch; saved at step (\d+): the job has stopped", handle.events()[-1].reason)
    assert stopped is not None and handle.status().message == stopped[0]
    steps = [line["step"] for line in traced.read(tmp_path / "trace") if line["kind"] == "step"]
    assert int(stopped[1]) == max(steps) + 1, "it continues after the last step that was trained"


@pytest.mark.slow
def test_a_killed_allocator_is_back_and_knows_everything(ray_cluster: Any, tmp_path: Path) -> None:
    from placement.allocator.actor import get_or_create_allocator

    handle = start(tmp_path, workers=2, epochs=10_000)
    wait_until(lambda: handle.status().workers == 2, handle)
    before = handle.status().step
    ray.kill(get_or_create_allocator(), no_restart=False)
    wait_until(lambda: handle.status().step > before + 20, handle)
    deadline = time.monotonic() + 60
    known: set[str] = set()
    while handle.job not in known and time.monotonic() < deadline:
        try:
            known = set(ray.get(get_or_create_allocator().snapshot.remote(), timeout=180).jobs)  # type: ignore[attr-defined]
        except ray.exceptions.RayError:
            time.sleep(0.2)
    assert handle.job in known
    assert EventKind.FAILURE not in kinds(handle) and EventKind.RESIZE not in kinds(handle)
    handle.stop()
    handle.result(timeout=180)


@pytest.mark.thorough
def test_nothing_outlives_a_killed_driver(ray_cluster: Any, tmp_path: Path) -> None:
    """The lease runs out, the controller ends, and with it workers and groups; the fixture looks for leaks too."""
    (tmp_path / "trace").mkdir()
    script = textwrap.dedent(
        f"""
        import ray, sys, time
        ray.init(address={ray_cluster.address!r}, log_to_driver=False)
        from pathlib import Path
        from tests.job.jobs import start
        handle = start(Path({str(tmp_path)!r}), workers=2, epochs=100000, elastic={{"lease_s": 5.0}})
        while handle.status().workers < 2:
            time.sleep(0.05)
        print("running", flush=True)
        handle.wait(600)
        """
    )
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
    assert driver.stdout is not None
    assert driver.stdout.readline().strip() == "running"
    assert ray_cluster.leaks()
    driver.send_signal(signal.SIGKILL)
    driver.wait(60)
    deadline = time.monotonic() + 60
    while ray_cluster.leaks() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not ray_cluster.leaks()
    (events,) = (tmp_path / "runs").glob("*/events.jsonl")
    reason = str(json.loads(events.read_text().splitlines()[-1])["reason"])
    saved = re.fullmatch(r"its driver is gone: .* lease_s=5 s; saved at step (\d+): the job has stopped", reason)
    assert saved is not None and int(saved[1]) > 0
    assert list((events.parent / "automatic").glob(f"step_{int(saved[1]):012d}_*.json"))


@pytest.mark.thorough
def test_events_are_written_beside_the_results(ray_cluster: Any, tmp_path: Path) -> None:
    handle, _ = run(tmp_path, workers=1, name="written", epochs=1)
    lines = (tmp_path / "runs" / "written" / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert [kind for kind in kinds if kind != "pass"] == [event.kind.value for event in handle.events()]
    assert kinds.count("pass") == 1, "what the epoch proves is for the file"


@pytest.mark.thorough
def test_a_loop_without_a_loader_is_an_error(ray_cluster: Any, tmp_path: Path) -> None:
    trainer = er.ElasticTrainer(lambda: None, run_config=ray.train.RunConfig(storage_path=str(tmp_path)))
    with pytest.raises(RuntimeError, match="AdaptiveDataLoader"):
        trainer.submit().result(timeout=180)


def test_resources_that_appear_never_are_refused_within_seconds(ray_cluster: Any, tmp_path: Path) -> None:
    begun_s = time.monotonic()
    with pytest.raises(ValueError, match="unobtainium"):
        start(tmp_path, workers=1, bundle={"unobtainium": 1.0})
    assert time.monotonic() - begun_s < 60


@pytest.mark.slow
def test_resize_beyond_what_the_loader_has_work_for(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=(1, 8), batch_size=4, epochs=10_000)
    wait_until(lambda: handle.status().workers >= 1, handle)
    with pytest.raises(ValueError, match="between 1 and 4"):
        handle.resize(6)
    handle.stop()
    handle.result(timeout=180)
