"""Whether all ranks write their parts of a checkpoint after a step, or the first one the whole of it (pure)."""

from __future__ import annotations

import dataclasses
import enum
import secrets
from collections.abc import Sequence
from typing import Protocol


class Readiness(enum.Enum):
    """Whether a rank can write its part."""

    READY = enum.auto()
    NOT_YET = enum.auto()
    NEVER = enum.auto()


class Saving(enum.Enum):
    """What the ranks have agreed on."""

    TOGETHER = enum.auto()
    ALONE = enum.auto()
    LATER = enum.auto()


class PartWriter(Protocol):
    """Writes this rank's part."""

    def readiness(self, rank: int, world_size: int, *, now: bool) -> Readiness:
        """Whether it can.

        Args:
            rank: of this worker.
            world_size: ranks of the group.
            now: no step follows, so that there is time for all but what never comes.
        """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """All ranks write their parts of this checkpoint now.

    Attributes:
        token: tells it apart from others of as many steps.
        rank: of this worker.
        world_size: ranks that write.
    """

    token: str
    rank: int
    world_size: int


class SaveAgreement:
    """See the module's text. All ranks call :meth:`ballot`, add up what it gives, and conclude the same from the sums.

    Attributes:
        refusals: ranks that had said in the present group that they never can; 0 where all can, or none was asked.
    """

    def __init__(self) -> None:
        self._writer: PartWriter | None = None
        self._order: SaveOrder | None = None
        self._given_up = False
        self.refusals = 0

    def serve(self, writer: PartWriter) -> None:
        """This rank has something that writes its part."""
        self._writer = writer

    def give_up(self) -> None:
        """The first rank saves alone from now on."""
        self._given_up = True

    def begin(self) -> None:
        """A group was entered: what was agreed on in another one does not count."""
        self._order, self.refusals = None, 0

    @property
    def together(self) -> bool:
        """Whether ranks are to save together, as far as this one knows."""
        return self._writer is not None and not self._given_up and not self.refusals

    def ballot(self, rank: int, world_size: int, *, divided: bool, now: bool) -> list[float]:
        """What this rank adds to the sums; exact in float64.

        Args:
            rank: of this worker.
            world_size: ranks of the group.
            divided: whether state lies with several ranks; equal on all.
            now: as for ``PartWriter.readiness``.
        """
        self._order = None
        if not divided or world_size == 1:
            return [0.0, 0.0, 0.0, 0.0]
        readiness = Readiness.NEVER
        if self._writer is not None and not self._given_up:
            readiness = self._writer.readiness(rank, world_size, now=now)
        token = float(1 + secrets.randbits(32)) if rank == 0 else 0.0
        return [1.0, token, float(readiness is Readiness.NOT_YET), float(readiness is Readiness.NEVER)]

    def conclude(self, sums: Sequence[float], rank: int, world_size: int, *, now: bool) -> Saving:
        """What comes of the sums; the same on all ranks.

        Args:
            sums: of the ballots over all ranks.
            rank: of this worker.
            world_size: ranks of the group.
            now: as for :meth:`ballot`.
        """
        divided, token, not_yet, never = (round(each) for each in sums)
        if divided != world_size:
            return Saving.ALONE
        self.refusals = never
        if never or (now and not_yet):
            return Saving.ALONE
        if not_yet:
            return Saving.LATER
        self._order = SaveOrder(token=f"{token:09x}", rank=rank, world_size=world_size)
        return Saving.TOGETHER

    def take_order(self) -> SaveOrder | None:
        """What the ranks have agreed to write now, once."""
        order, self._order = self._order, None
        return order
