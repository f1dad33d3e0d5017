"""A user's objects on their way from a worker to the user's driver: bytes, which no process between opens.

The job's controller passes them on. To unpickle them would run the user's code there, which may hang, raise, or want
modules that only workers have; and Ray would start the controller again with the same message before it.
"""

from __future__ import annotations

import dataclasses
import pickle
import traceback
from typing import Any

_LONGEST_TEXT = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """Return value of a train function, pickled."""

    pickled: bytes = dataclasses.field(repr=False)

    def open(self) -> Any:
        """The object. Only for the user's own processes; raises whatever unpickling it raises."""
        return pickle.loads(self.pickled)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """Exception of a train function, pickled.

    Attributes:
        traceback_text: its traceback, as text; of a very long one the beginning and the end.
        rank: rank of the worker.
        pickled: the exception itself; None where it cannot make the round trip.
    """

    traceback_text: str
    rank: int
    node: str
    pickled: bytes | None = dataclasses.field(default=None, repr=False)

    def __str__(self) -> str:
        return f"the train function raised on rank {self.rank} (node {self.node}):"


def seal(value: Any) -> Sealed:
    """Close an object. Raises TypeError: it cannot be pickled."""
    try:
        return Sealed(pickled=_dumps(value))
    except Exception as error:
        raise TypeError(
            f"a train function must return what can be pickled, but this one returned a {type(value).__name__}: {error}"
        ) from error


def seal_error(error: BaseException, *, rank: int, node: str) -> Raised:
    """Close an exception, while its traceback is there."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if len(text) > _LONGEST_TEXT:
        text = f"{text[: _LONGEST_TEXT // 2]}\n...\n{text[-_LONGEST_TEXT // 2 :]}"
    return Raised(traceback_text=text, rank=rank, node=node, pickled=pickled_error(error))


def pickled_error(error: BaseException) -> bytes | None:
    """The exception pickled, or None if it cannot make the round trip (a lock inside...)."""
    try:
        pickled = _dumps(error)
        pickle.loads(pickled)
    except Exception:
        return None
    return pickled


def _dumps(value: Any) -> bytes:
    from ray import cloudpickle  # who only passes things on need not load Ray

    return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]
