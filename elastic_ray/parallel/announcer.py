"""Before every collective of a group, its ranks tell each other what it is: one small all-reduce of a fixed size.

Since all of them make this one before any other, ranks that disagree still meet in it, and each learns who does what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic_ray.intents import Announced, RanksDisagreeError, disagreement
from elastic_ray.membership.rendezvous import CommunicationFailedError, Communicator

# Values that ride along, added up over the ranks.
ROOM = 32
# Ranks that have returned wait for those that have not, which may be busy for hours: exporting a model, for instance.
_PARTING_S = 7 * 24 * 3600.0


class Announcer:
    """The announcements of one rank in one group.

    Three numbers of each rank stand at its place: what it does, how many edges it has committed, and a fingerprint of
    its parameters (0 where none is asked for). A phase is an announcement and the collectives that it is about;
    phases follow each other, and the next cannot begin before the last is over.

    Args:
        communicator: the group, of at least two.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._world = communicator.world_size
        self._tensor = torch.zeros(3 * self._world + ROOM, dtype=torch.float64)
        self._values = self._tensor.numpy()
        self._work: Any = None
        self._open: Announced | None = None
        self._refused: Exception | None = None

    def start(self, what: Announced, ticks: int, *, fingerprint: int = 0, payload: Sequence[float] = ()) -> None:
        """Announce what comes next on this rank; :meth:`agree` must come before its collectives.

        Raises:
            CommunicationFailedError: the group broke.
            RanksDisagreeError: this rank has not done what it announced before.
        """
        if self._refused is not None:
            raise self._refused  # user code has caught it the first time
        if self._open is not None:
            self._refused = self._unfinished(what)
            raise self._refused
        self._open = what
        values, world, rank = self._values, self._world, self.communicator.rank
        values.fill(0.0)
        values[rank], values[world + rank], values[2 * world + rank] = what.code, ticks, fingerprint
        if payload:
            values[3 * world : 3 * world + len(payload)] = payload
        self._work = self.communicator.all_reduce(self._tensor)

    def agree(self) -> list[float]:
        """Wait for all ranks' announcements; returns the sums of what rode along.

        Raises:
            CommunicationFailedError: the group broke.
            RanksDisagreeError: they do different things; raised on every rank.
        """
        work, self._work = self._work, None
        if work is None:
            raise CommunicationFailedError("the announcement was given up")
        self.communicator.wait(work)
        values, world = self._values, self._world
        codes, ticks = values[:world], values[world : 2 * world]
        if (codes != codes[0]).any() or (ticks != ticks[0]).any():
            told = disagreement([int(code) for code in codes], [int(tick) for tick in ticks])
            self._refused = RanksDisagreeError(told)
            raise self._refused
        return values[3 * world :].tolist()  # type: ignore[no-any-return]

    def done(self) -> None:
        """The collectives that were announced are all on their way."""
        self._open = None

    @property
    def fingerprints(self) -> list[int]:
        """By rank, as announced last."""
        return [int(value) for value in self._values[2 * self._world : 3 * self._world]]

    def part(self, what: Announced, ticks: int, wait_s: float) -> bool:
        """Announce that this rank needs no other any more; returns whether all of them have within ``wait_s``.

        The announcement stands as long as the group does, for those that come to another one to find.

        Raises:
            RanksDisagreeError: another one goes on, as far as that is known in this time.
        """
        if self._refused is not None:
            raise self._refused
        if self._open is not None:
            raise self._unfinished(what)
        values, world, rank = self._values, self._world, self.communicator.rank
        values.fill(0.0)
        values[rank], values[world + rank] = what.code, ticks
        try:
            self._work = self.communicator.all_reduce(self._tensor, timeout_s=_PARTING_S)
            if not self.communicator.leave_behind(self._work, wait_s):
                return False
            self._open = what
            self.agree()
        except CommunicationFailedError:
            return False  # whoever is gone does not matter any more
        return True

    def _unfinished(self, what: Announced) -> RanksDisagreeError:
        return RanksDisagreeError(
            f"rank {self.communicator.rank} {self._open}, which was not completed, and now {what}: an exception in "
            "the middle of it was caught. Let errors inside backward() and collectives leave the train function"
        )
