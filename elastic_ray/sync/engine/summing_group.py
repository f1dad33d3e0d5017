"""The ranks whose gradients are added up: those of the group, or this one alone where models are averaged instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic_ray.communication.communicator import Communicator
from elastic_ray.steps.step import StepView
from elastic_ray.sync.engine.context import SyncGroup


class SummingGroup:
    """See the module's text. Where this rank is alone, nothing is reduced, and ``.grad`` is the mean of its samples.

    Args:
        group: the present group.
        drifts: whether ranks step with gradients of their own.
    """

    def __init__(self, group: SyncGroup, drifts: Callable[[], bool]) -> None:
        self._group = group
        self._drifts = drifts

    @property
    def drifts(self) -> bool:
        """Whether ranks step with gradients of their own."""
        return self._drifts()

    @property
    def generation(self) -> int:
        """How often the group has changed."""
        return self._group.generation

    @property
    def rank(self) -> int:
        """Rank of this worker in the group."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """Ranks whose gradients are added up."""
        return 1 if self._drifts() else self._group.world_size

    @property
    def nodes(self) -> Sequence[str]:
        """The node of each rank of the group."""
        return self._group.nodes

    @property
    def communicator(self) -> Communicator:
        """Makes collectives in the group."""
        return self._group.communicator

    def share(self, step: StepView) -> float:
        """What the present micro-batch of this rank weighs in the sum."""
        return step.own_weight(self.rank) if self._drifts() else step.weight(self.rank)
