"""Unequal shares of a step: how many samples each rank takes when some ranks are slower than others (pure).

Only additions, multiplications and divisions are used, which IEEE 754 fixes to the last bit, so that ranks on machines
of different kinds come to the same sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

_ROUNDS = 64  # of bisection: more than a double has bits
_LEAST = 2  # samples of a micro-batch: BatchNorm cannot do with one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Weights of ranks for unequal shares of a step, with the least and most samples of a rank.

    Attributes:
        weights: of the ranks, each above 0; a rank of weight 0.5 takes half as many samples as one of weight 1.
        least: fewest samples of a micro-batch, where an equal split has so many.
        most: most samples of a micro-batch, where an equal split has no more; None for no bound.

    Raises ValueError: a weight is not above 0 and finite, or a bound is below 1.
    """

    weights: tuple[float, ...]
    least: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        if not self.weights or any(not (weight > 0 and math.isfinite(weight)) for weight in self.weights):
            raise ValueError(f"weights must hold a number above 0 for each rank, but got {self.weights}")
        for name in ("least", "most"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 sample or more, but got {value}")


def by_weight(count: int, shares: Shares, micro_steps: int) -> list[int]:
    """Samples of each rank, so that the largest of samples / weight is as small as it can be.

    With weights in proportion to the ranks' speeds this is the cut with the shortest step (Jefferson's method of
    apportionment within bounds). Equal weights give the equal split, larger shares first.

    Args:
        count: samples of the step, at least ranks x micro_steps.
        shares: weights and bounds.
        micro_steps: micro-batches of each rank; every one gets a sample at least.

    Returns one size of ``micro_steps`` or more for each rank; together they are ``count``.
    """
    ranks = len(shares.weights)
    even = count // (ranks * micro_steps)
    low = micro_steps * max(1, min(max(shares.least, _LEAST), even))
    high = count if shares.most is None else max(micro_steps * shares.most, -(-count // ranks))

    def sizes(times: float) -> list[int]:
        return [max(low, min(high, int(times * weight))) for weight in shares.weights]

    short, long = 0.0, count / min(shares.weights) + 1.0
    for _ in range(_ROUNDS):
        middle = (short + long) / 2.0
        short, long = (middle, long) if sum(sizes(middle)) <= count else (short, middle)
    found = sizes(short)
    for _ in range(count - sum(found)):
        _give_one(found, shares.weights, high)
    return found


def _give_one(sizes: list[int], weights: Sequence[float], high: int) -> None:
    """Give one more sample to the rank that has it done first."""
    open_ranks = [rank for rank, size in enumerate(sizes) if size < high]
    sizes[min(open_ranks, key=lambda rank: (sizes[rank] + 1) / weights[rank])] += 1
