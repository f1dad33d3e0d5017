"""Sees training that ``AdaptiveDataParallel`` and ``AdaptiveDataLoader`` know nothing of (torch)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic_ray.session.current import session_of_thread

_installed = False


def watch_optimizers() -> None:
    """Look at every step of any optimizer in this process, as the session of its thread wants it.

    The hook stays: torch walks through its hooks in a step, and does not bear that one is taken out meanwhile.
    """
    global _installed
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_on_step)


def _on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    session = session_of_thread()
    if session is not None:
        session.optimizers.look_at(optimizer)


class WatchedGroup(Protocol):
    """The group that optimizers step in."""

    @property
    def world_size(self) -> int:
        """Its workers."""


class OptimizerWatch:
    """Optimizers that step in a group of several workers without having been wrapped.

    Each worker has its own samples, so that a model that is not synchronised becomes another one on each of them.

    Args:
        group: the present one.
        tell: tells the job's user something.
    """

    def __init__(self, group: WatchedGroup, tell: Callable[[str, str], None]) -> None:
        self._group = group
        self._tell = tell
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._warned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """One that was wrapped."""
        self._known.add(optimizer)

    def look_at(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step.

        Raises:
            RuntimeError: no model was wrapped at all.
        """
        world_size = self._group.world_size
        if world_size == 1 or optimizer in self._known or optimizer in self._warned:
            return
        self._warned.add(optimizer)
        wrapped = list(self._known)
        if any(optimizer in vars(each).values() for each in wrapped):
            return  # as SAM's, whose state the run knows of
        known = {id(p) for each in wrapped for group in each.param_groups for p in group["params"]}
        if all(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            self._tell(
                "warning",
                f"{type(optimizer).__name__} steps parameters of a wrapped model, which is wrapped with another "
                "optimizer: workers that join later get nothing of its state (momentum). Before the model is wrapped, "
                "keep it as an attribute of that optimizer, or elastic_ray.register_state() it",
            )
            return
        text = (
            f"{type(optimizer).__name__} steps parameters that AdaptiveDataParallel does not know, in a group of "
            f"{world_size} workers: each trains a copy of its own on its own share of the samples, and workers "
            "that join later get none. Wrap the model: model = elastic_ray.AdaptiveDataParallel(model, optimizer)"
        )
        if not self._known and not torch.distributed.is_initialized():  # it may be torch's own DDP, under torchrun
            raise RuntimeError(text)
        self._tell("warning", text)
