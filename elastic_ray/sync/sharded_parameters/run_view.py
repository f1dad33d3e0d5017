"""What a sharded model needs of the run that it is trained in (pure)."""

from __future__ import annotations

from typing import Protocol

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
