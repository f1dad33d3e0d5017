"""Gradients of a step's micro-batches, added up on the rows that a rank owns (torch).

User code zeroes gradients in each micro-step as it always does: a micro-step contributes what ``.grad`` holds after its
last backward pass, and in the last one ``.grad`` holds the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from elastic_ray.steps.step import LoaderStep


class MicroSteps:
    """See the module's text.

    Args:
        gradients: gives those of this rank's rows, None for parameters without any.
    """

    def __init__(self, gradients: Callable[[], Sequence[Tensor | None]]) -> None:
        self._gradients = gradients
        self._micro = 0
        self._before: list[Tensor | None] | None = None  # the sum of the micro-steps before
        self._so_far: list[Tensor | None] | None = None  # the same with the present one
        self._added = False  # that sum is in .grad

    def forget(self) -> None:
        """Another step begins, or the one in progress is lost."""
        self._micro, self._before, self._so_far, self._added = 0, None, None, False

    def begin_pass(self, step: LoaderStep) -> None:
        """A backward pass of a step begins."""
        if step.micro != self._micro:
            self._micro, self._before, self._added = step.micro, self._so_far, False
        elif self._added and not any(bool(grad.any()) for grad in self._gradients() if grad is not None):
            self._added = False  # user code has cleared them between two losses of one step

    @torch.no_grad()
    def end_pass(self, step: LoaderStep) -> None:
        """It has ended."""
        if step.micro_steps == 1:
            return
        own = self._gradients()
        before = self._before or [None] * len(own)
        if not step.is_last_micro:
            self._so_far = [_sum(each, other) for each, other in zip(own, before, strict=True)]
        elif not self._added:
            self._added = True
            for each, other in zip(own, before, strict=True):
                if each is not None and other is not None:
                    each.add_(other)

    def has(self, place: int) -> bool:
        """True if an earlier micro-step has left a gradient for the parameter at ``place``."""
        return self._before is not None and self._before[place] is not None

    def leave_out(self, place: int) -> None:
        """Forget the zeros that the latest pass has left for a parameter that no rank has a gradient of."""
        if self._so_far is not None:
            self._so_far[place] = None


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Of two gradients, each None for zero; in memory of its own."""
    if one is None:
        return None if other is None else other.clone()
    return one.clone() if other is None else one + other
