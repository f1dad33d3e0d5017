"""The ranks whose gradients are added up: those of the group, or this one alone where models are averaged instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.intents import Announced, Intent

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.steps.step import LoaderStep
    from elastic_ray.sync.averaging.drift import Drift


class SummingGroup:
    """Ranks whose gradients are summed: the group, or this rank alone while replicas diverge.

    Where this rank is alone, nothing is reduced, and ``.grad`` is the mean of its samples.

    All the same the ranks agree on the step before any of them applies it: by what else would ride on the reduction of
    its gradients. So a step that one of them does not live to see is lost on all, and none of its samples is.

    Args:
        context: the run.
        model: the model.
        number: of the model.
        layout: a digest of what is averaged, and how, and what a user calls it.

    Attributes:
        group: the present group, whoever is added up.
        model: as given.
    """

    def __init__(self, context: Run, model: Drift, number: int, layout: Callable[[], tuple[int, str]]) -> None:
        self._context = context
        self.group = context.group
        self.model = model
        self._number = number
        self._layout = layout
        self._met: tuple[int, Announced] | None = None  # the generation and layout in which all have met

    @property
    def drifts(self) -> bool:
        """True while ranks update with their local gradients."""
        return self.model.average is not None and self.model.on

    @property
    def world_size(self) -> int:
        """Ranks whose gradients are added up."""
        return self.group.world_size if self.model.average is None or not self.model.on else 1

    def share(self, step: LoaderStep) -> float:
        """Return the weight of this rank's present micro-batch in the sum."""
        return step.own_weight(self.group.rank) if self.drifts else step.weight(self.group.rank)

    def agree(self, step: LoaderStep | None) -> None:
        """Agree on the step after its last backward pass, if gradients are not reduced."""
        ledger = self._context.ledger
        if (
            self.model.average is None
            or not self.model.on
            or step is None
            or not step.is_last_micro
            or self.group.world_size == 1
            or ledger.failed
        ):
            return
        try:
            self._agree()
        except CommunicationFailedError as error:
            ledger.fail(str(error))
        else:
            ledger.mark_reduced()

    def _agree(self) -> None:
        """Add up what rides on reductions; raises CommunicationFailedError."""
        consensus, group = self._context.consensus, self.group
        announced = Announced(Intent.GRADIENTS, self._number, *self._layout())
        known = self._met == (group.generation, announced) and self._context.models == 1
        if consensus.announce_reductions(announced, known=known):
            consensus.agreed()
            self._met = (group.generation, announced)
        values = torch.tensor([*consensus.control_values(group.rank), *consensus.step_tag()], dtype=torch.float64)
        work = group.communicator.gradients.all_reduce(values)
        consensus.reductions_started()
        self._context.moment("allreduce")
        consensus.wait(work)
        sums = values.tolist()
        consensus.check_same_step(sums[consensus.control_size :])
        consensus.conclude(sums[: consensus.control_size], group.world_size)
