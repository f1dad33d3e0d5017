"""Gradients that cannot be reduced, said with the way out (torch)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

STEP_AFTER_BACKWARD = (
    "within backward() gradients are one worker's own; they are averaged over the workers when it returns. Step one "
    "optimizer of all parameters after backward(), and zero gradients after that"
)


def check_gradients(
    params: Sequence[torch.nn.Parameter], grads: Sequence[torch.Tensor | None], *, complete: bool
) -> None:
    """After gradients could not be put into a bucket: raise with the reason, where it is the user's.

    Args:
        params: the bucket's parameters.
        grads: their gradients.
        complete: whether backward has reached all of them.

    Raises:
        RuntimeError: a gradient is sparse, or a hook has taken it away.
    """
    for param, grad in zip(params, grads, strict=True):
        if grad is None and complete:
            raise RuntimeError(
                f"backward() has given a parameter of shape {tuple(param.shape)} a gradient, but a hook has taken it "
                f"away again: {STEP_AFTER_BACKWARD}"
            )
        if grad is not None and grad.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(param.shape)} is sparse, but no layer that is set to "
                "sparse=True has told so: give the parameter a rule of elastic_ray.sync.Rows in the strategy, or use "
                "functions with sparse=False"
            )
