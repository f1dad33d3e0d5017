"""Denominators of the optimizer's update, whole on all ranks while its state is in tiles (torch).

The gradient noise scale is measured in the optimizer's units. All ranks need for that what only owners hold; they
receive it once in some steps, in 16 bits.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from elastic_ray.batch.device_numbers import read, with_steps_read
from elastic_ray.batch.statistics import DENOMINATOR, REFRESHED_EVERY, SETTLED_STEPS, denominators, is_adam_like
from elastic_ray.communication.communicator import Communicator
from elastic_ray.sync.optimizer_tiles.publishing import Publisher
from elastic_ray.sync.optimizer_tiles.states import HeldTiles, part_of

_NONE = -1.0
"""Stands for a denominator that an optimizer does not have yet."""


class Denominators:
    """An optimizer as statistics of gradients see it: with its own state, or with what was gathered of it.

    Args:
        divided: whether its state is.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, divided: Callable[[], bool]) -> None:
        self._optimizer, self._divided = optimizer, divided
        self._gathered: dict[Parameter, dict[str, Tensor]] = {}
        self._outdated = False  # nothing is divided before all ranks call :meth:`invalidate`

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer."""
        return self._optimizer.param_groups

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """Optimizer state by parameter, the gathered denominators first."""
        if not self._divided():
            return self._optimizer.state
        return collections.ChainMap(dict(self._gathered), self._optimizer.state)

    @property
    def adam_like(self) -> bool:
        """True if the optimizer divides gradients by a running estimate of their size."""
        return is_adam_like(self._optimizer) or any(self._gathered)

    @property
    def outdated(self) -> bool:
        """True if nothing can be measured before all ranks receive the denominators; the same on all ranks."""
        return self._outdated and is_adam_like(self._optimizer) and self._divided()

    def invalidate(self, *, fresh: bool) -> None:
        """Invalidate the denominators after a change of the group or of the state's division.

        Args:
            fresh: no update was made yet, so that there is nothing to receive.
        """
        self._outdated = not fresh
        self._gathered = {}

    def due(self, step: int) -> bool:
        """True if all ranks receive the denominators before this step."""
        early = step <= SETTLED_STEPS or step % REFRESHED_EVERY == 0
        return is_adam_like(self._optimizer) and (self._outdated or early)

    @torch.no_grad()
    def gather(
        self, communicator: Communicator, held: HeldTiles, params: Mapping[str, Parameter], senders: Sequence[int]
    ) -> None:
        """Send the denominators from their first owners to all ranks; called on every rank.

        Args:
            held: the tiles of this rank.
            senders: the first owner of each tile.
        """
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        # Parameters keep their memory format where they are whole, and so do these.
        found = {name: torch.empty_like(params[name], dtype=torch.bfloat16) for name in held.tiling.names}
        spans = list(held.spans())
        states = with_steps_read([held.states[view] for _, view in spans])
        for (span, _), state in zip(spans, states, strict=True):
            param = params[span.name]
            size = denominators(state, groups[id(param)], param.dtype)
            place = part_of(found[span.name], span)
            if size is None:
                place.fill_(_NONE)
            else:
                place.copy_(size)
        rank, world = communicator.rank, communicator.world_size
        Publisher(held.tiling, senders, found, rank, world).run(communicator)
        firsts = read([size.view(-1)[0] for size in found.values()])
        self._gathered = {
            params[name]: {DENOMINATOR: size}
            for (name, size), first in zip(found.items(), firsts, strict=True)
            if first != _NONE
        }
        self._outdated = False
