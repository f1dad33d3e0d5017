"""Exceptions keep their type, cause and message on the way between processes."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import ray.cloudpickle
import ray.train
from ray.train.v2.api.exceptions import WorkerGroupError

from elastic_ray.errors import (
    ImpossibleResourcesError,
    JobLostError,
    JobNameTakenError,
    TrainFunctionError,
    WorkersLostError,
)
from elastic_ray.sealed import seal_error


def round_trip(error: Any) -> Any:
    return pickle.loads(ray.cloudpickle.dumps(error))


def raised(error: BaseException) -> TrainFunctionError:
    try:
        raise error
    except BaseException as caught:
        return TrainFunctionError.of(seal_error(caught, rank=3, node="n1"))


class Coded(RuntimeError):
    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint


class Locked(RuntimeError):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    "error",
    [
        JobLostError("a", "killed", "running, step 3"),
        WorkersLostError("a", 3, 2, "nodes n1 and n2 died"),
        JobNameTakenError("taken"),
        ImpossibleResourcesError("no GPU"),
    ],
)
def test_round_trip_keeps_everything(error: Exception) -> None:
    copy = round_trip(error)
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    "cause",
    [
        ValueError("bad"),
        KeyError("k"),
        FileNotFoundError(2, "gone", "x.pt"),
        UnicodeDecodeError("utf8", b"x", 0, 1, "r"),
    ],
)
def test_error_is_of_the_users_type_as_well(cause: Exception) -> None:
    for error in (raised(cause), round_trip(raised(cause)), round_trip(round_trip(raised(cause)))):
        assert isinstance(error, TrainFunctionError)
        assert isinstance(error, ray.train.TrainingFailedError)
        assert isinstance(error, type(cause))
        assert error.rank == 3
        assert error.node == "n1"
        assert repr(error.cause) == repr(cause)
        assert error.__cause__ is error.cause
        assert "rank 3" in str(error)
        assert "raise error" in str(error)  # the line of the traceback


def test_attributes_of_the_cause_are_there() -> None:
    error: Any = round_trip(raised(FileNotFoundError(2, "gone", "x.pt")))
    assert (error.errno, error.filename) == (2, "x.pt")


def test_a_group_is_caught_as_a_group() -> None:
    group = pytest.importorskip("builtins").__dict__.get("ExceptionGroup")
    if group is None:
        pytest.skip("Python 3.10 has no exception groups")
    error: Any = round_trip(raised(group("two", [ValueError("a"), KeyError("b")])))
    assert isinstance(error, group)
    assert len(error.exceptions) == 2


def test_texts_of_others_do_not_steer_the_terminal() -> None:
    error = raised(ValueError("\x1b[2J\u202e"))
    assert "\\x1b[2J\\u202e" in str(error) and "\x1b" not in str(error) and str(error).count("\n") > 2
    assert str(error.cause) == "\x1b[2J\u202e", "the exception itself is the user's"
    for other in (JobLostError("a", "\x1b\n", "\r"), WorkersLostError("a", 3, 2, "\x1b[31m\n")):
        assert str(other).isprintable()


@pytest.mark.parametrize("cause", [Coded(7, hint="x"), Locked()])
def test_a_cause_that_cannot_travel_leaves_its_traceback(cause: Exception) -> None:
    error = round_trip(raised(cause))
    assert type(error) is TrainFunctionError
    assert str(cause) in str(error)
    assert error.cause is None


@pytest.mark.parametrize("cause", [SystemExit(3), KeyboardInterrupt(), StopIteration(1)])
def test_control_flow_does_not_leak_into_the_driver(cause: BaseException) -> None:
    assert not isinstance(round_trip(raised(cause)), SystemExit | KeyboardInterrupt | StopIteration)


@pytest.mark.parametrize(("error", "kept"), [(ValueError("bad"), ValueError), (Locked(), TrainFunctionError)])
def test_code_for_ray_train_finds_what_workers_raised(error: Exception, kept: type[Exception]) -> None:
    for each in (raised(error), round_trip(raised(error))):
        with pytest.raises(WorkerGroupError) as caught:
            raise each
        [(rank, failure)] = caught.value.worker_failures.items()
        assert rank == 3
        assert isinstance(failure, (type(error), kept))
    lost = WorkersLostError("a", 3, 2, "node n1 died")
    assert isinstance(lost, WorkerGroupError)
    assert (lost.worker_failures, str(lost).startswith("job 'a' lost all")) == ({}, True)
