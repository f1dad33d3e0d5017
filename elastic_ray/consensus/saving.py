"""Agreement on a checkpoint: after a step, either each rank writes a part, or rank 0 writes all of it (pure)."""

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
_NEVER = (0.0, 0.0, 0.0, 1.0)
"""Contribution of a rank that can never write its part."""


class Readiness(enum.Enum):
    """Readiness of a rank to write its part of a checkpoint: now, later, or never."""

    READY = enum.auto()
    NOT_YET = enum.auto()
    NEVER = enum.auto()


class Saving(enum.Enum):
    """Way to save a checkpoint: all ranks together (each its own part), rank 0 alone, or later."""

    TOGETHER = enum.auto()
    ALONE = enum.auto()
    LATER = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """Order to write this rank's part of a checkpoint now; all ranks receive the order at the same step."""

    token: str  # tells it apart from others of as many steps
    rank: int  # of this worker
    world_size: int  # ranks that write


class SaveAgreement:
    """Agreement between ranks on how to save: they sum their ballots and draw the same conclusion from the sums.

    Ballots that need no inspection of the state are sent with each step's control sums (as a ``ControlPart``). No
    further agreement is needed if rank 0's request for a checkpoint arrives in the same sums. If models must first be
    made identical, or no step follows, the ranks sum the results of :meth:`ballot` in a separate collective.

    Attributes:
        refusals: Number of ranks in the current group that can never write their part; 0 before they have been asked.
    """

    def __init__(self) -> None:
        self._writer: PartSaver | None = None
        self._order: SaveOrder | None = None
        self.given_up = False  # rank 0 saves alone from now on
        self.resting: Sequence[float] | None = _NEVER  # until it has a writer
        self._heard: tuple[float, ...] | None = None
        self.refusals = 0

    def serve(self, writer: PartSaver) -> None:
        """Set ``writer``, the object that writes this rank's part of checkpoints."""
        self._writer, self.resting = writer, None

    def start(self) -> None:
        """Enter a new group and discard the previous group's agreements."""
        self._order, self._heard, self.refusals = None, None, 0
        if self._writer is not None:
            self._writer.start()

    @property
    def together(self) -> bool:
        """True if, as far as this rank knows, each rank can write a part; if False, rank 0 saves alone."""
        return self._writer is not None and not self.given_up and not self.refusals

    def ballot(self, rank: int, world_size: int, *, divided: bool, now: bool) -> list[float]:
        """Return this rank's ballot (its readiness to save, as numbers exact in float64), for :meth:`decide`.

        Args:
            divided: True if the state is divided among ranks; the same on all ranks.
            now: True if the checkpoint must be written now, so that a rank that is not ready yet cannot take part.
        """
        self._order = None
        if not divided or world_size == 1:
            return [0.0] * (1 + _RIDING)
        readiness = Readiness.NEVER
        if self._writer is not None and not self.given_up:
            readiness = self._writer.readiness(rank, world_size, now=now)
        return [1.0, *_said(rank, readiness)]

    def decide(self, sums: Sequence[float], rank: int, world_size: int, *, now: bool) -> Saving:
        """Return the way to save that results from the summed ballots; the same on all ranks."""
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
        """Start the preparations that this rank still needs for a requested checkpoint."""
        if self._writer is not None and not self.given_up:
            self._writer.readiness(rank, world_size, now=False)

    # -- on the control sums ---------------------------------------------------------------------------------------

    def size(self, world_size: int) -> int:
        """Return the number of values that are sent with the control sums.

        The number is constant, because it affects the layout of gradient buckets.
        """
        return _RIDING

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        """Return this rank's ballot, sent with every step in case rank 0 requests a checkpoint in the same sums."""
        return _NEVER if self._writer is None or self.given_up else _said(rank, self._writer.standing())

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """Store the ballots summed over all ranks, for :meth:`pop_sums`."""
        self._heard = tuple(sums)

    def pop_sums(self, world_size: int) -> tuple[float, ...]:
        """Return the latest sums for :meth:`decide`, and clear them; empty if none have arrived since the last call."""
        heard, self._heard = self._heard, None
        return (float(world_size), *heard) if heard is not None else ()

    def pop_order(self) -> SaveOrder | None:
        """Return the order to write this rank's part, and clear it; None if there is none."""
        order, self._order = self._order, None
        return order


def _said(rank: int, readiness: Readiness) -> list[float]:
    """Return one rank's ballot. Once ready, rank 0 draws a token, which is sent in two halves."""
    token = 1 + secrets.randbits(2 * _HALF_BITS) if rank == 0 and readiness is Readiness.READY else 0
    halves = [float(token >> _HALF_BITS), float(token & ((1 << _HALF_BITS) - 1))]
    return [*halves, float(readiness is Readiness.NOT_YET), float(readiness is Readiness.NEVER)]
