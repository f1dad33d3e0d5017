"""Wrappers of a model and a loader that a library has prepared before the model's optimizer was known."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils.data import DataLoader

import elastic_ray as er


class LateWrapped(torch.nn.Module):
    """A model that is wrapped with its optimizer once training begins; until then, and without one, it is only called.

    Attributes of the model itself are to be had here, too.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self._wrapped: list[er.AdaptiveDataParallel] = []  # not a module of this one: it holds the same parameters

    def make_wrapper(self) -> er.AdaptiveDataParallel | None:
        """Return the model with its optimizer; None while it has none."""
        raise NotImplementedError

    def wrap(self) -> None:
        """Wrap the model, if it has an optimizer and was not wrapped before."""
        if not self._wrapped:
            wrapper = self.make_wrapper()
            if wrapper is not None:
                self._wrapped.append(wrapper)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass."""
        return (self._wrapped[0] if self._wrapped else self.module)(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Only add to this rank's gradients in backward passes inside, as DDP's ``no_sync``."""
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


def plain_model(model: Any) -> Any:
    """Return the wrapped model's module, or the model itself."""
    return model.module if isinstance(model, (LateWrapped, er.AdaptiveDataParallel)) else model


class LoaderOnDevice(DataLoader[Any]):
    """Wrapper of an ``AdaptiveDataLoader`` whose batches come on the worker's device; it has the loader's attributes.

    It is a ``DataLoader`` to those who ask, as what the libraries themselves give is one; nothing of torch's is used.
    """

    def __init__(self, loader: er.AdaptiveDataLoader, device: torch.device) -> None:  # torch's own makes a source
        self.loader, self.device = loader, device

    def __iter__(self) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":  # also of an object that is not made yet
            raise AttributeError(name)
        return getattr(self.loader, name)


def share_buffers(model: torch.nn.Module) -> None:
    """Have every rank evaluate with rank 0's running averages: until a pass ends, each rank has its own."""
    if not any(isinstance(each, torch.nn.modules.batchnorm._BatchNorm) for each in model.modules()):
        return
    buffers = {name: each for name, each in model.named_buffers() if each.numel()}
    told = er.broadcast({name: each.detach() for name, each in buffers.items()})
    with torch.no_grad():
        for name, value in told.items():
            buffers[name].copy_(value)
