"""SHELL: collectives of the train function, which continue through changes of the group.

Inside a step, one that fails voids the step, as any other of its collectives does. Between two steps nothing is drawn
again: there they are numbered, and a rank that has missed the end of one gets its result from one that has it. So does
a worker that has joined since then, and runs the code that the others have run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.state.layout import digest
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.tree import from_bytes, to_bytes

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.session.group_changes import GroupChanges
    from elastic_ray.session.loader_passes import LoaderPasses

_MOST_KEPT_BYTES = 1 << 28
_NUMBERS = 255  # that a rank tells the others, beside 0 for one within a step


@dataclasses.dataclass(slots=True)
class CollectiveResults:
    """Results of collectives since all ranks were last known to be at one place, in order."""

    first: int = 0
    contents: list[bytes] = dataclasses.field(default_factory=list)
    place: tuple[int, int] = (0, 0)  # committed steps and ended passes then

    def begin(self, number: int, place: tuple[int, int]) -> None:
        """Drop older results, because all ranks are at ``place``, after the first ``number`` collectives."""
        if place != self.place:
            self.first, self.contents, self.place = number, [], place

    def keep(self, content: bytes) -> None:
        """Keep the next result; drop old ones beyond the memory limit."""
        self.contents.append(content)
        while len(self.contents) > 1 and sum(map(len, self.contents)) > _MOST_KEPT_BYTES:
            self.contents.pop(0)
            self.first += 1

    def of(self, number: int) -> bytes | None:
        """Return the result of collective `number`, if it is known."""
        index = number - self.first
        return self.contents[index] if 0 <= index < len(self.contents) else None

    def enter_group(self, communicator: Communicator, progress: RunProgress) -> None:
        """Exchange results in a new group: ranks that are behind get them from one that is furthest."""
        mine, place = progress.collectives, _place(progress)
        self.begin(mine, place)
        rows = communicator.gather_ints([mine, self.first])
        furthest = max(number for number, _ in rows)
        if all(number == furthest for number, _ in rows):
            return
        first, source = min((first, rank) for rank, (number, first) in enumerate(rows) if number == furthest)
        told = communicator.broadcast_bytes(to_bytes([first, *self.contents]), source)
        if mine == furthest:
            return
        try:
            self.first, *self.contents = from_bytes(told)
        except ValueError as error:
            communicator.mark_broken()
            raise CommunicationFailedError(f"rank {source}: {error}") from error
        self.place = place


def _place(progress: RunProgress) -> tuple[int, int]:
    return progress.loader_steps, progress.ended_passes


class UserCollectives:
    """Collectives of the train function, whose results survive changes of the group.

    Args:
        changes: of group, which find another one where a collective between two steps fails.
        passes: of its loaders, which commit steps that were left by ``break`` before a collective.
        results: what is kept of results.
    """

    def __init__(self, run: Run, changes: GroupChanges, passes: LoaderPasses, results: CollectiveResults) -> None:
        self._run, self._changes, self._passes, self._results = run, changes, passes, results

    @property
    def _progress(self) -> RunProgress:
        return self._run.states.progress

    def next_known(self) -> bytes | None:
        """Return the next collective's result between steps where this worker catches up; else None."""
        progress, kept = self._progress, self._results
        if not kept.contents or self._run.ledger.depth or kept.place != _place(progress):
            return None
        return kept.of(progress.collectives)

    def call(
        self, what: str, detail: object, perform: Callable[[Communicator], bytes], alone: Callable[[], bytes]
    ) -> bytes:
        """Carry out a collective and return its result, as bytes.

        Args:
            detail: what all ranks must have in common besides.
            perform: carries it out in a group of several.
            alone: its result for this rank alone: before it has joined, while it catches up, and in a step that is
                lost already.

        Raises:
            WorkerDismissed: the job ended or shrank meanwhile.
            RanksDisagreeError: the ranks make different calls.
            RuntimeError: this worker joined within code whose results nobody has any more.
        """
        if self._run.ledger.replays_passes or not self._run.group.generation:
            return alone()
        self._passes.settle()
        self._run.refuse_in_round(
            f"{what}() may not be called", "add up numbers in an elastic_ray.Accumulator, or call it after the pass"
        )
        if self._run.ledger.depth:
            return self._within_step(Announced(Intent.COLLECTIVE, 0, digest((what, detail)), what), perform, alone)
        while True:
            number = self._progress.collectives
            self._run.ledger.reach_collective(number)
            self._results.begin(number, _place(self._progress))
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
                self._changes.regroup(str(error))
                continue
            self._results.keep(content)
            self._progress.count_collective()
            return content

    def _carried_out(
        self, announced: Announced, perform: Callable[[Communicator], bytes], alone: Callable[[], bytes]
    ) -> bytes:
        """Carry out a collective and return its result; raises CommunicationFailedError, RanksDisagreeError."""
        self._run.moment("collective")
        if self._run.group.world_size == 1:
            return alone()
        if self._run.consensus.in_phase:
            self._run.consensus.interject(announced)
        else:
            self._run.consensus.agree_on(announced)
        content = perform(self._run.group.communicator)
        self._run.moment("after_collective")
        return content

    def _within_step(
        self, announced: Announced, perform: Callable[[Communicator], bytes], alone: Callable[[], bytes]
    ) -> bytes:
        """Carry out a collective within a step and return its result; if the group breaks, the step is lost."""
        if self._run.ledger.failed:
            return alone()
        try:
            return self._carried_out(announced, perform, alone)
        except CommunicationFailedError as error:
            self._run.ledger.fail(str(error))
            return alone()
