"""What a way of synchronising gradients may see, and use, of the run that it is part of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from elastic_ray.communication.communicator import Communicator
from elastic_ray.consensus.intents import Announced
from elastic_ray.steps.step import StepView


class SyncGroup(Protocol):
    """The present group."""

    @property
    def generation(self) -> int:
        """How often the group has changed."""

    @property
    def rank(self) -> int:
        """Rank of this worker."""

    @property
    def world_size(self) -> int:
        """Its ranks."""

    @property
    def nodes(self) -> Sequence[str]:
        """The node of each rank."""

    @property
    def communicator(self) -> Communicator:
        """Makes collectives among them."""


class SyncLedger(Protocol):
    """Which step this rank is in. It is told what becomes of the step's gradients."""

    @property
    def step(self) -> StepView | None:
        """The innermost step in progress."""

    @property
    def outermost(self) -> StepView | None:
        """The training step in progress, also while an evaluation pass runs inside it."""

    @property
    def failed(self) -> bool:
        """Whether the step is lost, and will be drawn again."""

    @property
    def replaying(self) -> bool:
        """Whether user code only catches up with the other ranks."""

    @property
    def steps(self) -> int:
        """Committed optimizer steps."""

    def mark_training(self) -> None:
        """A backward pass of the step has begun."""

    def mark_reduced(self) -> None:
        """Its gradients are the same on all ranks."""

    def fail(self, cause: str) -> None:
        """A collective of the step has failed."""


class SyncConsensus(Protocol):
    """Announcements, and the votes that ride on reductions; see ``RankConsensus``."""

    @property
    def control_size(self) -> int:
        """How many control values every reduction of gradients carries."""

    def announce_reductions(self, what: Announced, *, known: bool) -> bool:
        """Say what is reduced next here; returns whether :meth:`agreed` must be asked before results are used."""

    def agreed(self) -> object:
        """Wait until all ranks have announced the same."""

    def reductions_started(self) -> None:
        """What was announced is on its way."""

    def wait(self, work: Any) -> None:
        """Wait for a reduction."""

    def control_values(self, rank: int) -> Sequence[float]:
        """What this rank adds to a reduction."""

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """What all ranks have added."""

    def step_tag(self, note: int = 0) -> tuple[float, float]:
        """What tells reductions of different steps, and of other notes of gradients, apart."""

    def check_same_step(self, tags: Sequence[float], note: int = 0) -> None:
        """Whether all ranks have reduced the same step."""


class SyncContext(Protocol):
    """One run, as a model's ``GradientSync`` sees it."""

    @property
    def group(self) -> SyncGroup:
        """The present group."""

    @property
    def ledger(self) -> SyncLedger:
        """Steps of this rank."""

    @property
    def consensus(self) -> SyncConsensus:
        """What the ranks tell each other."""

    @property
    def models(self) -> int:
        """How many models the loop has wrapped."""

    def may_choose(self, number: int) -> bool:
        """Whether this model's strategy may be chosen now: one at a time, for all share the steps that are timed."""

    def tell(self, kind: str, text: str, detail: Mapping[str, Any] | None = None) -> None:
        """Tell the job's user something; all ranks come by here."""

    def moment(self, name: str) -> None:
        """A named moment of the run, for scripted faults."""
