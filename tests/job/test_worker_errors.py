"""Whose an exception is that a worker's train function raises: the worker's, or the program's."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ray import load_model_state
from elastic_ray.consensus.intents import RanksDisagreeError
from elastic_ray.events import EventKind, JobPhase
from elastic_ray.record.losses import Losses
from elastic_ray.record.worker_errors import REMEMBER_S, WorkerError, WorkerErrors
from elastic_ray.sealed import Raised
from elastic_ray.worker import error_origin
from elastic_ray.worker.error_origin import ErrorOrigin, origin_of
from tests.job.jobs import kinds, run, start

HERE = ErrorOrigin(kind="builtins.ValueError", place="train.py:7")
DISK = ErrorOrigin(kind="builtins.OSError", place="train.py:9", of_node=True)


def origin(raises: Callable[[], Any]) -> ErrorOrigin:
    try:
        raises()
    except BaseException as error:
        return origin_of(error)
    raise AssertionError("it raises")


def read_wrapped() -> None:
    try:
        raise OSError(errno.EIO, "Input/output error")
    except OSError as error:
        raise RuntimeError("no batch") from error


def refuse() -> None:
    raise RanksDisagreeError("rank 0 trains, rank 1 does not")


def read_missing() -> None:
    """A file that elastic_ray opens for the user's code."""
    load_model_state("/nowhere/at/all")


def call_library() -> None:
    json.loads("{")


def of_text(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_origin_is_type_and_innermost_line_of_users_code() -> None:
    found = origin(call_library)
    assert found.kind == "json.decoder.JSONDecodeError" and not found.of_node and not found.refusal
    name, _, line = found.place.rpartition(":")
    assert name == __file__ and int(line) == call_library.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError("Caught OSError in DataLoader worker process 0.\nOSError: [Errno 5] Input/output error: '/data/7'"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. "),
        RuntimeError("DataLoader worker (pid(s) 4711) exited unexpectedly"),
    ],
)
def test_errors_of_devices_and_killed_processes_are_of_node(error: BaseException) -> None:
    assert origin(of_text(error)).of_node
    assert origin(read_wrapped).of_node


class Broken(torch.utils.data.Dataset[int]):
    """Kills the process that reads it, or cannot be read."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.EIO, "Input/output error", "/data/shard-17")


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["kill", "read"])
def test_real_dataloader_tells_of_killed_process_and_of_disk(how: str) -> None:
    def read() -> None:
        for _ in torch.utils.data.DataLoader(Broken(how), num_workers=1):
            pass

    found = origin(read)
    assert found.of_node and found.place.startswith(__file__)


def test_what_torch_raises_in_our_frames_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_origin, "_OURS", (__file__,))
    assert not origin(lambda: torch.ones(2).copy_(torch.ones(3))).refusal
    assert origin(of_text(RuntimeError("call loader.weigh(n) once"))).refusal
    found = origin(of_text(RuntimeError("CUDA error: uncorrectable ECC error encountered")))
    assert found.of_node and not found.refusal


def test_others_are_not() -> None:
    class Odd(RuntimeError):
        def __str__(self) -> str:
            raise KeyError("no text")

    for error in (FileNotFoundError(errno.ENOENT, "gone"), RuntimeError("CUDA error: device-side assert"), Odd()):
        assert not origin(of_text(error)).of_node
    assert origin(refuse).refusal and not origin(read_missing).refusal


class Job:
    """Judges errors by hand; names of nodes are one letter, and a worker's name begins with its node's."""

    def __init__(self, max_failures: int = 0) -> None:
        self.losses = Losses(max_failures)
        self.errors = WorkerErrors(self.losses)
        self.now_s = 1000.0
        self.raised: list[Raised] = []

    def error(self, worker: str, origin: ErrorOrigin | None, steps: int = 5) -> WorkerError:
        self.raised.append(Raised(traceback_text=f"{len(self.raised)}", rank=0, node=worker[0]))
        return WorkerError(worker=worker, node=worker[0], steps=steps, origin=origin, raised=self.raised[-1])

    def member(self, worker: str, origin: ErrorOrigin | None = HERE, steps: int = 5, *, others: bool = True) -> Any:
        """The error that ends the job, or None."""
        told = self.error(worker, origin, steps)
        return self.errors.of_member(told, others_train=others, now_s=self.now_s).ends

    def start(
        self, worker: str, origin: ErrorOrigin | None = HERE, *, nodes: int, wanted: int = 2, beside: str = ""
    ) -> Any:
        """``beside``: other workers that were started by then."""
        there = {worker, *beside.split()}
        return self.errors.of_start(self.error(worker, origin), beside=there, nodes=nodes, wanted=wanted).ends


def test_one_workers_error_costs_it_same_twice_the_job() -> None:
    job = Job()
    assert job.member("a1") is None and job.losses.raised == 1
    assert job.member("b1", dataclasses.replace(HERE, place="train.py:8")) is None, "another place"
    assert job.member("b2", dataclasses.replace(HERE, kind="builtins.KeyError")) is None, "another type"
    assert job.member("a2") is job.raised[0], "what was raised first"


def test_the_same_error_long_after_is_another_one() -> None:
    job = Job()
    assert job.member("a1") is None
    job.now_s += REMEMBER_S
    assert job.member("a2") is None


def test_own_errors_and_those_nobody_survives_end_the_job() -> None:
    for found, others in ((None, True), (dataclasses.replace(HERE, refusal=True), True), (HERE, False)):
        assert (job := Job(max_failures=-1)).member("a1", found, others=others) is job.raised[0]
    assert Job().member("a1", DISK, others=False) is None, "the job restarts from its last checkpoint"


def test_device_error_is_the_nodes_until_three_met_it() -> None:
    job = Job()
    assert [job.member(worker, DISK) for worker in ("a1", "a2", "b1")] == [None] * 3
    assert job.member("c1", DISK) is job.raised[0]
    few = Job()
    assert [few.member(worker, DISK) for worker in ("a1", "b1", "a2", "b2")] == [None] * 4
    assert few.member("a3", DISK) is few.raised[0], "two nodes are all there are: five times within an hour"


def test_error_of_each_epochs_end_ends_job_third_time() -> None:
    job = Job()
    for worker in ("a1", "b1"):
        assert job.member(worker) is None
        job.now_s += 2 * REMEMBER_S
    assert job.member("c1") is job.raised[0]


def test_exception_that_costs_the_last_worker_is_one_failure() -> None:
    job = Job(max_failures=1)
    assert job.member("a1", DISK, others=False) is None
    assert job.losses.all_lost(0) and (job.losses.failures, job.losses.raised) == (1, 0)
    assert job.member("a1", DISK, steps=9, others=False) is not None, "the second is one too many"


def test_newcomers_that_fail_alike_on_several_nodes_blame_none() -> None:
    job = Job()
    judge = job.errors.of_newcomer
    assert judge(job.error("a1", HERE), joined=True, now_s=job.now_s).blames_node
    job.errors.record("a", "a1", "x", starting=True, now_s=job.now_s)
    assert not judge(job.error("b1", HERE), joined=True, now_s=job.now_s).blames_node
    assert job.errors.failures(job.now_s) == ()


def test_max_failures_counts_failures_nodes_in_one_step_once() -> None:
    job = Job(max_failures=2)
    assert job.member("a1", DISK, 5) is None and job.member("a2", DISK, 5) is None
    assert job.member("a1", DISK, 6) is None and job.losses.raised == 2
    assert job.member("b1", DISK, 7) is job.raised[-1]
    assert not job.losses.all_lost(0), "a restart would be one more"


def test_newcomer_ends_a_job_with_its_predecessors_error_only() -> None:
    job = Job()
    judge = job.errors.of_newcomer
    assert judge(job.error("a1", HERE), joined=True, now_s=job.now_s).ends is None
    assert judge(job.error("a2", HERE), joined=True, now_s=job.now_s).ends is None, "no member raised it"
    assert job.member("b1") is None
    assert judge(job.error("a3", HERE), joined=False, now_s=job.now_s).ends is None, "it did not train with the others"
    assert judge(job.error("a4", HERE), joined=True, now_s=job.now_s).ends is job.raised[2]


def test_starts_end_a_job_where_nodes_fail_alike() -> None:
    other = dataclasses.replace(HERE, place="train.py:1")
    assert (job := Job()).start("a1", nodes=1) is job.raised[0], "there is no other node"
    job = Job()
    assert job.start("a1", nodes=9, beside="a2") is None and job.start("a2", nodes=9) is None, "the node's, so far"
    assert job.start("b1", nodes=9) is job.raised[2], "alike on another node"
    job = Job()
    assert job.start("a1", nodes=9) is None and job.start("b1", other, nodes=9) is None
    assert job.start("c1", DISK, nodes=9) is job.raised[2]
    job = Job()
    assert [job.start("a1", nodes=9, wanted=2) for _ in range(5)] == [None] * 5
    assert job.start("a1", nodes=9, wanted=2) is not None, "nothing is tried for ever"
    job = Job()
    assert job.start("a1", nodes=9) is None
    job.errors.settled()
    assert job.start("b1", nodes=9) is None, "a group has trained since"


def test_next_starts_same_error_is_the_programs_unless_device() -> None:
    other = dataclasses.replace(HERE, place="train.py:1")
    job = Job()
    assert job.start("a1", nodes=9, beside="a2") is None and job.start("a2", other, nodes=9) is None
    job.errors.record("a", "a1", "x", starting=True, now_s=job.now_s)
    assert job.start("a3", nodes=9) is job.raised[2] and job.errors.failures(job.now_s) == ()
    job = Job()
    assert [job.start(f"a{number}", DISK, nodes=9) for number in range(5)] == [None] * 5
    job = Job()
    assert job.start("a1", nodes=9) is None and job.start("a2", other, nodes=9) is None, "another place"


def test_steps_without_survivors_finish_no_job() -> None:
    job = Job()
    assert job.errors.at_end(9) is None
    assert job.member("a1", steps=9) is None
    assert job.errors.at_end(9) is job.raised[0], "they returned, and it had yet to save the model"
    job.errors.settled()
    assert job.errors.at_end(9) is job.raised[0] and job.errors.at_end(10) is None
    job.errors.settled(started=True)
    assert job.errors.at_end(5) is None, "with larger batches, after a restart"


def test_what_cost_the_last_worker_is_known_until_training() -> None:
    job = Job()
    assert job.member("a1", DISK) is None and job.errors.all_lost() is job.raised[0]
    job.errors.settled()
    assert job.errors.all_lost() is None


@pytest.mark.thorough
@pytest.mark.ray_cluster(num_cpus=4)
@pytest.mark.timeout(600)
def test_a_disk_failing_under_one_worker_costs_that_worker(ray_cluster: Any, tmp_path: Path) -> None:
    handle, account = run(tmp_path, workers=2, disk_fails_at=6, epochs=8, pause_s=0.05)
    (event,) = [each for each in handle.events() if each.kind is EventKind.WARNING]
    assert event.reason.startswith("worker w2 on node ") and "/data/shard-17" in event.reason
    assert "traced.py" in event.detail["traceback"] and event.detail["worker"] == "w2"
    assert EventKind.FAILURE in kinds(handle) and EventKind.RESTART not in kinds(handle)
    assert account.worlds[:2] == [2, 1] and len(account.final) == 1
    assert len(account.pids) == 3 or account.worlds == [2, 1], "a fresh process replaces it"


@pytest.mark.thorough
@pytest.mark.ray_cluster(num_cpus=4)
@pytest.mark.timeout(600)
def test_who_raises_after_the_last_step_ends_the_job(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=2, epochs=2, raise_at_end=True)
    with pytest.raises(KeyError, match="in the last evaluation"):
        handle.result(timeout=180)
    assert handle.status().phase is JobPhase.FAILED
