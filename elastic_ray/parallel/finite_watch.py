"""Detection of NaN or infinite gradients before the optimizer applies them (torch)."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from elastic_ray.parallel.nonfinite import NonFiniteGradientsError, NonFiniteParametersError, describe_gradients
from elastic_ray.sync.device_numbers import added
from elastic_ray.sync.sliced_gradients.sliced_gradient import SlicedGradient

if TYPE_CHECKING:
    from elastic_ray.run.run import Run


class FiniteWatch:
    """Check of one model's gradients for NaN and infinity, made after reduction so that all ranks decide alike.

    AMP's scaler skips overflowed updates itself, without calling the optimizer. A fused optimizer is the exception: the
    scaler calls it, and its own kernels skip the update.
    """

    def __init__(self, context: Run, module: torch.nn.Module, model: int, nonfinite: str) -> None:
        self._context, self._module, self._model, self._nonfinite = context, module, model, nonfinite
        self.looks = nonfinite != "ignore"
        self.streak: list[int] = []  # the step of the first of the latest gradients, if these are not finite
        self._lagging = LaggingLook()

    def are_finite(
        self, params: Sequence[torch.Tensor], suspects: Sequence[int] | None, *, scaled: bool = False
    ) -> bool:
        """True if the gradients about to be applied are finite; reports the first of consecutive non-finite steps.

        Args:
            suspects: Ranks whose gradients were not finite before reduction; None if all were finite.
            scaled: True if AMP's scaler lets the optimizer itself skip non-finite updates.

        Raises NonFiniteGradientsError if a gradient is not finite, and the user has chosen to end training in that
        case.
        """
        if not self.looks:
            return True
        unit = self._context.wishes
        several = self._context.group.world_size > 1
        grads, sliced = list[torch.Tensor](), True
        for p in params:
            grad = getattr(p.grad, "_local_tensor", p.grad)
            if isinstance(grad, SlicedGradient):
                sliced = sliced and grad.finite
            elif grad is not None:
                grads.append(grad._values() if grad.is_sparse else grad)
        # Of a sharded model a rank has some rows only: those that are not finite may be another's.
        elsewhere = several and any(hasattr(p, "to_local") for p in params)
        if unit is not None:  # gradients are averaged, so that all units see the same
            finite = unit.agree(self._grads_are_finite(grads))
        else:
            finite = not elsewhere and sliced and self._grads_are_finite(grads)
        if finite:
            self.streak.clear()
            return True
        if scaled:
            return False
        text = describe_gradients(self._model, self._context.states.progress.steps, suspects or (), self._nonfinite)
        if not self.streak:
            self.streak.append(self._context.states.progress.steps)
            detail = {"step": self._context.states.progress.steps, "ranks": list(suspects or ()), "model": self._model}
            self._context.notify("not_finite", text, detail)
        if self._nonfinite == "raise":
            raise NonFiniteGradientsError(
                f"{text}. Look for a learning rate that is too high, a division by zero or a logarithm of zero in the "
                'loss, or bad samples; AdaptiveDataParallel(..., nonfinite="skip") leaves such updates out'
            )
        return False

    def _grads_are_finite(self, grads: list[torch.Tensor]) -> bool:
        """True if all gradients are finite; on a GPU, this may refer to earlier, finished steps."""
        if not grads:
            return True
        # On CPUs torch takes 17 times as long for the largest value as for the 2-norm, an eighth of a ResNet's step.
        order = math.inf if grads[0].is_cuda else 2.0
        largest = total(torch._foreach_norm(grads, order))
        if largest.is_cuda and self._nonfinite == "warn" and self._context.group.world_size == 1:
            return self._lagging.are_finite(largest)
        return math.isfinite(float(largest)) or all(bool(grad.isfinite().all()) for grad in grads)

    def check_parameters(self) -> None:
        """Check the parameters and buffers after the train function has returned.

        Raises NonFiniteParametersError if a parameter or buffer is NaN or infinite.
        """
        if not self.looks:
            return
        held: list[tuple[str, torch.Tensor]] = [
            (name, p) for name, p in self._module.named_parameters() if p.requires_grad
        ]
        held += [(name, b) for name, b in self._module.named_buffers() if b.is_floating_point()]
        bad = [name for name, tensor in held if not bool(getattr(tensor, "_local_tensor", tensor).isfinite().all())]
        if bad:
            more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            raise NonFiniteParametersError(
                f"training has ended with parameters or buffers of model {self._model} that are NaN or infinite: "
                f'{", ".join(bad[:5])}{more}. AdaptiveDataParallel(..., nonfinite="skip") leaves out updates that '
                'are not finite, "raise" ends the job at the first, "ignore" takes such a result for a success'
            )


class LaggingLook:
    """Delayed check of numbers on a GPU, which never waits for the GPU."""

    def __init__(self) -> None:
        self._going: collections.deque[tuple[torch.cuda.Event, torch.Tensor]] = collections.deque()

    def are_finite(self, number: torch.Tensor) -> bool:
        """Queue ``number`` for a check; return False if an earlier number has been computed and is not finite."""
        finite = True
        while self._going and self._going[0][0].query():  # type: ignore[no-untyped-call]
            finite = math.isfinite(self._going.popleft()[1]) and finite
        told = torch.empty((), dtype=number.dtype, pin_memory=True)
        told.copy_(number, non_blocking=True)
        come = torch.cuda.Event()  # type: ignore[no-untyped-call]
        come.record(torch.cuda.current_stream(number.device))
        self._going.append((come, told))
        return finite


def total(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum, in float32, of numbers on one or more devices."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for each in numbers:
        by_device.setdefault(each.device, []).append(each.float())
    return torch.as_tensor(added(torch.stack(mine).sum() for mine in by_device.values()))
