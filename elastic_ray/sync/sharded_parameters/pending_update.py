"""An update that a rank has voted for and of which it does not know whether it is decided (torch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from elastic_ray.sync.optimizer_tiles.pending import as_then, options_of
from elastic_ray.sync.optimizer_tiles.states import State
from elastic_ray.sync.optimizer_tiles.swapped import swapped
from elastic_ray.sync.row_changes import HandChanges, UpdatedRows
from elastic_ray.sync.sharded_parameters.held_shards import Shard
from elastic_ray.sync.step_hooks import StepHooks


class ShardUpdate:
    """An update of shards: which parameters they are parts of, and by what gradients.

    Args:
        optimizer: makes it.
        hidden: ``id`` of the user's parameters, in whose place the optimizer steps rows of shards.
        groups: position of each parameter's group in the optimizer.
        by_hand: changes of parameters that are no update.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        hidden: Sequence[int],
        groups: Mapping[int, int],
        by_hand: HandChanges,
    ) -> None:
        self._optimizer, self._hidden, self._groups, self._by_hand = optimizer, hidden, groups, by_hand

    def make(self, shards: Sequence[tuple[Shard, Mapping[int, Tensor]]], apply: Callable[[], Any]) -> Any:
        """Make it.

        Args:
            shards: each with the gradients of its rows, by the parameter's position; without those that have none.
            apply: the optimizer's own step.
        """
        shown: list[tuple[Parameter, int]] = []
        states: dict[Parameter, State] = {}
        for shard, grads in shards:
            for param, grad in grads.items():
                view = shard.views[param]
                view.requires_grad_(True)
                view.grad = grad
                shown.append((view, self._groups[param]))
                states[view] = shard.states[view]
        places = {each: place for place, each in enumerate(self._hidden)}
        updated = UpdatedRows(places, [shard.views for shard, _ in shards], self._by_hand)
        hooks = StepHooks(self._optimizer).left_out(after=False)  # those before the step have seen whole parameters
        with hooks, swapped(self._optimizer, self._hidden, shown, states), updated.shown():
            result = apply()
        for shard, grads in shards:
            for param in grads:
                view = shard.views[param]
                view.grad = None
                shard.put(param, view, states[view])
        return result


class PendingShards:
    """See the module's text: what it takes to make an update later, when it is heard to be decided.

    By then the optimizer may have the options of a later step, and the gradients are gone.

    Args:
        optimizer: makes it.
        update: how.
        shards: as of ``ShardUpdate.make``; gradients are copied.
        key: of the update.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        update: ShardUpdate,
        shards: Sequence[tuple[Shard, Mapping[int, Tensor]]],
        key: tuple[int, int],
    ) -> None:
        self.key = key
        self._optimizer, self._update = optimizer, update
        self._shards = [(shard, {param: grad.clone() for param, grad in grads.items()}) for shard, grads in shards]
        self._options = options_of(optimizer)

    def make(self, apply: Callable[[], Any], rates: Sequence[float]) -> None:
        """Make the update, as other ranks have.

        Args:
            apply: the optimizer's own step.
            rates: learning rates that they have made it with.
        """
        with as_then(self._optimizer, self._options, rates):
            self._update.make(self._shards, apply)
