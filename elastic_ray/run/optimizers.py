"""Detection of training that ``AdaptiveDataParallel`` and ``AdaptiveDataLoader`` do not know of (torch)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic_ray.communication.ended_work import BACKEND
from elastic_ray.run.current import session_of_thread
from elastic_ray.run.group import Group

_installed = False


def watch_optimizers() -> None:
    """Inspect every step of any optimizer in this process, as the session of its thread wants it.

    The hook stays: torch walks through its hooks in a step, and does not bear that one is taken out meanwhile.
    """
    global _installed
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_on_step)
        for kind in (LRScheduler, ReduceLROnPlateau):
            _note_made(kind)


def _note_made(kind: Any) -> None:
    """Have the session of the thread hear of each scheduler that is made."""
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        session = session_of_thread()
        optimizer = getattr(self, "optimizer", None)
        if session is not None and optimizer is not None:
            session.optimizers.made(self, optimizer, late=session.synced and session.elastic)

    setattr(kind, "__init__", __init__)  # noqa: B010


def _on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    session = session_of_thread()
    if session is not None:
        session.optimizers.look_at(optimizer)


class OptimizerWatch:
    """Watch of optimizers that step in a group of several workers without having been wrapped.

    Each worker has its own samples, so that a model that is not synchronised becomes another one on each of them.
    """

    def __init__(self, group: Group, tell: Callable[[str, str], None]) -> None:
        self._group, self._tell = group, tell
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._warned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._schedulers: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[Any]]]
        self._schedulers = weakref.WeakKeyDictionary()

    def made(self, scheduler: Any, optimizer: torch.optim.Optimizer, *, late: bool) -> None:
        """Check a scheduler that was made; ``late`` if training has begun in a group that may change.

        Raises RuntimeError: so late, and for the optimizer of a wrapped model.
        """
        if late and optimizer in self._known:
            raise RuntimeError(
                f"a {type(scheduler).__name__} was made for the optimizer of a wrapped model after the first epoch had "
                "begun: workers that join later, and the job when it starts again, would continue with another "
                "schedule. Make all schedulers before the model is wrapped, and pass them as lr_scheduler=; stages "
                "that follow each other are one torch.optim.lr_scheduler.SequentialLR, and a new one in each epoch is "
                "one LambdaLR over all steps"
            )
        self._schedulers[optimizer] = [*map(weakref.ref, self.schedulers_of(optimizer)), weakref.ref(scheduler)]

    def schedulers_of(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Return schedulers of an optimizer that were made in this run and are still there."""
        return [each for made in self._schedulers.get(optimizer, ()) if (each := made()) is not None]

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer that was wrapped."""
        self._known.add(optimizer)

    def look_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer that is about to step. Raises RuntimeError: no model was wrapped at all."""
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
        initialized = torch.distributed.is_initialized() and torch.distributed.get_backend() != BACKEND
        if not self._known and not initialized:  # else it may be torch's own DDP, under torchrun
            raise RuntimeError(text)
        self._tell("warning", text)
