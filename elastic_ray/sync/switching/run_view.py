"""What switching strategies needs of the run, and of the model that it is about (torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from elastic_ray.communication.communicator import Communicator
from elastic_ray.sync.plan import SyncPlan
from elastic_ray.sync.profile import ModelProfile, Topology


class TunedGroup(Protocol):
    """The present group."""

    @property
    def nodes(self) -> Sequence[str]:
        """The node of each rank."""

    @property
    def communicator(self) -> Communicator:
        """Makes collectives among them."""


class TunedLedger(Protocol):
    """Which step this rank is in."""

    @property
    def step(self) -> object | None:
        """The innermost step in progress."""

    @property
    def steps(self) -> int:
        """Committed optimizer steps."""


class Waiting(Protocol):
    """Waits for collectives."""

    def wait(self, work: Any) -> None:
        """Wait for a reduction."""


class TunedRun(Protocol):
    """The run."""

    @property
    def group(self) -> TunedGroup:
        """The present group."""

    @property
    def ledger(self) -> TunedLedger:
        """Steps of this rank."""

    @property
    def consensus(self) -> Waiting:
        """What the ranks tell each other."""

    def may_choose(self, number: int) -> bool:
        """Whether this model's strategy may be chosen now: one at a time, for all share the steps that are timed."""

    def tell(self, kind: str, text: str, detail: Mapping[str, Any] | None = None) -> None:
        """Tell the job's user something; all ranks come by here."""


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
