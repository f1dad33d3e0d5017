"""Which rank evaluates which batch, where batches stay whole? Pure arithmetic, the same on every rank.

The batches of a pass lie one after the other in its order; batch ``b`` ends at sample ``ends[b]``. A step takes the
next ``world_size`` batches, one for each rank, so position is always the end of a batch, and a group of any size can go
on from it. Only the last step may have fewer batches than ranks; its last ranks have none.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def batch_ends(samples: int, batch_size: int, *, drop_last: bool) -> list[int]:
    """Where batches of ``batch_size`` end in an order of ``samples``; the last one may be shorter, or is dropped.

    >>> batch_ends(7, 3, drop_last=False), batch_ends(7, 3, drop_last=True)
    ([3, 6, 7], [3, 6])
    """
    ends = list(range(batch_size, samples + 1, batch_size))
    return ends if drop_last or samples % batch_size == 0 else [*ends, samples]


def whole_step(ends: Sequence[int], *, position: int, world_size: int) -> list[tuple[int, int]]:
    """First and last + 1 sample of each rank's batch in the step at ``position``; shorter than ``world_size`` for
    ranks without one, empty at the end of the pass.

    Raises:
        ValueError: ``position`` is not where a batch begins.

    >>> whole_step([3, 6, 7], position=3, world_size=4)
    [(3, 6), (6, 7)]
    """
    first = bisect.bisect_right(ends, position)
    begin = ends[first - 1] if first else 0
    if begin != position:
        raise ValueError(
            f"position must be where a batch begins, but got {position}, within the batch from {begin} on: "
            "the batches of this pass are not those with which it began"
        )
    step = ends[first : first + world_size]
    return list(zip([position, *step], step, strict=False))


def batches_of(count: int, *, rank: int, world_size: int) -> int:
    """How many of a pass's ``count`` batches a rank takes, if the group keeps its size."""
    return len(range(rank, count, world_size))
