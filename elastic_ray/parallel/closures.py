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


_TWO_PASSES = (
    "{name} takes two gradients a step, the second at parameters that it has moved for it, which AdaptiveDataParallel "
    "cannot replicate: a step that a lost worker voids would leave the moved ones behind. Use its inner optimizer "
    "alone, torch.optim.SGD or AdamW; an average of the weights (torch.optim.swa_utils.AveragedModel) also finds flat "
    "minima, see docs/recipes.md"
)


def refuse_several_evaluations(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer whose step evaluates the model several times (L-BFGS, SAM)."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(_SEVERAL)
    if callable(getattr(optimizer, "first_step", None)) and callable(getattr(optimizer, "second_step", None)):
        raise ValueError(_TWO_PASSES.format(name=type(optimizer).__name__))


def evaluated(
    optimizer: torch.optim.Optimizer, closure: Callable[[], Any], arguments: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """What a closure returns, called once before the update, and the arguments for the optimizer's own step.

    The gradients are then those of the whole group when it is decided whether they are applied, and at what rate.

    Raises:
        ValueError: the optimizer calls it several times, or after it has moved parameters; from its step.
    """
    with torch.enable_grad():
        value = closure()
    return value, {**arguments, "closure": _Once(optimizer, value)}


class _Once:
    """Stands for a closure that has been called: gives its value to the first who asks."""

    def __init__(self, optimizer: torch.optim.Optimizer, value: Any) -> None:
        self._value, self._asked = value, False
        self._name = type(optimizer).__name__
        params = (p for group in optimizer.param_groups for p in group["params"])
        self._param = next((p for p in params if p.grad is not None), None)
        self._version = self._param._version if self._param is not None else 0

    def __call__(self) -> Any:
        if self._asked:
            raise ValueError(_SEVERAL)
        if self._param is not None and (self._param.grad is None or self._param._version != self._version):
            raise ValueError(_TWO_PASSES.format(name=self._name))
        self._asked = True
        return self._value
