"""What averages of models need of the run, what an algorithm is given of a model, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from elastic_ray.communication.communicator import Communicator
from elastic_ray.steps.step import StepView


class AveragedModel(Protocol):
    """One model's trained parameters on this rank, and those of others. Collectives raise CommunicationFailedError."""

    @property
    def world_size(self) -> int:
        """Ranks."""

    @property
    def named(self) -> Mapping[str, torch.Tensor]:
        """This rank's parameters, in the same order on every rank."""

    def mean(self) -> list[torch.Tensor]:
        """The mean of all ranks' parameters, at least in float32; overwritten by the next call."""

    def of_partner(self, partners: Sequence[int | None]) -> list[torch.Tensor] | None:
        """The parameters of the rank that ``partners`` names for this one, as :meth:`mean`; None where it rests."""


class TrainedParameters(Protocol):
    """Which of a model's parameters its optimizer steps."""

    @property
    def params(self) -> Sequence[torch.nn.Parameter]:
        """They, in the optimizer's order."""


class AveragingGroup(Protocol):
    """The present group."""

    @property
    def world_size(self) -> int:
        """Its ranks."""

    @property
    def communicator(self) -> Communicator:
        """Makes collectives among them."""


class AveragingLedger(Protocol):
    """Which step this rank is in."""

    @property
    def step(self) -> StepView | None:
        """The innermost step in progress."""

    @property
    def steps(self) -> int:
        """Committed optimizer steps."""


class AveragingRun(Protocol):
    """The run, as far as averages depend on it."""

    @property
    def group(self) -> AveragingGroup:
        """The present group."""

    @property
    def ledger(self) -> AveragingLedger:
        """Steps of this rank."""

    def tell(self, kind: str, text: str, detail: Mapping[str, Any] | None = None) -> None:
        """Tell the job's user something; all ranks come by here."""

    def moment(self, name: str) -> None:
        """A named moment of the run, for scripted faults."""


class Averager(Protocol):
    """One algorithm, for one model. All ranks call it after the same steps.

    What it does to parameters, and to its own state, it does after its collectives have ended: one that fails leaves
    both as they were.
    """

    def run(self, model: AveragedModel, steps: int) -> None:
        """Average.

        Args:
            model: the model.
            steps: committed optimizer steps, a multiple of the period.

        Raises:
            CommunicationFailedError: the group broke; nothing has changed here.
        """

    def begin(self, model: AveragedModel) -> None:
        """The first step begins for this algorithm, or for some of the parameters, which are alike on all ranks."""

    def capture(self) -> Any:
        """What all ranks share of its state, for joiners and checkpoints."""

    def restore(self, tree: Any) -> None:
        """Take over a captured state of the same algorithm."""
