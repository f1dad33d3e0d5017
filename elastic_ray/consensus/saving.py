"""Agreement on a checkpoint: all ranks write their parts after a step, or rank 0 writes all of it (pure)."""

from __future__ import annotations

import dataclasses
import enum
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_ray.checkpoints.sharded.saver import PartSaver

# Values of a rank that ride on the control sums; the token's halves are exact in float32.
_RIDING = 4
_HALF_BITS = 16


class Readiness(enum.Enum):
    """Readiness of a rank to write its part."""

    READY = enum.auto()
    NOT_YET = enum.auto()
    NEVER = enum.auto()


class Saving(enum.Enum):
    """Mode of saving that the ranks have agreed on."""

    TOGETHER = enum.auto()
    ALONE = enum.auto()
    LATER = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """Order to all ranks to write their parts of one checkpoint now."""

    token: str  # tells it apart from others of as many steps
    rank: int  # of this worker
    world_size: int  # ranks that write


class SaveAgreement:
    """Agreement of ranks on how to save: all sum their ballots, and decide the same from the sums.

    What is known without a look at the state rides on the control sums of every step (a ``ControlPart``). So when the
    first rank's wish for a checkpoint comes with the same sums, there is nothing left to agree on. Where models are to
    be made one first, or no step follows, ranks add up what :meth:`ballot` gives in a collective of its own.

    Attributes:
        refusals: ranks that had said in the present group that they never can; 0 where all can, or none was asked.
    """

    def __init__(self) -> None:
        self._writer: PartSaver | None = None
        self._order: SaveOrder | None = None
        self._given_up = False
        self._heard: tuple[float, ...] | None = None
        self.refusals = 0

    def serve(self, writer: PartSaver) -> None:
        """Set the writer of this rank's part."""
        self._writer = writer

    def give_up(self) -> None:
        """Give up joint saving: rank 0 saves alone from now on."""
        self._given_up = True

    def begin(self) -> None:
        """Enter a group, in which agreements of another one do not count."""
        self._order, self._heard, self.refusals = None, None, 0
        if self._writer is not None:
            self._writer.begin()

    @property
    def together(self) -> bool:
        """True if ranks save together, as far as this one knows."""
        return self._writer is not None and not self._given_up and not self.refusals

    def ballot(self, rank: int, world_size: int, *, divided: bool, now: bool) -> list[float]:
        """Return this rank's ballot for the sums; exact in float64.

        Args:
            divided: whether state lies with several ranks; equal on all.
            now: as for ``PartSaver.readiness``.
        """
        self._order = None
        if not divided or world_size == 1:
            return [0.0] * (1 + _RIDING)
        readiness = Readiness.NEVER
        if self._writer is not None and not self._given_up:
            readiness = self._writer.readiness(rank, world_size, now=now)
        return [1.0, *_said(rank, readiness)]

    def decide(self, sums: Sequence[float], rank: int, world_size: int, *, now: bool) -> Saving:
        """Return the mode of saving that the sums decide; the same on all ranks.

        Args:
            sums: of the ballots over all ranks.
            now: as for :meth:`ballot`.
        """
        divided, high, low, not_yet, never = (round(each) for each in sums)
        if divided != world_size:
            return Saving.ALONE
        self.refusals = never
        if never or (now and not_yet):
            return Saving.ALONE
        if not_yet:
            return Saving.LATER
        self._order = SaveOrder(token=f"{(high << _HALF_BITS) + low:09x}", rank=rank, world_size=world_size)
        return Saving.TOGETHER

    def prepare(self, rank: int, world_size: int) -> None:
        """Start what is missing on this rank for a wanted checkpoint."""
        if self._writer is not None and not self._given_up:
            self._writer.readiness(rank, world_size, now=False)

    # -- on the control sums ---------------------------------------------------------------------------------------

    def size(self, world_size: int) -> int:
        """Return the number of values that travel with the control sums.

        Equal in every group, as they shape its buckets.
        """
        return _RIDING

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        """Return this rank's ballot for a checkpoint wanted now."""
        return _NEVER if self._writer is None or self._given_up else _said(rank, self._writer.standing())

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """Receive the sums over all ranks."""
        self._heard = tuple(sums)

    def take_heard(self, world_size: int) -> tuple[float, ...]:
        """Return the latest sums for :meth:`decide`, once; empty where none have come since the last call."""
        heard, self._heard = self._heard, None
        return (float(world_size), *heard) if heard is not None else ()

    def take_order(self) -> SaveOrder | None:
        """Return the order that the ranks have agreed on, and clear it."""
        order, self._order = self._order, None
        return order


_NEVER = (0.0, 0.0, 0.0, 1.0)
"""Contribution of a rank that can never write its part."""


def _said(rank: int, readiness: Readiness) -> list[float]:
    """Return one rank's ballot; rank 0 draws a token once it is ready, sent in two halves."""
    token = 1 + secrets.randbits(2 * _HALF_BITS) if rank == 0 and readiness is Readiness.READY else 0
    halves = [float(token >> _HALF_BITS), float(token & ((1 << _HALF_BITS) - 1))]
    return [*halves, float(readiness is Readiness.NOT_YET), float(readiness is Readiness.NEVER)]
