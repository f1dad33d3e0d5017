"""Parameters of a model that its unit has divided (DTensors), as this worker's part of them (torch).

Gradients of the same position are averaged over units, so that nothing but the local part matters here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic_ray.batch.device_numbers import local


class LocalParameter:
    """Stands for a parameter where buckets take gradients and put them back.

    Args:
        param: a DTensor.
    """

    def __init__(self, param: Any) -> None:
        self._param = param

    def __getattr__(self, name: str) -> Any:
        return getattr(self._param, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Functions of torch take the local part."""
        return function(*(each.part if isinstance(each, cls) else each for each in args), **(kwargs or {}))

    @property
    def whole(self) -> Any:
        """The parameter."""
        return self._param

    @property
    def part(self) -> torch.Tensor:
        """Part of the tensor that this worker holds."""
        found: torch.Tensor = local(self._param)
        return found

    @property
    def shape(self) -> torch.Size:
        """Shape of the local part."""
        return self.part.shape

    def numel(self) -> int:
        """Elements of the local part."""
        return self.part.numel()

    def is_contiguous(self) -> bool:
        """True if the local part is."""
        return self.part.is_contiguous()

    @property
    def grad(self) -> torch.Tensor | None:
        """The local part of the gradient, which lies in the unit as its parameter does from here on."""
        grad: Any = self._param.grad
        if grad is None:
            return None
        if grad.placements != self._param.placements:  # partial sums, of what follows a parallel sequence
            self._param.grad = grad = grad.redistribute(placements=self._param.placements)
        found: torch.Tensor = local(grad)
        return found

    @grad.setter
    def grad(self, part: torch.Tensor | None) -> None:
        from torch.distributed.tensor import DTensor

        held = None if part is None else DTensor(part, self._param._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        self._param.grad = held


def local_groups(groups: Sequence[Sequence[torch.Tensor]]) -> list[list[Any]]:
    """Parameters by group, with stand-ins for those that the unit has divided."""
    return [[LocalParameter(p) if hasattr(p, "_local_tensor") else p for p in group] for group in groups]


def as_divided(values: dict[str, Any], param: Any) -> dict[str, Any]:
    """Return an optimizer's state of a parameter as local parts, divided as the parameter is."""
    part = getattr(param, "_local_tensor", None)
    if part is None:
        return values
    from torch.distributed.tensor import DTensor

    def divided(value: Any) -> Any:
        whole = isinstance(value, DTensor) or not isinstance(value, torch.Tensor)
        if whole or not value.dim() or value.shape != part.shape:  # a count of steps has no dimension
            return value
        return DTensor(value.to(part.device), param._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    return {key: divided(value) for key, value in values.items()}
