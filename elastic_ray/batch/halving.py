"""Splitting of a lone worker's steps into two halves, to measure the noise of its gradient (pure).

One worker with one micro-batch has one gradient per step, which says nothing about its noise. Two successive gradients
are not a substitute, because the model has moved between them. This adds ||G' - G||^2 / 2 to the variance, a term that
grows with the batch and the learning rate until it looks like infinite noise. Two halves of one batch see the same
weights, and their weighted mean is the step's gradient. The only cost is the time for one more forward and backward
pass.
"""

from __future__ import annotations

import dataclasses
import math

SPACINGS = ((0, 4), (32, 8), (128, 16), (1024, 32))
"""(steps at one batch from which it counts, one in how many is halved): most is to be learnt after a change."""

UNHALVED_STEPS = 2
"""First steps at a batch, none of which is halved: a loop that adds up gradients over several steps shows in these."""

LEAST_HALF = 2
"""Fewest samples of a half; BatchNorm cannot do with one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Halving:
    """Schedule of the steps that a lone worker splits into two halves, to measure gradient noise at one batch size.

    No step before ``since`` is halved. Without ``adapts``, the spacing is counted from step 0, so that a monitor can
    name the steps it needs.

    Example:
        >>> halving = Halving(since=0, adapts=True)
        >>> [step for step in range(64) if halving.due(step, samples=16)]
        [0, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56]
    """

    since: int = 0  # committed steps when the first may be halved; 0 or more
    adapts: bool = False  # whether the batch, or the learning rate for it, follows the noise: then ``SPACINGS`` hold
    every: int | None = None  # steps from one measurement to the next that a monitor asks for at most; None for no wish
    least: int = LEAST_HALF  # fewest samples of a half

    @property
    def _phases(self) -> list[tuple[float, float, int]]:
        """Phases as (first step, end, spacing), in steps from the first that counts."""
        most = self.every or SPACINGS[-1][1]
        if not self.adapts:
            return [(0, math.inf, most)]
        ends = [begin for begin, _ in SPACINGS[1:]] + [math.inf]
        return [(begin, end, min(spacing, most)) for (begin, spacing), end in zip(SPACINGS, ends, strict=True)]

    def due(self, step: int, samples: int) -> bool:
        """True if the step after ``step`` committed steps must be split into two halves of at least ``least``."""
        return self.count(step, step + 1, samples) > 0

    def count(self, first: int, last: int, samples: int) -> int:
        """Return how many of the steps ``first`` to ``last`` - 1 are halved, with ``samples`` samples per step."""
        if samples < 2 * self.least:
            return 0
        start = self.since if self.adapts else 0
        low, high = max(first, self.since) - start, max(last, self.since) - start
        found = 0
        for begin, end, spacing in self._phases:
            one, other = max(low, begin), min(high, end)
            if one < other:
                found += -(-int(other - begin) // spacing) - -(-int(one - begin) // spacing)
        return found
