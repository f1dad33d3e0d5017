"""Results of ``Accelerator.prepare`` for a model and for a loader, and earlier results for an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from accelerate.utils import send_to_device

import elastic_ray as er
from elastic_ray.integrations.late_wrapping import LateWrapped, LoaderOnDevice
from elastic_ray.loop.api import current_session


def step_through_ours(theirs: Any) -> None:
    """Have a prepared optimizer step through the wrapper that its model was given since.

    Beside a gradient scaler, accelerate keeps ``optimizer.step`` as it was when the optimizer was prepared, and puts it
    back with each step.

    Args:
        theirs: accelerate's optimizer, or a plain one, which keeps nothing.
    """
    if getattr(theirs, "scaler", None) is not None:
        theirs._optimizer_original_step_method = theirs.optimizer.step
        theirs._optimizer_patched_step_method = patch_optimizer_step(theirs, theirs.optimizer.step)


class AccelerateModel(LateWrapped):
    """A prepared model.

    Scripts prepare models, optimizers and schedulers in one call or in several, in any order: what belongs together is
    known for sure when the first epoch begins.

    Args:
        module: the model, as accelerate has prepared it.
        make_wrapper: gives the wrapper; None while no optimizer of the model was prepared.
    """

    def __init__(
        self, module: torch.nn.Module, make_wrapper: Callable[[torch.nn.Module], er.AdaptiveDataParallel | None]
    ) -> None:
        super().__init__(module)
        self._is_accelerate_prepared = True
        self._make_wrapper = make_wrapper

    def make_wrapper(self) -> er.AdaptiveDataParallel | None:
        return self._make_wrapper(self.module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; one that trains wraps the model, for scripts that count no epochs."""
        if self.training and torch.is_grad_enabled():
            self.wrap()
        return super().forward(*args, **kwargs)


class AccelerateLoader(LoaderOnDevice):
    """A prepared loader.

    Args:
        accelerator: whose device and gradient state are used; it is not kept.
    """

    _is_accelerate_prepared = True
    remainder = -1  # accelerate's word for: no sample is there twice

    def __init__(
        self, loader: er.AdaptiveDataLoader, accelerator: accelerate.Accelerator, optimizers: list[AcceleratedOptimizer]
    ) -> None:
        super().__init__(loader, accelerator.device)
        self.end_of_dataloader = False
        self.gradient_state = accelerator.gradient_state
        self._optimizers = optimizers
        self._non_blocking = bool(accelerator.non_blocking)

    def __iter__(self) -> Any:
        self.gradient_state._add_dataloader(self)
        try:
            for batch in self.loader:
                self._begin_micro_step()
                yield send_to_device(batch, self.device, non_blocking=self._non_blocking)
        finally:
            self.gradient_state._remove_dataloader(self)
            self.end_of_dataloader = False

    def _begin_micro_step(self) -> None:
        """Set accelerate's state for the micro-batch that is handed out."""
        session = current_session()
        step = session.passes.step
        self.end_of_dataloader = self.loader.on_last_batch
        self.gradient_state._set_sync_gradients(not session.ledger.accumulating)
        if step is not None and step.micro > 0:
            for each in self._optimizers:
                each.optimizer.zero_grad()
