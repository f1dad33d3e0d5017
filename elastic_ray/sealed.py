"""User objects sent from a worker to the driver as bytes, without being unpickled in between.

The job's controller forwards them. Unpickling them in the controller would run the user's code, which may hang, raise,
or need modules that only workers have; Ray would then restart the controller with the same message.
"""

from __future__ import annotations

import dataclasses
import pickle
import traceback
from typing import Any

_LONGEST_TEXT = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """Pickled return value of a train function, which only the user's own processes unpickle."""

    pickled: bytes = dataclasses.field(repr=False)

    def open(self) -> Any:
        """Unpickle and return the object, raising any unpickling error; only for the user's own processes."""
        return pickle.loads(self.pickled)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """Pickled exception of a train function, which only the user's own processes unpickle."""

    traceback_text: str  # its traceback, as text; of a very long one the beginning and the end
    rank: int  # rank of the worker
    node: str
    # the exception itself; None where it cannot make the round trip
    pickled: bytes | None = dataclasses.field(default=None, repr=False)

    def __str__(self) -> str:
        return f"the train function raised on rank {self.rank} (node {self.node}):"


def seal(value: Any) -> Sealed:
    """Return an object in pickled form. Raises TypeError if the object cannot be pickled."""
    try:
        return Sealed(pickled=_dumps(value))
    except Exception as error:
        raise TypeError(
            f"a train function must return what can be pickled, but this one returned a {type(value).__name__}: {error}"
        ) from error


def seal_error(error: BaseException, *, rank: int, node: str) -> Raised:
    """Return an exception in pickled form, with its formatted traceback."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if len(text) > _LONGEST_TEXT:
        text = f"{text[: _LONGEST_TEXT // 2]}\n...\n{text[-_LONGEST_TEXT // 2 :]}"
    return Raised(traceback_text=text, rank=rank, node=node, pickled=pickled_error(error))


def pickled_error(error: BaseException) -> bytes | None:
    """Return the pickled exception, or None if it cannot be pickled and unpickled (for example, if it holds a lock)."""
    try:
        pickled = _dumps(error)
        pickle.loads(pickled)
    except Exception:
        return None
    return pickled


def _dumps(value: Any) -> bytes:
    from ray import cloudpickle  # who only passes things on need not load Ray

    return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]
