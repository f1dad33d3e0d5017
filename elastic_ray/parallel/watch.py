"""Sees training that ``AdaptiveDataParallel`` and ``AdaptiveDataLoader`` know nothing of (torch)."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class OptimizerWatch:
    """Optimizers that step in a group of several workers without having been wrapped.

    Each worker has its own samples, so that a model which nobody synchronises becomes another one on each of them.

    Args:
        session: the run.
    """

    def __init__(self, session: Any) -> None:
        self._session = weakref.ref(session)
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stop: Any = None
        self._told: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """One that was wrapped."""
        self._known.add(optimizer)

    def start(self) -> None:
        """Watch until :meth:`stop`, or until the session is forgotten."""
        session = self._session()
        if session is not None:
            self._stop = weakref.finalize(session, register_optimizer_step_pre_hook(self._on_step).remove)

    def stop(self) -> None:
        """Watch no more."""
        if self._stop is not None:
            self._stop()

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        session = self._session()
        if session is None or session.world_size == 1 or optimizer in self._known or optimizer in self._told:
            return
        self._told.add(optimizer)
        text = (
            f"{type(optimizer).__name__} steps parameters that AdaptiveDataParallel does not know, in a group of "
            f"{session.world_size} workers: each trains a copy of its own on its own share of the samples, and workers "
            "that join later get none. Wrap the model: model = elastic_ray.AdaptiveDataParallel(model, optimizer)"
        )
        if not self._known and not torch.distributed.is_initialized():  # it may be torch's own DDP, under torchrun
            raise RuntimeError(text)
        session.tell("warning", text)
