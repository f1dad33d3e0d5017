"""Failures of a job as exceptions that can be sent between actors.

They derive from ``ray.train.TrainingFailedError``, or, for worker failures, from its subclass ``WorkerGroupError``, so
that ``except`` clauses written for Ray Train keep working.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import ray.cloudpickle
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

from elastic_ray.access import AccessRefusedError as AccessRefusedError
from elastic_ray.sealed import Raised, pickled_error
from placement.lazy_names import lazy_names
from placement.text import printable, printable_lines

if TYPE_CHECKING:
    from elastic_ray.batch.branch_losses import BranchError
    from elastic_ray.batch.tuner import BatchDoesNotFitError
    from elastic_ray.communication.communicator import CommunicationFailedError
    from elastic_ray.consensus.intents import RanksDisagreeError
    from elastic_ray.parallel.nonfinite import NonFiniteGradientsError, NonFiniteParametersError
    from elastic_ray.state.layout import ReplicasDifferError
    from elastic_ray.state.tree import UnsafeStateError
    from elastic_ray.sync.optimizer_tiles.moves import StateLostError
    from elastic_ray.sync.sharded.shard import RowsLostError
    from placement.storage.private_files import ForeignDirectoryError
    from placement.storage.storage_calls import StorageTimeoutError

# Errors of rooms above, loaded on first use.
_HOMES = {
    "elastic_ray.batch.branch_losses": "BranchError",
    "elastic_ray.batch.tuner": "BatchDoesNotFitError",
    "elastic_ray.communication.communicator": "CommunicationFailedError",
    "elastic_ray.consensus.intents": "RanksDisagreeError",
    "elastic_ray.parallel.nonfinite": "NonFiniteGradientsError NonFiniteParametersError",
    "elastic_ray.state.layout": "ReplicasDifferError",
    "elastic_ray.state.tree": "UnsafeStateError",
    "elastic_ray.sync.optimizer_tiles.moves": "StateLostError",
    "elastic_ray.sync.sharded.shard": "RowsLostError",
    "placement.storage.private_files": "ForeignDirectoryError",
    "placement.storage.storage_calls": "StorageTimeoutError",
}

__all__ = [
    "AccessRefusedError",
    "BatchDoesNotFitError",
    "BranchError",
    "CommunicationFailedError",
    "ForeignDirectoryError",
    "ImpossibleResourcesError",
    "JobLostError",
    "JobNameTakenError",
    "NonFiniteGradientsError",
    "NonFiniteParametersError",
    "RanksDisagreeError",
    "ReplicasDifferError",
    "RowsLostError",
    "StateLostError",
    "StorageTimeoutError",
    "TrainFunctionError",
    "UnsafeStateError",
    "WorkersLostError",
]

__getattr__, _ = lazy_names("elastic_ray.errors", _HOMES)


class JobNameTakenError(RuntimeError):
    """Error raised if a job is submitted under the name of an active job, here or in the same storage."""


class ImpossibleResourcesError(ValueError):
    """Error raised if no node, or not even the entire cluster, could ever provide the resources a job requests."""


class JobLostError(TrainingFailedError):
    """Error raised if the job's controller is lost, and with it all workers.

    Attributes:
        job: Name of the job.
        reason: Why the controller is considered lost.
        last: The job's last known state, as a sentence.
    """

    def __init__(self, job: str, reason: str, last: str) -> None:
        super().__init__(
            f"job {job!r} was lost: its controller is gone ({printable(reason).rstrip('.')}). Last known state: "
            f"{printable(last)}. "
            "Submit the job again under the same name and storage_path to continue from its last checkpoint; "
            "if the driver was stopped or cut off for longer than ElasticConfig.lease_s, raise lease_s."
        )
        self.job, self.reason, self.last = job, reason, last

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.job, self.reason, self.last)


class WorkersLostError(WorkerGroupError):
    """Error raised if all workers of a job were lost more often than ``FailureConfig.max_failures`` allows.

    If ``max_failures`` is 0, the default, the limit is the number of consecutive restarts without progress instead.

    Attributes:
        job: Name of the job.
        failures: Number of times all workers were lost.
        max_failures: The limit.
        reason: Cause of the last loss.
        worker_failures: Empty, because no worker raised an exception.
    """

    def __init__(self, job: str, failures: int, max_failures: int, reason: str) -> None:
        if max_failures:
            limit = f"but FailureConfig(max_failures={max_failures}) allows {max_failures}"
        elif failures > 1:
            limit = "the last times without a new checkpoint in between"
        else:
            limit = "and ElasticConfig(restart=False) allows no restart"
        message = (
            f"job {job!r} lost all its workers {failures} time(s), {limit}: {printable(reason)}. Raise "
            "FailureConfig(max_failures) (-1: no limit) to restart from the last checkpoint."
        )
        super().__init__(message, {})
        self.args = (message,)  # without Ray Train's own first line
        self.job, self.failures, self.max_failures, self.reason = job, failures, max_failures, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.job, self.failures, self.max_failures, self.reason)


class TrainFunctionError(WorkerGroupError):
    """Error raised if the train function raises on several workers, or on the last one; the job is not retried.

    An instance made by :meth:`of` is also an instance of the user's exception type, unless Python does not allow this.
    If the train function raises ``ValueError``, both ``except TrainFunctionError`` and ``except ValueError`` catch the
    error.

    Attributes:
        cause: The user's exception; None if it could not be unpickled in this process.
        rank: Rank of the worker that raised the exception.
        node: Node of that worker.
        traceback_text: The traceback as formatted on that worker.
        worker_failures: The user's exception (this error if ``cause`` is None), keyed by the rank that raised it.
    """

    def __init__(self, traceback_text: str, rank: int, node: str, cause: BaseException | None = None) -> None:
        text = printable_lines(traceback_text.rstrip())
        message = f"{Raised(traceback_text=text, rank=rank, node=node)}\n\n{text}"
        Exception.__init__(self, message)  # not super(): next could be the __init__ of the user's type
        self.traceback_text, self.rank, self.node, self.cause = traceback_text, rank, node, cause
        self.__cause__ = cause
        self.worker_failures = {rank: cause if isinstance(cause, Exception) else self}

    @classmethod
    def of(cls, raised: Raised) -> TrainFunctionError:
        """Return the error for a worker's exception, unpickled if possible; for the user's own processes only."""
        return _train_function_error(raised.pickled, raised.traceback_text, raised.rank, raised.node)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__

    def __reduce__(self) -> tuple[Any, ...]:
        payload = None if self.cause is None else pickled_error(self.cause)
        return _train_function_error, (payload, self.traceback_text, self.rank, self.node)


def _train_function_error(payload: bytes | None, text: str, rank: int, node: str) -> TrainFunctionError:
    """Return the error, with its cause if this process can unpickle it."""
    cause: BaseException | None = None
    if payload is not None:
        with contextlib.suppress(Exception):
            cause = ray.cloudpickle.loads(payload)
    if isinstance(cause, Exception):
        with contextlib.suppress(Exception):  # a type that cannot be subclassed, or whose __new__ is special
            return _of_both_types(cause, text, rank, node)
    return TrainFunctionError(text, rank, node, cause)


def _of_both_types(cause: Exception, text: str, rank: int, node: str) -> TrainFunctionError:
    """Return an instance of both ``TrainFunctionError`` and the cause's type, with the cause's attributes."""
    cause_type = type(cause)
    if isinstance(cause, TrainingFailedError | StopIteration | StopAsyncIteration):
        raise TypeError("control flow exceptions would change what our own caller does")

    def get(self: TrainFunctionError, name: str) -> Any:
        if name.startswith("__") or "cause" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["cause"], name)

    name = f"TrainFunctionError({cause_type.__name__})"
    members = {"__module__": __name__, "__qualname__": name, "__getattr__": get}
    both: Any = type(name, (TrainFunctionError, cause_type), members)
    try:
        error: TrainFunctionError = both.__new__(both)
    except TypeError:  # an ExceptionGroup wants its arguments in __new__
        error = both.__new__(both, *cause.args)
    error.__dict__.update(cause.__dict__)
    TrainFunctionError.__init__(error, text, rank, node, cause)
    for owner in cause_type.__mro__:  # errno, filename...: kept in slots of the C type
        for attribute, member in vars(owner).items():
            if inspect.isdatadescriptor(member) and not attribute.startswith("__") and attribute != "args":
                with contextlib.suppress(Exception):
                    setattr(error, attribute, getattr(cause, attribute))
    return error
