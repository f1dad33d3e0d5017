"""Wrappers for a model and a loader that a library prepares before the model's optimizer is known."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils.data import DataLoader

import elastic_ray as er
from elastic_ray.data.arguments import refuse_change


class LateWrapped(torch.nn.Module):
    """Model that is wrapped with its optimizer when training starts; until then, calls go to the plain model.

    Attributes of the plain model can also be read from this object.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self._wrapped: list[er.AdaptiveDataParallel] = []  # not a module of this one: it holds the same parameters

    def make_wrapper(self) -> er.AdaptiveDataParallel | None:
        """Return the model wrapped with its optimizer; None while no optimizer is known."""
        raise NotImplementedError

    def wrap(self) -> None:
        """Wrap the model if it has an optimizer and has not been wrapped yet."""
        if not self._wrapped:
            wrapper = self.make_wrapper()
            if wrapper is not None:
                self._wrapped.append(wrapper)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the wrapped model, or of the plain model before it is wrapped."""
        return (self._wrapped[0] if self._wrapped else self.module)(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context where backward passes only accumulate local gradients, as with DDP's ``no_sync``."""
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
    """Return the module inside a wrapped model, or the model itself if it is not wrapped."""
    return model.module if isinstance(model, (LateWrapped, er.AdaptiveDataParallel)) else model


class LoaderOnDevice(DataLoader[Any]):
    """Wrapper of an ``AdaptiveDataLoader`` that moves batches to the worker's device and exposes its attributes.

    It subclasses ``DataLoader`` only to pass ``isinstance`` checks in the libraries; no code of torch's class runs.
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

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_change(name)
        super().__setattr__(name, value)


def share_buffers(model: torch.nn.Module) -> None:
    """Copy rank 0's buffers to all ranks before an evaluation; do nothing for a model without BatchNorm."""
    if not any(isinstance(each, torch.nn.modules.batchnorm._BatchNorm) for each in model.modules()):
        return
    buffers = {name: each for name, each in model.named_buffers() if each.numel()}
    told = er.broadcast({name: each.detach() for name, each in buffers.items()})
    with torch.no_grad():
        for name, value in told.items():
            buffers[name].copy_(value)
