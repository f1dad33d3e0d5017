"""What averages of models need of the run, what an algorithm is given of a model, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch


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
