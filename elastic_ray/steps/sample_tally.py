"""Tally of the samples that a step has used, summed over ranks with the control values (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from elastic_ray.state.proof import BITS

if TYPE_CHECKING:
    from elastic_ray.steps.ledger import StepLedger
    from elastic_ray.steps.step import LoaderStep

# Three parts of 11 bits: their sums over 8192 ranks are exact in float32.
_PARTS, _WIDTH = 3, 11
_MASK = (1 << _WIDTH) - 1


class SampleTally:
    """A ``ControlPart``: each rank tells the hashes of the samples that its loader has handed out for the step.

    Args:
        ledger: knows the step in progress.
    """

    def __init__(self, ledger: StepLedger) -> None:
        self._ledger = ledger
        self._heard: int | None = None
        self._ended: LoaderStep | None = None

    def begin(self) -> None:
        """Enter a group."""
        self._heard = None

    def size(self, world_size: int) -> int:
        """Return the number of values; a rank alone has as many, so that its buckets stay when others come."""
        return _PARTS

    def end(self, step: LoaderStep) -> None:
        """Record the ended step, whose vote follows."""
        self._ended = step

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        """Return this rank's sum, in parts."""
        step = self._ledger.outermost or self._ended
        own = 0 if step is None or step.hashed is None else step.hashed()
        return [float(own >> _WIDTH * part & _MASK) for part in range(_PARTS)]

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """Take the sums over all ranks."""
        self._heard = sum(round(each) << _WIDTH * part for part, each in enumerate(sums)) & BITS

    def take(self, step: LoaderStep, world_size: int) -> int | None:
        """Return the sum of the hashes of a committed step's samples, modulo 2^32; None where it is not known."""
        heard, self._heard, self._ended = self._heard, None, None
        if step.hashed is None:
            return None
        return step.hashed() if world_size == 1 else heard
