"""What optimizer state in tiles needs of the run, and of the strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from elastic_ray.communication.communicator import Communicator
from elastic_ray.consensus.intents import Announced
from elastic_ray.membership.messages import Member


class TileGroup(Protocol):
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
    def members(self) -> Sequence[Member]:
        """Its workers, by rank."""

    @property
    def communicator(self) -> Communicator:
        """Makes collectives among them."""


class TileLedger(Protocol):
    """Which step this rank is in."""

    @property
    def step(self) -> object | None:
        """The innermost step in progress."""

    @property
    def steps(self) -> int:
        """Committed optimizer steps."""

    @property
    def failed(self) -> bool:
        """Whether the step is lost, and will be drawn again."""

    def fail(self, cause: str) -> None:
        """A collective of the step has failed."""


class TileConsensus(Protocol):
    """What the ranks tell each other before collectives."""

    def announce(self, what: Announced, payload: Sequence[float] = ()) -> None:
        """Say what comes next on this rank."""

    def agree_on(self, what: Announced, payload: Sequence[float] = ()) -> object:
        """Announce what comes next, and wait for the others; raises RanksDisagreeError where they do something else."""

    def agreed(self) -> object:
        """Wait until all ranks have announced the same."""

    def reductions_started(self) -> None:
        """What was announced is done."""


class TileRun(Protocol):
    """See the module's text."""

    @property
    def group(self) -> TileGroup:
        """The present group."""

    @property
    def ledger(self) -> TileLedger:
        """Steps of this rank."""

    @property
    def consensus(self) -> TileConsensus:
        """What the ranks tell each other."""

    def moment(self, name: str) -> None:
        """A named moment of the run, for scripted faults."""

    def tell(self, kind: str, text: str, detail: Mapping[str, Any] | None = None) -> None:
        """Tell the job's user something; all ranks come by here."""
