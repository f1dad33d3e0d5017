"""What switching strategies needs of the model that it is about (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from elastic_ray.sync.plan import SyncPlan
from elastic_ray.sync.profile import ModelProfile, Topology


class PlannedModel(Protocol):
    """A model, as far as strategies are planned for it."""

    @property
    def profile(self) -> ModelProfile:
        """What a planner needs to know of it."""

    @property
    def device(self) -> torch.device:
        """Of its gradients."""

    def check(self, plan: SyncPlan) -> None:
        """Raise StrategyError where a plan cannot be carried out."""


class TunedModel(Protocol):
    """A model whose strategy is chosen."""

    @property
    def plan(self) -> SyncPlan:
        """What is carried out at present."""

    @property
    def profile(self) -> ModelProfile:
        """What a planner needs to know of it."""

    @property
    def device(self) -> torch.device:
        """Of its gradients."""

    @property
    def topology(self) -> Topology:
        """The present group."""

    @property
    def touched(self) -> Mapping[str, int]:
        """Rows of this rank's latest gradient, by table; of tables whose rows travel."""

    def works(self, plan: SyncPlan) -> bool:
        """Whether a plan can be carried out."""


class CountsRows(Protocol):
    """A table's gradient of which only rows travel."""

    @property
    def touched(self) -> int:
        """Rows that this rank's latest gradient had."""
