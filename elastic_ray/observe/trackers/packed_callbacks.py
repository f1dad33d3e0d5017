"""SHELL: a user's callbacks on their way from the driver to the job's controller."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import ray.cloudpickle


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Run for callbacks, which get it as ``run_context``, in the terms of Ray Train.

    Attributes:
        run_id: the same for the whole run.
        run_config: the user's.
        train_loop_config: the user's.
        scaling_config: the user's.
    """

    run_id: str
    run_config: Any
    train_loop_config: Mapping[str, Any] | None
    scaling_config: Any

    def get_run_config(self) -> Any:
        """The run's configuration."""
        return self.run_config


def pack_callbacks(
    callbacks: Sequence[Any], *, run_config: Any, train_loop_config: Mapping[str, Any] | None, scaling_config: Any
) -> bytes:
    """Pickle them by value, as the train function is; empty for none.

    Raises TypeError: one cannot be pickled; the message names it.
    """
    if not callbacks:
        return b""
    for callback in callbacks:
        try:
            ray.cloudpickle.dumps(callback)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise TypeError(
                f"callback {type(callback).__name__} of RunConfig(callbacks) cannot be sent to the job's controller, "
                f"where it is called: {error}; open files and connections in its methods, not in its constructor"
            ) from error
    settings = (dict(train_loop_config) if train_loop_config is not None else None, run_config, scaling_config)
    return bytes(ray.cloudpickle.dumps((tuple(callbacks), *settings)))  # type: ignore[no-untyped-call]


def unpack_callbacks(packed: bytes, run_id: str) -> tuple[tuple[Any, ...], RunContext]:
    """Return the callbacks that the job's user has submitted, and the run context that they receive.

    It runs the user's code: only for a thread that nothing waits for.

    Raises Exception: whatever that raises; a module may not be there on the controller's node.
    """
    callbacks, train_loop_config, run_config, scaling_config = pickle.loads(packed)
    context = RunContext(
        run_id=run_id, run_config=run_config, train_loop_config=train_loop_config, scaling_config=scaling_config
    )
    return callbacks, context
