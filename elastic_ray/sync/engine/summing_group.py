"""Ranks whose gradients are summed: the group, or this rank alone where models are averaged instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.steps.step import LoaderStep
    from elastic_ray.sync.averaging.drift import Drift


class SummingGroup:
    """Ranks whose gradients are summed: the group, or this rank alone while replicas diverge.

    Where this rank is alone, nothing is reduced, and ``.grad`` is the mean of its samples.
    """

    def __init__(self, context: Run, model: Drift) -> None:
        self.group = context.group  # the present group, whoever is added up
        self.model = model

    @property
    def drifts(self) -> bool:
        """True while ranks update with their local gradients."""
        return self.model.average is not None and self.model.on

    @property
    def world_size(self) -> int:
        """Number of ranks whose gradients are summed."""
        return self.group.world_size if self.model.average is None or not self.model.on else 1

    def share(self, step: LoaderStep) -> float:
        """Return the weight of this rank's present micro-batch in the sum."""
        return step.own_weight(self.group.rank) if self.drifts else step.weight(self.group.rank)
