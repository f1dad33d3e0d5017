"""SHELL: collectives that the train function asks for, right through changes of the group.

Inside a step, one that fails voids the step, as any other of its collectives does. Between two steps nothing is drawn
again: there they are numbered, and a rank that has missed the end of one gets its result from one that has it. So does
a worker that has joined since then, and runs the code that the others have run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.state.layout import digest
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.tree_bytes import from_bytes, to_bytes

_MOST_KEPT_BYTES = 1 << 28
_NUMBERS = 255  # that a rank tells the others, beside 0 for one within a step


class CollectiveState(Protocol):
    """The state that all ranks share."""

    @property
    def progress(self) -> RunProgress:
        """Where the run stands."""


class CollectiveLedger(Protocol):
    """Which step this rank is in."""

    @property
    def depth(self) -> int:
        """How many steps are in progress, one within the other."""

    @property
    def replays_passes(self) -> bool:
        """Whether the others' latest pass is still to come."""

    def reach_collective(self, number: int) -> None:
        """User code comes to its collective of this number."""

    @property
    def failed(self) -> bool:
        """Whether the step in progress is lost and will be drawn again."""

    def fail(self, cause: str) -> None:
        """A collective of the step in progress failed."""


class CollectiveGroup(Protocol):
    """The present group."""

    @property
    def generation(self) -> int:
        """Its number, 0 before the first."""

    @property
    def world_size(self) -> int:
        """Its ranks."""

    @property
    def communicator(self) -> Communicator:
        """Its communicator."""


class CollectiveConsensus(Protocol):
    """Announcements of this rank."""

    def agree_on(self, what: Announced) -> object:
        """Announce what comes next, and wait for the others."""


class CollectiveRun(Protocol):
    """The parts of a run that its collectives go through."""

    @property
    def states(self) -> CollectiveState:
        """What all ranks share."""

    @property
    def ledger(self) -> CollectiveLedger:
        """Which step this rank is in."""

    @property
    def group(self) -> CollectiveGroup:
        """The present group."""

    @property
    def consensus(self) -> CollectiveConsensus:
        """This rank's announcements."""


@dataclasses.dataclass(slots=True)
class _Results:
    """Results since all ranks were last known to be at one place, in order.

    Attributes:
        first: number of the first of them.
        contents: of each, as bytes.
        place: committed steps and ended passes then.
    """

    first: int = 0
    contents: list[bytes] = dataclasses.field(default_factory=list)
    place: tuple[int, int] = (0, 0)

    def begin(self, number: int, place: tuple[int, int]) -> None:
        """All ranks are at ``place``, beyond the first ``number`` collectives."""
        if place != self.place:
            self.first, self.contents, self.place = number, [], place

    def keep(self, content: bytes) -> None:
        """The next one; what is more than memory should hold is let go of, but for this."""
        self.contents.append(content)
        while len(self.contents) > 1 and sum(map(len, self.contents)) > _MOST_KEPT_BYTES:
            self.contents.pop(0)
            self.first += 1

    def of(self, number: int) -> bytes | None:
        """Of the collective of this number, where it is known."""
        index = number - self.first
        return self.contents[index] if 0 <= index < len(self.contents) else None


class UserCollectives:
    """See the module's text.

    Args:
        parts: of the run.
        settle: commits steps that were left by ``break``.
        regroup: finds a group to go on with.
        moment: a named moment of the run, for scripted faults.
    """

    def __init__(
        self,
        parts: CollectiveRun,
        settle: Callable[[], None],
        regroup: Callable[[str], int],
        moment: Callable[[str], None],
    ) -> None:
        self._parts = parts
        self._moment = moment
        self._settle = settle
        self._regroup = regroup
        self._results = _Results()

    @property
    def _progress(self) -> RunProgress:
        return self._parts.states.progress

    def call(
        self, what: str, detail: object, perform: Callable[[Communicator], bytes], alone: Callable[[], bytes]
    ) -> bytes:
        """The result of a collective, as bytes.

        Args:
            what: its name.
            detail: what all ranks must have in common besides.
            perform: carries it out in a group of several.
            alone: its result for this rank alone: before it has joined, while it catches up, and in a step that is
                lost already.

        Raises:
            WorkerDismissed: the job ended or shrank meanwhile.
            RanksDisagreeError: the ranks make different calls.
            RuntimeError: this worker joined within code whose results nobody has any more.
        """
        if self._parts.ledger.replays_passes or not self._parts.group.generation:
            return alone()
        self._settle()
        if self._parts.ledger.depth:
            return self._within_step(Announced(Intent.COLLECTIVE, 0, digest((what, detail)), what), perform, alone)
        while True:
            number = self._progress.collectives
            self._parts.ledger.reach_collective(number)
            self._results.begin(number, self._place)
            known = self._results.of(number)
            if known is not None:
                self._progress.count_collective()
                return known
            if number < self._results.first:
                raise RuntimeError(
                    f"this worker joined the job within code that makes collectives, and the result of {what}() is not "
                    "kept any more: more than 256 MiB of results came between two passes over loaders"
                )
            announced = Announced(Intent.COLLECTIVE, 1 + number % _NUMBERS, digest((what, detail)), what)
            self._progress.meet()
            try:
                content = self._carried_out(announced, perform, alone)
            except CommunicationFailedError as error:
                self._regroup(str(error))
                continue
            self._results.keep(content)
            self._progress.count_collective()
            return content

    @property
    def _place(self) -> tuple[int, int]:
        return self._progress.loader_steps, self._progress.ended_passes

    def _carried_out(
        self, announced: Announced, perform: Callable[[Communicator], bytes], alone: Callable[[], bytes]
    ) -> bytes:
        """Its result, where the group holds; raises CommunicationFailedError, RanksDisagreeError."""
        self._moment("collective")
        if self._parts.group.world_size == 1:
            return alone()
        self._parts.consensus.agree_on(announced)
        content = perform(self._parts.group.communicator)
        self._moment("after_collective")
        return content

    def _within_step(
        self, announced: Announced, perform: Callable[[Communicator], bytes], alone: Callable[[], bytes]
    ) -> bytes:
        """Its result; where the group breaks, the step is lost."""
        if self._parts.ledger.failed:
            return alone()
        try:
            return self._carried_out(announced, perform, alone)
        except CommunicationFailedError as error:
            self._parts.ledger.fail(str(error))
            return alone()

    def enter_group(self, communicator: Communicator) -> None:
        """A group was entered: who is behind gets the results from one that is furthest.

        Raises:
            CommunicationFailedError: the group broke.
        """
        mine = self._progress.collectives
        self._results.begin(mine, self._place)
        rows = communicator.gather_ints([mine, self._results.first])
        furthest = max(number for number, _ in rows)
        if all(number == furthest for number, _ in rows):
            return
        first, source = min((first, rank) for rank, (number, first) in enumerate(rows) if number == furthest)
        told = communicator.broadcast_bytes(to_bytes([first, *self._results.contents]), source)
        if mine == furthest:
            return
        try:
            first, *contents = from_bytes(told)
        except ValueError as error:
            communicator.mark_broken()
            raise CommunicationFailedError(f"rank {source}: {error}") from error
        self._results = _Results(first, contents, self._place)
