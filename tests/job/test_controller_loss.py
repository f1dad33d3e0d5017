"""A job outlives its controller's process: workers train on, and the next controller knows everything again."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

import elastic_ray as er
from elastic_ray.checkpoints.automatic import state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.driver.handle import find_controller
from elastic_ray.events import EventKind, JobPhase
from elastic_ray.faults import Faults
from tests.job import traced
from tests.job.controllers import controller_pid, kill_controller
from tests.job.jobs import kinds, start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000)]


def step_times(folder: Path) -> list[float]:
    """When committed steps began."""
    return [line["time"] for line in traced.read(folder / "trace") if line["kind"] == "step"]


@pytest.mark.slow
def test_training_goes_on_while_the_controller_is_away(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=2, epochs=40)
    wait_until(lambda: handle.status().workers == 2 and handle.status().step > 10, handle)
    before = handle.events()
    workers = {worker.pid for worker in handle.workers()}
    killed_s = time.time()
    pid = kill_controller(handle)
    wait_until(lambda: EventKind.RECOVERED in kinds(handle), handle)
    known_s = time.time()
    assert handle.status().workers == 2
    assert handle.events()[: len(before)] == before
    assert {worker.pid for worker in handle.workers()} == workers
    assert controller_pid(handle) != pid
    assert handle.result(timeout=180).error is None
    assert handle.status().phase is JobPhase.FINISHED
    during = [at for at in step_times(tmp_path) if killed_s < at < known_s]
    edges = [killed_s, *during, known_s]
    longest_s = max(b - a for a, b in itertools.pairwise(edges))
    assert longest_s < max(1.5, (known_s - killed_s) / 2), "training continues meanwhile"
    account = traced.account(tmp_path / "trace")
    assert account.worlds == [2] and len(account.final) == 1
    assert EventKind.FAILURE not in kinds(handle)


@pytest.mark.timeout(1000)
@pytest.mark.slow
def test_worker_that_is_lost_meanwhile_is_missed_and_replaced(ray_cluster: Any, tmp_path: Path) -> None:
    """Rank 0 dies in the same moment. On a busy machine a process takes as long to start as 60 epochs take."""
    handle = start(tmp_path, workers=3, epochs=120)
    wait_until(lambda: handle.status().workers == 3 and handle.status().step > 10, handle)
    victim = handle.workers()[0].pid
    kill_controller(handle)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: EventKind.FAILURE in kinds(handle), handle)
    assert "w1" in next(event.reason for event in handle.events() if event.kind is EventKind.FAILURE)
    wait_until(lambda: handle.status().workers == 3, handle, 90)
    assert handle.result(timeout=180).error is None
    account = traced.account(tmp_path / "trace")
    assert victim in account.pids and len(account.final) == 1
    assert EventKind.RESTART not in kinds(handle)


@pytest.mark.slow
def test_a_worker_stopped_meanwhile_does_not_hold_up_others(ray_cluster: Any, tmp_path: Path) -> None:
    """Its process lives, as far as Ray can tell; a look at it tells more."""
    handle = start(tmp_path, workers=3, epochs=30)
    wait_until(lambda: handle.status().workers == 3 and handle.status().step > 10, handle)
    victim = handle.workers()[1].pid
    os.kill(victim, signal.SIGSTOP)
    kill_controller(handle)
    killed_s = time.monotonic()
    wait_until(lambda: EventKind.RECOVERED in kinds(handle), handle)
    assert time.monotonic() - killed_s < 12.0, "some 3 s where nothing else runs; 20 s for one that is only silent"
    wait_until(lambda: handle.status().workers == 3, handle, 90)
    assert handle.result(timeout=180).error is None
    assert len(traced.account(tmp_path / "trace").final) == 1
    assert EventKind.RESTART not in kinds(handle)


@pytest.mark.slow
def test_a_call_waits_for_a_controller_that_is_slow(ray_cluster: Any, tmp_path: Path) -> None:
    """On a busy machine another process takes longer than 10 s to start; the job is well meanwhile."""
    handle = start(tmp_path, workers=2, epochs=100_000)
    wait_until(lambda: handle.status().step > 10, handle)
    pid = controller_pid(handle)
    os.kill(pid, signal.SIGSTOP)
    later = threading.Timer(12.0, os.kill, (pid, signal.SIGCONT))
    later.start()
    try:
        step = handle.status().step
    finally:
        later.join()
    wait_until(lambda: handle.status().step > step, handle)
    handle.stop()
    assert handle.result(timeout=180).error is None


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["reserving", "starting", "announced", "leaving", "forced"])
def test_a_controller_dies_in_every_phase_of_a_change(ray_cluster: Any, tmp_path: Path, moment: str) -> None:
    handle = start(tmp_path, workers=(1, 4), epochs=100_000, pause_s=0.01)
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2 and handle.status().step > 5, handle)
    goal = 3
    match moment:
        case "reserving":
            handle.resize(3)
        case "starting":
            handle.resize(3)
            wait_until(lambda: handle.status().target_workers == 3, handle)
        case "announced":
            generation = handle.status().generation
            handle.resize(3)
            wait_until(lambda: handle.status().generation > generation or _joiners(tmp_path) > 2, handle)
        case "leaving":
            goal = 1
            handle.resize(1)
        case "forced":
            handle.resize(3)
            os.kill(handle.workers()[-1].pid, signal.SIGKILL)
            time.sleep(0.05)  # so that its death is known, or not: either is to go well
    kill_controller(handle)
    wait_until(lambda: EventKind.RECOVERED in kinds(handle), handle)
    wait_until(lambda: handle.status().workers == goal, handle, 90)
    step = handle.status().step
    wait_until(lambda: handle.status().step > step + 5, handle)
    handle.stop()
    handle.result(timeout=180)
    traced.check_identical(traced.read(tmp_path / "trace"))
    assert EventKind.RESTART not in kinds(handle)


def _joiners(folder: Path) -> int:
    return len({line["pid"] for line in traced.read(folder / "trace")})


@pytest.mark.slow
def test_twice_in_a_row_and_together_with_the_allocator(ray_cluster: Any, tmp_path: Path) -> None:
    from placement.ray_cluster.named_actors import ALLOCATOR, NAMESPACE

    handle = start(tmp_path, workers=2, epochs=60)
    wait_until(lambda: handle.status().workers == 2 and handle.status().step > 10, handle)
    kill_controller(handle)
    wait_until(lambda: EventKind.RECOVERED in kinds(handle), handle)
    allocator: Any = ray.get_actor(ALLOCATOR, namespace=NAMESPACE)
    os.kill(ray.get(allocator.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    kill_controller(handle)
    wait_until(lambda: kinds(handle).count(EventKind.RECOVERED) == 2, handle)
    assert handle.result(timeout=180).error is None
    account = traced.account(tmp_path / "trace")
    assert account.worlds == [2] and len(account.final) == 1
    assert not {EventKind.FAILURE, EventKind.RESTART} & set(kinds(handle))


@pytest.mark.slow
def test_all_workers_and_controller_at_once_restart_from_checkpoint(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=2, epochs=12, checkpoint=True, max_failures=1)
    wait_until(lambda: handle.status().step > 20, handle)
    victims = [worker.pid for worker in handle.workers()]
    kill_controller(handle)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: EventKind.RESTART in kinds(handle), handle)
    assert handle.result(timeout=180).error is None
    assert [row["epoch"] for row in handle.result().metrics_dataframe.to_dict("records")][-1] == 11


@pytest.mark.slow
def test_nothing_is_left_when_the_controller_never_comes_back(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=2, epochs=100_000, name="orphans")
    wait_until(lambda: handle.status().step > 5, handle)
    workers = [worker.pid for worker in handle.workers()]
    ray.kill(find_controller(handle.job), no_restart=True)
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in workers) or ray_cluster.leaks():
        assert time.monotonic() < deadline, ray_cluster.leaks()
        time.sleep(0.2)
    with pytest.raises(er.errors.JobLostError if hasattr(er, "errors") else Exception, match="controller"):
        handle.result(timeout=180)


def notes() -> set[bytes]:
    """Keys of all that controllers keep in Ray's control store; how a job ended is kept for an hour."""
    from ray.experimental.internal_kv import _internal_kv_list

    return {key for key in _internal_kv_list(b"", namespace=b"elastic_ray") if not key.startswith(b"ended/")}


@pytest.mark.slow
def test_only_notes_of_controller_gone_for_good_are_deleted(ray_cluster: Any, tmp_path: Path) -> None:
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

    before = notes()
    stranger = b"controller/" + b"f" * 32 + b"/job"  # Ray may not know one for a moment
    _internal_kv_put(stranger, b"{}", namespace=b"elastic_ray")
    lives, dies = tmp_path / "lives", tmp_path / "dies"
    lives.mkdir(), dies.mkdir()
    living = start(lives, workers=1, epochs=100_000, ballast=b"x" * 200_000)
    wait_until(lambda: living.status().step > 5, living)
    kept = notes()
    dying = start(dies, workers=1, epochs=100_000, ballast=b"x" * 200_000)
    wait_until(lambda: dying.status().step > 5, dying)
    assert {key.split(b"/")[0] for key in notes() - kept} == {b"controller", b"holder", b"train_loop"}
    kill_controller(living)  # which comes back, and is not dead meanwhile
    ray.kill(find_controller(dying.job), no_restart=True)
    deadline = time.monotonic() + 60
    while left := {key for key in notes() - kept if b"/event/" not in key}:
        assert time.monotonic() < deadline, left
        assert kept <= notes()
        time.sleep(0.1)
    wait_until(lambda: EventKind.RECOVERED in kinds(living), living)
    assert kept <= notes()
    living.stop()
    living.result(timeout=180)
    _internal_kv_del(stranger, namespace=b"elastic_ray")
    deadline = time.monotonic() + 60
    while left := notes() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.slow
def test_a_job_that_has_ended_ends_once(ray_cluster: Any, tmp_path: Path) -> None:
    """Its controller dies before the driver has fetched the outcome: the driver looks every few seconds only."""
    handle = start(tmp_path, workers=1, epochs=2, elastic={"lease_s": 30.0})
    events = tmp_path / "runs" / handle.job / "events.jsonl"
    deadline = time.monotonic() + 60
    pid = controller_pid(handle)
    while '"finished"' not in (events.read_text() if events.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    result = handle.result(timeout=180)
    assert result.error is None and handle.status().phase is JobPhase.FINISHED
    assert [row["epoch"] for row in result.metrics_dataframe.to_dict("records")] == [0, 1]
    assert kinds(handle).count(EventKind.FINISHED) == 1


@pytest.mark.slow
def test_a_large_train_function_is_found_again(ray_cluster: Any, tmp_path: Path) -> None:
    """Ray keeps large arguments of an actor in its object store, where they may be gone when it restarts the actor."""
    before = notes()
    handle = start(tmp_path, workers=(1, 2), epochs=100_000, ballast=b"x" * 2_000_000)
    handle.resize(1)
    wait_until(lambda: handle.status().step > 5, handle)
    kill_controller(handle)
    wait_until(lambda: EventKind.RECOVERED in kinds(handle), handle)
    handle.resize(2)  # the joiner gets it, too
    wait_until(lambda: handle.status().workers == 2, handle, 90)
    handle.stop()
    handle.result(timeout=180)
    deadline = time.monotonic() + 60
    while left := notes() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.slow
def test_what_was_reported_before_is_part_of_the_result(ray_cluster: Any, tmp_path: Path) -> None:
    """The job ends so soon after its controller is back that this one may still read what the one before has heard."""
    handle = start(tmp_path, workers=2, epochs=8, checkpoint=True)
    wait_until(lambda: handle.status().epoch >= 5, handle)
    kill_controller(handle)
    result = handle.result(timeout=180)
    assert result.metrics is not None and result.metrics["epoch"] == 7
    assert [row["epoch"] for row in result.metrics_dataframe.to_dict("records")] == list(range(8))
    assert result.checkpoint is not None and result.checkpoint.path.endswith("checkpoint_000008")


@pytest.mark.slow
def test_another_rank_0_counts_reports_on(ray_cluster: Any, tmp_path: Path) -> None:
    """Only rank 0 reports, as scripts for DistributedDataParallel do; the one that takes its place never has before."""
    faults = Faults().kill(rank=0, step=35, moment="forward")  # in the middle of an epoch: what it reports arrives
    handle = start(tmp_path, workers=2, epochs=10, checkpoint=True, rank_0_reports=True, faults=faults)
    result = handle.result(timeout=180)
    assert [row["epoch"] for row in result.metrics_dataframe.to_dict("records")] == list(range(10))
    assert result.checkpoint is not None and result.checkpoint.path.endswith("checkpoint_000010")


@pytest.mark.slow
def test_workers_whose_controller_is_gone_for_good_save_job(ray_cluster: Any, tmp_path: Path) -> None:
    """The job continues from there under its name."""
    often = {"checkpoint_interval_s": 600.0}
    handle = start(tmp_path, workers=2, name="alone", epochs=400, elastic=often)
    wait_until(lambda: handle.status().workers == 2 and handle.status().step > 10, handle)
    storage = RunStorage(str(tmp_path / "runs" / "alone"))
    assert state_files(storage) == ()
    workers = [worker.pid for worker in handle.workers()]
    ray.kill(find_controller(handle.job), no_restart=True)
    deadline = time.monotonic() + 90
    while any(psutil.pid_exists(pid) for pid in workers):
        assert time.monotonic() < deadline, "the workers have not ended"
        time.sleep(0.1)
    (state,) = state_files(storage)
    assert state.steps > 10
    last = storage.read_events()[-1]
    assert "its controller has ended" in last.reason and f"saved at step {state.steps}" in last.reason
    with pytest.raises(er.errors.JobLostError):
        handle.result(timeout=180)
    again = start(tmp_path, workers=1, name="alone", epochs=state.resume_point.epoch + 1)
    assert again.result(timeout=180).error is None
    (resumed,) = [event for event in again.events() if event.kind is EventKind.RESUMED]
    assert f"at step {state.steps}" in resumed.reason
