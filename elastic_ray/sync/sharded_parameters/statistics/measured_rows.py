"""Gradients of the rows that a rank owns, as statistics see them (torch)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elastic_ray.batch.real_numbers import as_real
from elastic_ray.batch.statistics import squared_norm


class _Rows:
    """Rows of one parameter.

    Args:
        place: of the parameter in the model.
        group: of the parameter in the optimizer.

    Attributes:
        index, group: the same.
        sliced: other ranks have the other rows.
    """

    sliced = True

    def __init__(self, place: int, group: int) -> None:
        self.index, self.group = place, group

    def preconditioner(self, source: Any) -> Tensor | None:
        """What the optimizer multiplies their gradients with, [elements]; ``source`` is ``RowDenominators``."""
        found: Tensor | None = source.state.get(self.index)
        return found


class MeanRows(_Rows):
    """The step's mean gradient.

    Args:
        place, group: see above.
        grad: of the rows.
    """

    def __init__(self, place: int, group: int, grad: Tensor) -> None:
        super().__init__(place, group)
        self._grad = as_real(grad.detach()).reshape(-1)

    @property
    def is_used(self) -> bool:
        """True if some of it is not zero."""
        return bool(self._grad.any())

    def squared_norm(self, preconditioner: Tensor | None) -> Tensor:
        """Of the rows, a scalar tensor."""
        return squared_norm(self._grad, preconditioner)


class ScatteredRows(_Rows):
    """All ranks' gradients, before they are added up.

    Args:
        place, group: see above.
        parts: [ranks, elements], each rank's gradient times its share in the mean.
        shares: these, [ranks, 1], in single precision at least.
        before: what an earlier backward pass of the step has left in ``.grad``, [elements]; None for nothing.
    """

    def __init__(self, place: int, group: int, parts: Tensor, shares: Tensor, before: Tensor | None) -> None:
        super().__init__(place, group)
        self._parts, self._roots = as_real(parts).flatten(1), shares.sqrt()
        self._before = None if before is None else as_real(before).reshape(-1)

    def squared_norm(self, preconditioner: Tensor | None) -> Tensor:
        """Sum over the ranks of ``share * ||gradient||^2``, a scalar tensor; ranks without a share do not count."""
        gradients = self._parts * self._roots.reciprocal().nan_to_num(posinf=0.0)
        if self._before is not None:
            gradients += self._before * self._roots
        if preconditioner is not None:
            gradients *= preconditioner
        flat = gradients.view(-1)
        return torch.dot(flat, flat)
