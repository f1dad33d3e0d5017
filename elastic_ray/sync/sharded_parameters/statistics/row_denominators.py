"""What an optimizer multiplies the gradients of the rows that a rank owns with (torch)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_ray.batch.device_numbers import read, with_steps_read
from elastic_ray.batch.real_numbers import as_real, real_shape
from elastic_ray.batch.statistics import LEAST_PART, REFRESHED_EVERY, WARM_STEPS, compact, denominators, is_adam_like
from elastic_ray.sync.sharded_parameters.sharded_optimizer import ShardedOptimizer


class RowDenominators:
    """An optimizer of Adam's kind as statistics of gradients see it (``StatesSource``).

    Each rank measures the rows that it owns, in units of what its optimizer keeps of them. So nothing has to travel but
    one number for each parameter: what denominators are floored at follows from the whole of it.

    Args:
        optimizer: the user's.
        shards: the rows, with what it keeps of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shards: ShardedOptimizer) -> None:
        self._optimizer, self._shards = optimizer, shards
        self._found: dict[int, Tensor] = {}
        self._round: int | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the optimizer."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Mapping[Any, Any]:
        """Factors of this rank's rows, [elements], by the parameter's position; without those that are 1."""
        return self._found

    @property
    def adam_like(self) -> bool:
        """Whether it divides gradients by a running size of theirs."""
        return is_adam_like(self._optimizer)

    @property
    def outdated(self) -> bool:
        """Never: they are found before they are needed."""
        return False

    def invalidate(self) -> None:
        """A group was entered: the rank owns other rows."""
        self._found, self._round = {}, None

    def due(self, step: int) -> bool:
        """Whether they are to be found before a step that is measured; the same on all ranks."""
        fresh = step // REFRESHED_EVERY == self._round and (bool(self._found) or step > WARM_STEPS)
        return self.adam_like and not fresh

    @torch.no_grad()
    def refresh(self, step: int, add_up: Callable[[Sequence[float]], Sequence[float]], *, counts: bool = True) -> None:
        """Find them; all ranks call it.

        Args:
            step: committed ones.
            add_up: adds up numbers over all ranks.
            counts: whether this rank's rows are to be counted here, and not with another owner's.

        Raises:
            CommunicationFailedError: the group broke.
        """
        own, groups, params = self._shards.own, self._shards.groups, self._shards.params
        sizes: dict[int, Tensor] = {}
        states = with_steps_read([own.states[view] for view in own.views.values()])
        for (place, view), state in zip(own.views.items(), states, strict=True):
            options = self._optimizer.param_groups[groups[place]] if place in groups else {}
            size = denominators(state, options, view.dtype)
            if size is not None:
                sizes[place] = size.reshape(-1)
        counted = sizes if counts else {}
        squares = read([counted[each].square().sum() if each in counted else 0.0 for each in range(len(params))])
        self._found = {}
        for place, square in enumerate(add_up(squares)):
            if square > 0:
                size = sizes.get(place, as_real(params[place].local.new_empty(0)).reshape(-1))
                floor = LEAST_PART * math.sqrt(square / math.prod(real_shape(params[place].param)))
                self._found[place] = compact(torch.reciprocal(size.clamp(min=max(floor, torch.finfo(size.dtype).tiny))))
        self._round = step // REFRESHED_EVERY
