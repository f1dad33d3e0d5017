"""Along which axis each tensor is divided among several collectives (pure)."""

from __future__ import annotations

import random
from collections.abc import Sequence


def partition_axis(shape: Sequence[int], axis: int, seed: int, place: int) -> int:
    """The axis along which a tensor is divided, 0 for one that has none.

    Args:
        shape: of the tensor.
        axis: that of ``Reduce``: the wanted one, the tensor's last where it has fewer, or -1 for a choice of the seed
            among those that can be divided (AutoDist: RandomAxisPartitionAR).
        seed: of the choice.
        place: the tensor's position in the model; it makes the choice another one for each.
    """
    if axis >= 0:
        return max(0, min(axis, len(shape) - 1))
    divisible = [number for number, size in enumerate(shape) if size > 1]
    return random.Random(f"{seed}/{place}").choice(divisible) if divisible else 0
