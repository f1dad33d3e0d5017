"""What ``Accelerator.prepare`` gives for a model and for a loader."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import send_to_device

import elastic_ray as er
from elastic_ray.loop.api import current_session


class PreparedModel(torch.nn.Module):
    """A model that is wrapped with its optimizer once training begins; until then, and without one, it is only called.

    Scripts prepare models, optimizers and schedulers in one call or in several, in any order: what belongs together is
    known for sure when the first epoch begins. Attributes of the model itself are to be had here, too, as those of a
    prepared model are in one process.

    Args:
        module: the model, as accelerate has prepared it.
        wrap: gives the wrapper; None while no optimizer of the model was prepared.
    """

    def __init__(self, module: torch.nn.Module, wrap: Callable[[torch.nn.Module], er.AdaptiveDataParallel | None]):
        super().__init__()
        self.module = module
        self._is_accelerate_prepared = True
        # Not modules of this one: they hold the same parameters.
        self._wrapped: list[er.AdaptiveDataParallel] = []
        self._wrap_it = wrap

    def wrap(self) -> None:
        """Wrap the model, if it has an optimizer and was not wrapped before."""
        if not self._wrapped:
            wrapper = self._wrap_it(self.module)
            if wrapper is not None:
                self._wrapped.append(wrapper)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if self.training and torch.is_grad_enabled():
            self.wrap()
        return (self._wrapped[0] if self._wrapped else self.module)(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside only add to this rank's gradients, as DDP's ``no_sync``."""
        return self._wrapped[0].no_sync() if self._wrapped else contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "module" not in self.__dict__.get("_modules", {}):
                raise
        wrapped = self.__dict__["_wrapped"]
        if wrapped and hasattr(type(wrapped[0]), name):
            return getattr(wrapped[0], name)
        return getattr(self.module, name)


class PreparedLoader:
    """An ``AdaptiveDataLoader`` whose batches come on the worker's device.

    Args:
        loader: gives the batches; whatever it has is to be had here.
        accelerator: whose device and gradient state are used; it is not kept.
        optimizers: the prepared ones.
    """

    _is_accelerate_prepared = True
    remainder = -1  # accelerate's word for: no sample is there twice

    def __init__(
        self,
        loader: er.AdaptiveDataLoader,
        accelerator: accelerate.Accelerator,
        optimizers: list[AcceleratedOptimizer],
    ) -> None:
        self.loader = loader
        self.end_of_dataloader = False
        self.device, self.gradient_state = accelerator.device, accelerator.gradient_state
        self._optimizers = optimizers

    def __iter__(self) -> Iterator[Any]:
        self.gradient_state._add_dataloader(self)
        try:
            for batch in self.loader:
                self._begin_micro_step()
                yield send_to_device(batch, self.device)
        finally:
            self.gradient_state._remove_dataloader(self)
            self.end_of_dataloader = False

    def _begin_micro_step(self) -> None:
        """A micro-batch is handed out; the gradients of those before it in the same step are kept already."""
        session = current_session()
        step = session.passes.step
        self.end_of_dataloader = self.loader.on_last_batch
        self.gradient_state._set_sync_gradients(not session.ledger.accumulating)
        if step is not None and step.micro > 0:
            for each in self._optimizers:
                each.optimizer.zero_grad()

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.loader, name)
