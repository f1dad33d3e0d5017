"""State of a Trainer's run, for joining workers, checkpoints and repeated steps."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from transformers.trainer_callback import ExportableState

# Of this process only, or written anew at every use.
_OWN = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks", "log_history")


class TrainerProgress:
    """Trainer state that is identical on all ranks, with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's state as plain values, for joining workers and checkpoints."""
        trainer = self._trainer
        return {**scalars(trainer), "log_history": copy.deepcopy(trainer.state.log_history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a trainer's state received from another rank or a checkpoint."""
        set_scalars(self._trainer, state)
        theirs = self._trainer.state
        theirs.log_history = list(state["log_history"])


class StepProgress:
    """Trainer state of one rank that is rolled back when a step is repeated."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def remember(self) -> dict[str, Any]:
        """Return the trainer's current state on this rank, for :meth:`roll_back`."""
        trainer = self._trainer
        return {
            **scalars(trainer),
            "logs": len(trainer.state.log_history),
            "tr_loss": float(trainer._tr_loss),
            "tr_weight": trainer.tr_weight,
            "flos": trainer.current_flos,
        }

    def roll_back(self, remembered: dict[str, Any]) -> None:
        """Restore the trainer's state that :meth:`remember` returned before the repeated step."""
        set_scalars(self._trainer, remembered)
        del self._trainer.state.log_history[remembered["logs"] :]
        theirs = self._trainer
        theirs._tr_loss.fill_(remembered["tr_loss"])
        theirs.tr_weight = remembered["tr_weight"]
        theirs.current_flos = remembered["flos"]


def scalars(trainer: Any) -> dict[str, Any]:
    """Return a trainer's counters, flags and callback states."""
    state = {each.name: getattr(trainer.state, each.name) for each in dataclasses.fields(trainer.state)}
    return {
        "state": {name: value for name, value in state.items() if name not in _OWN},
        "control": trainer.control.state()["args"],
        "callbacks": {key: _state_of(each) for key, each in _callbacks(trainer)},
        "total_loss": trainer._total_loss_scalar,
        "last_logged": trainer._globalstep_last_logged,
        "initial_steps": trainer.initial_steps,
    }


def set_scalars(trainer: Any, values: dict[str, Any]) -> None:
    """Set a trainer's counters, flags and callback states to values returned by :func:`scalars`."""
    vars(trainer.state).update(values["state"])
    vars(trainer.control).update(values["control"])
    for key, each in _callbacks(trainer):
        _set_state(each, values["callbacks"].get(key, {}))
    theirs = trainer
    theirs._total_loss_scalar = values["total_loss"]
    theirs._globalstep_last_logged = values["last_logged"]
    theirs.initial_steps = values["initial_steps"]


def _state_of(callback: Any) -> dict[str, Any]:
    """Return a callback's exported state: everything if its class defines ``from_state``, otherwise its attributes."""
    state = callback.state()
    return copy.deepcopy(dict(state) if _makes_its_own(callback) else dict(state.get("attributes", {})))


def _set_state(callback: Any, state: dict[str, Any]) -> None:
    """Restore a callback's state returned by :func:`_state_of`."""
    if state and _makes_its_own(callback):
        state = vars(type(callback).from_state(copy.deepcopy(state)))
    vars(callback).update(state)


def _makes_its_own(callback: Any) -> bool:
    """True if the callback's class overrides ``from_state``, so its exported state may have custom keys."""
    return getattr(type(callback).from_state, "__func__", None) is not ExportableState.from_state.__func__


def _callbacks(trainer: Any) -> Iterator[tuple[str, Any]]:
    for number, each in enumerate(trainer.callback_handler.callbacks):
        if isinstance(each, ExportableState):
            yield f"{number}:{type(each).__name__}", each
