"""Models and loaders that ``Accelerator.prepare`` returns, and a fix for optimizers prepared before wrapping."""

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
    """Make accelerate's prepared optimizer call the methods of the wrapper later put around its model.

    ``zero_grad`` clears gradients in each micro-batch, as the wrapper expects: accelerate's does so in the last one
    only, and a loop that clears them first would add those of the last update to the next step's.

    With a gradient scaler, accelerate stores ``optimizer.step`` when it prepares the optimizer and restores it at each
    step, so the stored method is replaced here.
    """
    theirs.zero_grad = theirs.optimizer.zero_grad
    if getattr(theirs, "scaler", None) is not None:
        theirs._optimizer_original_step_method = theirs.optimizer.step
        theirs._optimizer_patched_step_method = patch_optimizer_step(theirs, theirs.optimizer.step)


class AccelerateModel(LateWrapped):
    """Model prepared by the ``Accelerator``, which is wrapped when the first epoch starts.

    Scripts prepare models, optimizers and schedulers in one call or in several, in any order. Only at the first epoch
    is it certain which of them belong together.
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
        """Run the model's forward pass; the first training pass wraps the model, for scripts without an epoch loop."""
        if self.training and torch.is_grad_enabled():
            self.wrap()
        return super().forward(*args, **kwargs)


class AccelerateLoader(LoaderOnDevice):
    """Loader prepared by the ``Accelerator``, which sets accelerate's gradient state for each micro-batch."""

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
                self._start_micro_step()
                yield send_to_device(batch, self.device, non_blocking=self._non_blocking)
        finally:
            self.gradient_state._remove_dataloader(self)
            self.end_of_dataloader = False

    def _start_micro_step(self) -> None:
        """Set accelerate's gradient state for the micro-batch about to be yielded."""
        session = current_session()
        step = session.ledger.step
        self.end_of_dataloader = self.loader.on_last_batch
        self.gradient_state._set_sync_gradients(not session.ledger.accumulating)
        if step is not None and step.micro > 0:
            for each in self._optimizers:
                each.optimizer.zero_grad()
