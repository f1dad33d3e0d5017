"""How far updates move the rows of a sharded model (torch).

Each rank moves the rows that it owns. What it has measured waits for the end of the next backward pass, and is added up
over all ranks with what these agree by there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from elastic_ray.monitoring.gradient_measures import GradientNorms
from elastic_ray.sync.sharded_parameters.sharded_optimizer import ShardedOptimizer
from elastic_ray.sync.statistics.gradient_meter import GradientMeter
from elastic_ray.sync.statistics.update_norms import with_update_norms


class MovedRows:
    """See the module's text.

    Args:
        optimizer: the user's.
        shards: the rows that it steps.
        meter: knows which updates are to be measured, the same on all ranks, and is told of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shards: ShardedOptimizer, meter: GradientMeter) -> None:
        self._optimizer, self._shards, self._meter = optimizer, shards, meter
        self._waiting: tuple[GradientNorms, list[float]] | None = None  # with squares of this rank's rows, by group

    def size(self, groups: int) -> int:
        """How many numbers ride, for so many parameter groups; the same on all ranks, whatever they have measured."""
        return 0 if self._meter.monitor.norms_every is None else 1 + groups

    def forget(self) -> None:
        """A group was entered: others own the rows, and some ranks have measured nothing."""
        self._waiting = None

    def measure(self, update: Callable[[], Any], *, alone: bool, counts: bool) -> Any:
        """Carry out an update whose gradient was measured; returns what it returns.

        Args:
            update: makes it.
            alone: in a group of one, which has nobody to ask.
            counts: whether this rank's rows are to be counted here, and not with another owner's.
        """
        found = self._meter.take_unmoved()
        if found is None:
            return update()
        result, norms = with_update_norms(self._optimizer, self._rows(counts=counts), update, whole=False)
        if alone:
            self._meter.found_by_all(dataclasses.replace(found, updates=norms))
        else:
            self._waiting = found, [norm * norm for norm in norms]
        return result

    def _rows(self, *, counts: bool) -> list[list[Parameter]]:
        """Those that the update moves on this rank, by parameter group."""
        rows: list[list[Parameter]] = [[] for _ in self._optimizer.param_groups]
        groups = self._shards.groups
        for place, view in self._shards.own.views.items() if counts else ():
            if place in groups and self._shards.params[place].local_grad is not None:
                rows[groups[place]].append(view)
        return rows

    def values(self, groups: int) -> list[float]:
        """What rides: whether this rank has measured an update, and its squares; see :meth:`size`."""
        if self._waiting is not None and len(self._waiting[1]) != groups:
            self._waiting = None  # the optimizer was given another group since
        if not self.size(groups) or self._waiting is None:
            return [0.0] * self.size(groups)
        return [1.0, *self._waiting[1]]

    def take(self, sums: Sequence[float], *, ranks: int) -> None:
        """The same, added up over so many ranks."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and round(sums[0]) == ranks:
            norms, _ = waiting
            self._meter.found_by_all(dataclasses.replace(norms, updates=tuple(each**0.5 for each in sums[1:])))
