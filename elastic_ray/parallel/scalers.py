"""AMP's ``GradScaler`` that was not handed over: found by who has called ``optimizer.step`` (torch)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from elastic_ray.run.run import Run

_NEAR = 16  # frames
_SCALER_FILE = torch.amp.GradScaler.step.__code__.co_filename

_NOT_GIVEN = (
    "a GradScaler steps the optimizer of a model that was wrapped without it: its scale reaches no worker that joins, "
    "whose gradients would be added up with another one, nor the job's checkpoints, and gradient statistics are too "
    "large by it. Pass it as AdaptiveDataParallel(model, optimizer, grad_scaler=scaler)"
)


def check_scaler(run: Run) -> None:
    """Look whether an enabled scaler that no state of the run holds has called the optimizer's step.

    Raises:
        RuntimeError: one has, in a group that may change; elsewhere the job's user is told.
    """
    frame = sys._getframe(1)
    for _ in range(_NEAR):
        # Of no other frame: reading its locals keeps them alive, and an iterator of the user's must end in time.
        scaler = frame.f_locals.get("self") if frame.f_code.co_filename == _SCALER_FILE else None
        if isinstance(scaler, torch.amp.GradScaler):
            if not scaler.is_enabled() or run.states.holds(scaler):
                return  # user code has registered it, or passed it with another model
            if run.elastic:
                raise RuntimeError(_NOT_GIVEN)
            run.tell("warning", _NOT_GIVEN)
            return
        if frame.f_back is None:
            return
        frame = frame.f_back
