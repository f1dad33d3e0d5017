"""What a rank does in a freshly formed group: exchange state until all ranks are bit-identical."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import Communicator
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.events import Pause
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.state.shared_state import DriftingReplicas, Exchanged


class ExchangedState(Protocol):
    """The state that all ranks share."""

    @property
    def shape(self) -> BatchChoice | None:
        """Batch shape that it was trained with last."""

    def exchange(self, communicator: Communicator, replicas: DriftingReplicas, samples: int | None) -> Exchanged:
        """Bring every rank to the furthest rank's state."""


class GroupParts(DriftingReplicas, Protocol):
    """What a train function has registered, as far as it depends on the group."""

    @property
    def samples(self) -> int | None:
        """Samples of an epoch, where they are known; the same on every rank that knows them."""

    @property
    def buffer_layout(self) -> int:
        """What the ranks must have in common to synchronise buffers."""

    @property
    def least_share(self) -> int:
        """Fewest samples that a rank may have of a step."""

    def ask_for_shares(self, least: int) -> None:
        """No rank is to have fewer samples of a step."""

    def enter_group(self) -> None:
        """A group was entered."""

    def sync_buffers(self, communicator: Communicator) -> None:
        """Make all buffers equal on all ranks."""


class EntryConsensus(Protocol):
    """Announcements of this rank."""

    def enter_group(self) -> None:
        """What was agreed on, or compared, in another group does not count in this one."""

    def agree_on(self, what: Announced) -> object:
        """Announce what comes next, and wait for the others."""


class GroupEntry:
    """See the module's text; called with a group's generation spec and communicator.

    Args:
        state: what is exchanged.
        parts: what depends on the group.
        consensus: announces what the ranks do.
        catch_up: gives results of user code's own collectives to who is behind.
        begin: called once the ranks are identical; returns for how long no step was committed.
        set_shape: takes the batch shape that the group begins with.
        switched: takes the generation, and that pause.
        moment: a named moment of the run, for scripted faults.
    """

    def __init__(
        self,
        state: ExchangedState,
        parts: GroupParts,
        consensus: EntryConsensus,
        *,
        catch_up: Callable[[Communicator], None],
        begin: Callable[[], Pause],
        set_shape: Callable[[BatchChoice | None], None],
        switched: Callable[[int, Pause], None],
        moment: Callable[[str], None],
    ) -> None:
        self._state = state
        self._parts = parts
        self._consensus = consensus
        self._catch_up = catch_up
        self._begin = begin
        self._set_shape = set_shape
        self._switched = switched
        self._moment = moment

    def __call__(self, spec: GenerationSpec, communicator: Communicator) -> int:
        """Enter; returns the loader passes that the group's furthest rank has ended.

        Raises:
            CommunicationFailedError: the group broke meanwhile; this rank's state is whole, or it has none.
            ReplicasDifferError: the ranks train on datasets of other lengths, or have built different things.
        """
        self._moment("receiving")
        exchanged = self._state.exchange(communicator, self._parts, self._parts.samples)
        self._parts.enter_group()
        self._consensus.enter_group()
        if communicator.world_size > 1:
            self._consensus.agree_on(Announced(Intent.BUFFERS, 0, self._parts.buffer_layout))
            # One rank may be about to evaluate its model, and a joiner's be in another mode, but all cut steps alike.
            self._parts.ask_for_shares(max(least for (least,) in communicator.gather_ints([self._parts.least_share])))
        self._parts.sync_buffers(communicator)
        self._catch_up(communicator)
        pause = self._begin()
        self._set_shape(spec.batch or self._state.shape)
        self._switched(spec.generation, pause)
        return exchanged.passes
