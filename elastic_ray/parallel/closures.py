"""``optimizer.step(closure)``: closures that are called once, as frameworks' loops give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_SEVERAL = (
    "optimizer.step(closure) may evaluate the model once a step, but this optimizer calls the closure several times, "
    "which AdaptiveDataParallel cannot replicate: each evaluation would be a step of its own on all workers. Use an "
    "optimizer that needs one gradient a step"
)


def refuse_several_evaluations(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer whose step evaluates the model several times (L-BFGS)."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(_SEVERAL)


def evaluated(closure: Callable[[], Any], arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What a closure returns, called once before the update, and the arguments for the optimizer's own step.

    The gradients are then those of the whole group when it is decided whether they are applied, and at what rate.

    Raises:
        ValueError: the optimizer calls it several times; from its step, where it does so.
    """
    with torch.enable_grad():
        value = closure()
    return value, {**arguments, "closure": _Once(value)}


class _Once:
    """Stands for a closure that has been called: gives its value to the first who asks."""

    def __init__(self, value: Any) -> None:
        self._value, self._asked = value, False

    def __call__(self) -> Any:
        if self._asked:
            raise ValueError(_SEVERAL)
        self._asked = True
        return self._value
