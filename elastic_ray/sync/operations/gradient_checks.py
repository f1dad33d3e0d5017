"""Errors for gradients that cannot be reduced, each with advice on how to fix it (torch)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from elastic_ray.sync.device_numbers import as_real

OUTSIDE_OF_LOADERS = (
    "the model is trained outside of a loop over an AdaptiveDataLoader, in a group of several workers: a plain "
    "DataLoader gives all of them the same samples, such steps are not drawn again after a failure, and the "
    "group cannot change between them. Iterate an AdaptiveDataLoader instead"
)
"""Said once of gradients that several workers reduce outside of a loader's steps."""

STEP_AFTER_BACKWARD = (
    "within backward() gradients are one worker's own; they are averaged over the workers when it returns. Step one "
    "optimizer of all parameters after backward(), and zero gradients after that"
)

_NOT_REDUCED = (
    "optimizer.step() was called in a step in which no backward() pass has averaged gradients over the workers, but "
    "parameters have gradients: torch.autograd.grad, and code that writes to .grad, give each worker its own, and "
    "the workers' parts of the model would not fit together. Call backward() on a loss of the wrapped model's output, "
    "outside of no_sync(), in each step in which the optimizer steps; or clear gradients that are left over, by "
    "optimizer.zero_grad()"
)


def refuse_own(grads: Iterable[torch.Tensor | None]) -> None:
    """Raise RuntimeError if any of these gradients is non-zero, because they were not averaged over the workers."""
    if any(grad is not None and (grad.layout != torch.strided or bool(grad.any())) for grad in grads):
        raise RuntimeError(_NOT_REDUCED)


def is_finite(tensor: torch.Tensor) -> bool:
    """True if all elements are finite; this first runs a quick test on their sum, which may overflow."""
    return math.isfinite(float(as_real(tensor).sum())) or bool(tensor.isfinite().all())


class Finiteness:
    """Deferred check that all tensors in a backward pass are finite, waiting for a GPU only once at the end.

    Args:
        is_waited_for: Returns True for tensors to check immediately. For a tensor on a GPU, this waits for all work
            queued on that GPU; by default, only CPU tensors are checked immediately.
    """

    def __init__(
        self, is_waited_for: Callable[[torch.Tensor], bool] = lambda tensor: tensor.device.type == "cpu"
    ) -> None:
        self._is_waited_for = is_waited_for
        self._so_far = True
        self._open: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Add a tensor to the check; the tensor may be changed afterwards."""
        if not self._is_waited_for(tensor):
            self._open.append(tensor.isfinite().all())
        elif self._so_far:
            self._so_far = is_finite(tensor)

    def found(self) -> bool:
        """Return True if all tensors added so far were finite."""
        found, self._open = self._open, []
        if found:
            self._so_far = bool(torch.stack(found).all()) and self._so_far
        return self._so_far


def check_gradients(
    params: Sequence[torch.nn.Parameter], grads: Sequence[torch.Tensor | None], *, complete: bool
) -> None:
    """Raise an error that explains a user mistake that prevents gradients from being put into a bucket.

    Raises RuntimeError if a gradient is sparse or was removed by a hook.
    """
    for param, grad in zip(params, grads, strict=True):
        if grad is None and complete:
            raise RuntimeError(
                f"backward() has given a parameter of shape {tuple(param.shape)} a gradient, but a hook has "
                f"removed it: {STEP_AFTER_BACKWARD}"
            )
        if grad is not None and grad.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(param.shape)} is sparse, but no layer that is set to "
                "sparse=True has told so: give the parameter a rule of elastic_ray.sync.spec.Rows in the strategy, or "
                "use functions with sparse=False"
            )
