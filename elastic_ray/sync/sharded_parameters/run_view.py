"""What a sharded model needs of the run that it is trained in, and of what measures it (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from elastic_ray.steps.step import StepView
from elastic_ray.sync.engine.context import SyncConsensus, SyncContext, SyncGroup, SyncLedger
from elastic_ray.sync.optimizer_tiles.run_view import TileConsensus, TileGroup, TileLedger
from elastic_ray.sync.sharded.run_view import TableStep


class ShardGroup(SyncGroup, TileGroup, Protocol):
    """The present group."""


class ShardLedger(SyncLedger, TileLedger, Protocol):
    """Which step this rank is in. It is told what becomes of the step's gradients."""

    @property
    def step(self) -> TableStep | None:
        """The innermost step in progress."""


class ShardConsensus(SyncConsensus, TileConsensus, Protocol):
    """What the ranks tell each other."""


class ShardRun(SyncContext, Protocol):
    """See the module's text."""

    @property
    def group(self) -> ShardGroup:
        """The present group."""

    @property
    def ledger(self) -> ShardLedger:
        """Steps of this rank."""

    @property
    def consensus(self) -> ShardConsensus:
        """What the ranks tell each other."""


class PassStatistics(Protocol):
    """What is measured of the model's gradients while they are scattered."""

    @property
    def layout(self) -> object:
        """What all ranks must measure alike in a pass that has begun."""

    def rebuilt(self) -> None:
        """Other parameters are trainable than before."""

    def enter_group(self) -> None:
        """A group was entered."""

    def forget(self) -> None:
        """The step in progress is lost."""

    def begin_pass(self, step: StepView | None) -> None:
        """A backward pass begins, of a step or outside of steps."""

    def find_denominators(self) -> None:
        """All ranks begin it; raises CommunicationFailedError where the group broke."""

    def end_pass(self, step: StepView) -> None:
        """It has ended, and ``.grad`` has nothing of earlier micro-steps."""

    def conclude_alone(self, step: StepView) -> None:
        """The same; ``.grad`` has."""

    def values(self) -> list[float]:
        """What rides on the end of the pass."""

    def take(self, sums: Sequence[float], *, counts: bool) -> None:
        """The same, added up over all ranks; whether the step's gradients are complete."""

    def close(self) -> None:
        """The optimizer was asked to step."""
