"""What a sharded table needs of the run that it is trained in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from elastic_ray.communication.communicator import Communicator
from elastic_ray.consensus.intents import Announced
from elastic_ray.membership.messages import RankInfo
from elastic_ray.steps.step import StepView


class TableGroup(Protocol):
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
    def rank_info(self) -> RankInfo:
        """Where this worker stands; before the first group, where it is expected to."""

    @property
    def nodes(self) -> Sequence[str]:
        """The node of each rank."""

    @property
    def communicator(self) -> Communicator:
        """Makes collectives among them."""


class TableStep(StepView, Protocol):
    """The step in progress."""

    @property
    def whole(self) -> bool:
        """Each rank takes one whole batch, and some may have none."""

    @property
    def leaves_ranks_idle(self) -> bool:
        """Whether some ranks have no sample in it."""


class TableLedger(Protocol):
    """Which step this rank is in."""

    @property
    def step(self) -> TableStep | None:
        """The innermost step in progress."""

    @property
    def failed(self) -> bool:
        """Whether the step is lost, and will be drawn again."""

    @property
    def replaying(self) -> bool:
        """Whether user code only catches up with the other ranks."""

    def fail(self, cause: str) -> None:
        """A collective of the step has failed."""


class TableConsensus(Protocol):
    """What the ranks tell each other before collectives."""

    def agree_on(self, what: Announced, payload: Sequence[float] = ()) -> object:
        """Announce what comes next, and wait for the others; raises RanksDisagreeError where they do something else."""


class TableRun(Protocol):
    """See the module's text."""

    @property
    def group(self) -> TableGroup:
        """The present group."""

    @property
    def ledger(self) -> TableLedger:
        """Steps of this rank."""

    @property
    def consensus(self) -> TableConsensus:
        """What the ranks tell each other."""

    def moment(self, name: str) -> None:
        """A named moment of the run, for scripted faults."""

    def tell(self, kind: str, text: str, detail: Mapping[str, Any] | None = None) -> None:
        """Tell the job's user something; all ranks come by here."""
