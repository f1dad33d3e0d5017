"""SHELL: the ways from one group into the next: joining, an agreed switch, and regrouping after a failure."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.membership.worker_side import LostGroupError

logger = logging.getLogger(__name__)


class GroupMembership(Protocol):
    """This worker's side of the membership protocol, as far as it gives groups."""

    @property
    def worker(self) -> str:
        """Id of this worker."""

    @property
    def generation(self) -> int:
        """Number of the present generation, 0 before the first."""

    @property
    def current(self) -> GenerationSpec | None:
        """The present generation as announced, None before the first."""

    @property
    def stop_requested(self) -> bool:
        """Whether the job is to end."""

    def prepared_spec(self, generation: int) -> GenerationSpec | None:
        """The specification of a generation whose group has been formed and still stands."""

    def take(self, generation: int) -> tuple[GenerationSpec, Communicator | None] | None:
        """Make the prepared group the present one; None where it was called off, no communicator for a leaver."""

    def take_next(self, *, timeout_s: float) -> tuple[GenerationSpec, Communicator | None]:
        """Wait for a group to go on with and make it the present one; raises ``LostGroupError``."""


class FailureReports(Protocol):
    """The controller, as far as it hears of failures."""

    def failed(self, generation: int, cause: str) -> None:
        """A collective of ``generation`` failed here; this worker waits for the next generation."""


class WorkerDismissed(BaseException):
    """This worker's part in the job is over; ``stopped`` when the whole job is."""

    def __init__(self, *, stopped: bool) -> None:
        super().__init__("stopped" if stopped else "left")
        self.stopped = stopped


class GroupTransitions:
    """See the module's text. Every method returns in a group, or raises ``WorkerDismissed`` or ``LostGroupError``.

    Args:
        membership: this worker's side of the membership protocol.
        controller: is told of failures.
        enter: exchanges state in a freshly formed group; returns the loader passes that its furthest rank has ended.
        moment: scripted faults.
        before_change: makes equal what differs from rank to rank, while all are still in the present group; takes of
            each whether it stays.
        regroup_timeout_s: longest wait for a generation to go on with.
    """

    def __init__(
        self,
        membership: GroupMembership,
        controller: FailureReports,
        enter: Callable[[GenerationSpec, Communicator], int],
        moment: Callable[[str], None],
        *,
        before_change: Callable[[Sequence[bool]], None],
        regroup_timeout_s: float,
    ) -> None:
        self._membership = membership
        self._controller = controller
        self._enter = enter
        self._moment = moment
        self._before_change = before_change
        self._regroup_timeout_s = regroup_timeout_s

    def join(self, holds_state: Callable[[], bool], *, timeout_s: float) -> None:
        """Become a member for the first time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._take_next(deadline - time.monotonic())
                return
            except CommunicationFailedError as error:
                # A joiner that could not enter waits for the next generation; only members have something to report.
                logger.info("worker %s: could not enter generation: %s", self._membership.worker, error)
                if holds_state():
                    self._controller.failed(self._membership.generation, str(error))

    def switch(self, generation: int, can_switch: Callable[[int], bool]) -> None:
        """Go where all ranks have agreed to go, unless its size does not suit the place in the epoch."""
        prepared = self._membership.prepared_spec(generation)
        if prepared is not None and not can_switch(prepared.world_size):
            return  # too few samples left in this pass for so many ranks: agreed on again at its end
        if prepared is not None:  # else the others find out that this rank has not come
            try:
                self._before_change(self._staying(prepared))
            except CommunicationFailedError as error:
                self.regroup(str(error), self._membership.generation)
                return
        try:
            taken = self._membership.take(generation)
            if taken is None:
                raise CommunicationFailedError(f"generation {generation} was called off after it was agreed on")
            self._go_to(*taken)
        except CommunicationFailedError as error:
            self.regroup(str(error), generation)

    def _staying(self, following: GenerationSpec) -> list[bool]:
        """Whether each rank of the present group is in the one that follows."""
        present = self._membership.current
        members = present.members if present is not None else ()
        return [following.rank_of(member.worker) is not None for member in members]

    def regroup(self, cause: str, generation: int) -> int:
        """Wait for the next generation and enter it; returns the loader passes that its furthest rank has ended."""
        while True:
            self._controller.failed(generation, cause)
            try:
                return self._take_next(self._regroup_timeout_s)
            except CommunicationFailedError as error:
                cause, generation = str(error), self._membership.generation

    def _take_next(self, timeout_s: float) -> int:
        try:
            return self._go_to(*self._membership.take_next(timeout_s=timeout_s))
        except LostGroupError:
            if self._membership.stop_requested:
                raise WorkerDismissed(stopped=True) from None
            raise

    def _go_to(self, spec: GenerationSpec, communicator: Communicator | None) -> int:
        if communicator is None:
            self._moment("leaving")
            raise WorkerDismissed(stopped=False)
        return self._enter(spec, communicator)
