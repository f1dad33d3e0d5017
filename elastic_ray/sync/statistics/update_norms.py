"""Norm of the change made to the parameters in an optimizer step (torch)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_ray.sync.device_numbers import local, read


@torch.no_grad()
def with_update_norms(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[torch.nn.Parameter]],
    apply: Callable[[], Any],
    *,
    whole: bool = True,
) -> tuple[Any, tuple[float, ...]]:
    """Run an optimizer step, and measure ``||p_after - p_before||`` for each parameter group.

    For PyTorch's SGD, the norm is computed as rate x ||momentum|| or rate x ||gradient||, which is equal up to
    rounding. Any other optimizer requires a copy of the parameters.

    Args:
        optimizer: Optimizer that is about to step, with its learning rates already set.
        groups: Trainable parameters of the optimizer, by parameter group.
        whole: Whether this rank's optimizer holds the state for all of its parameters.

    Returns the result of ``apply``, and the 2-norm for each group.
    """
    steps = [_GroupStep(optimizer, *each, whole=whole) for each in zip(optimizer.param_groups, groups, strict=True)]
    result = apply()
    return result, tuple(step.norm() for step in steps)


class _GroupStep:
    """Measurement of one parameter group's part of an upcoming step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        options: dict[str, Any],
        params: Sequence[torch.nn.Parameter],
        *,
        whole: bool,
    ) -> None:
        self._optimizer, self._options, self._params = optimizer, options, params
        self._rate = abs(float(options["lr"])) if whole and _tells(optimizer, options, params) else None
        self._before = [local(p).detach().clone() for p in params] if self._rate is None else []

    def norm(self) -> float:
        """Return the norm of the group's change, after the step."""
        if self._rate is not None:
            return self._rate * _norm(self._steps())
        if self._before:
            torch._foreach_sub_(self._before, [local(p) for p in self._params])
        return _norm(self._before)

    def _steps(self) -> list[torch.Tensor]:
        """Return the tensors multiplied by the learning rate in SGD."""
        stepped = [p for p in self._params if p.grad is not None]
        if self._options["momentum"]:
            return [local(self._optimizer.state[p]["momentum_buffer"]) for p in stepped]
        return [local(p.grad) for p in stepped]


def _tells(optimizer: torch.optim.Optimizer, options: dict[str, Any], params: Sequence[torch.nn.Parameter]) -> bool:
    """True if the change in this group's parameters can be computed from the optimizer's state after the step."""
    if type(optimizer) is not torch.optim.SGD or options.get("fused") or options["nesterov"]:
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False  # they may change gradients or parameters
    if any(p.grad is not None and p.grad.is_sparse for p in params):
        return False
    return bool(options["momentum"]) or not options["weight_decay"]


def _norm(tensors: list[torch.Tensor]) -> float:
    """Return the combined 2-norm of all tensors."""
    return math.hypot(*read(torch._foreach_norm(tensors))) if tensors else 0.0
