"""Gradients by all-reduce: every rank has the whole mean, and applies it to a whole model of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from elastic_ray.sync.carried_gradients import CarriedGradients
from elastic_ray.sync.context import SyncContext
from elastic_ray.sync.noise import NoiseTracker
from elastic_ray.sync.reducer import GradientReducer
from elastic_ray.sync.trainable import Trainable


class AllReduce:
    """See the module's text, and ``GradientSync``, which this is.

    Its state are the gradients that user code adds up over several steps; reductions leave none.

    Args:
        context: the run.
        trainable: the model's trainable parameters.
        optimizer: steps them.
        noise: takes statistics.
        grad_scale: AMP's present loss scale, 1 without AMP.
        number: of the model, in the order in which the loop wraps them.
        check_finite: whether to find out on which ranks gradients are NaN or infinite.
    """

    def __init__(
        self,
        context: SyncContext,
        trainable: Trainable,
        optimizer: torch.optim.Optimizer,
        noise: NoiseTracker,
        grad_scale: Callable[[], float],
        number: int,
        *,
        check_finite: bool,
    ) -> None:
        self._carried = CarriedGradients(context, optimizer)
        self._reducer = GradientReducer(
            trainable, self._carried, context, noise, grad_scale, number, check_finite=check_finite
        )

    @property
    def nonfinite_ranks(self) -> Sequence[int] | None:
        """Ranks whose gradients were NaN or infinite when this step reduced them; None where all were finite."""
        return self._reducer.nonfinite_ranks

    @property
    def is_open(self) -> bool:
        """Whether gradients wait for the optimizer."""
        return self._carried.is_open

    @property
    def local(self) -> bool:
        """Whether ``no_sync`` has left them unreduced."""
        return self._carried.local

    def before_forward(self) -> None:
        """Take in what was unfrozen."""
        self._reducer.follow()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only add to this rank's gradients."""
        return self._reducer.no_sync()

    def before_update(self) -> None:
        """What backward adds from here on is another loss's."""
        self._reducer.close()

    def applied(self) -> None:
        """Nothing is left to carry, should the step be lost from here on."""
        self._carried.note_applied()

    def rebuild(self) -> None:
        """Lay out buckets for other parameters."""
        self._reducer.rebuild()

    def enter_group(self) -> None:
        """What only some of its ranks hold counts no more."""
        self._carried.enter_group()

    def remember(self) -> Any:
        """What a step needs to be undone."""
        return self._carried.remember()

    def roll_back(self, remembered: Any) -> None:
        """Undo a lost step."""
        self._carried.roll_back(remembered)

    def capture(self) -> Any:
        """Carried gradients."""
        return self._carried.capture()

    def restore(self, tree: Any) -> None:
        """Take over carried gradients."""
        self._carried.restore(tree)
