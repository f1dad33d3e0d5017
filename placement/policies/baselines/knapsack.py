"""One size for each job so that the sum of worths is largest: dynamic programming over the slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizeOptions:
    """What one job may have.

    Attributes:
        sizes: workers of each option, 1 or more.
        worth: what each is worth; larger is better.
        stays: whether the first option is the job's present place.
    """

    sizes: tuple[int, ...]
    worth: NDArray[np.float64]
    stays: bool = False

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"sizes must hold one size of 1 or more, but got {self.sizes}")
        if len(self.sizes) != len(self.worth):
            raise ValueError(f"worth must have {len(self.sizes)} entries, one a size, but has {len(self.worth)}")


def knapsack(choices: Sequence[SizeOptions], slots: int) -> list[int]:
    """Index of the option of each job, exactly the best sum; of equal options the first.

    f_j(g) = max over options o of worth_j(o) + f_{j-1}(g - size_j(o)); every job gets an option.

    Raises:
        ValueError: even the smallest options do not fit together.
    """
    if sum(min(choice.sizes) for choice in choices) > slots:
        raise ValueError(f"slots must hold the smallest sizes of all {len(choices)} jobs, but got {slots}")
    best = np.zeros(slots + 1)
    picks: list[NDArray[np.int16]] = []
    for choice in choices:
        rows = np.full((len(choice.sizes), slots + 1), -np.inf)
        for row, size, worth in zip(rows, choice.sizes, choice.worth, strict=True):
            if size <= slots:
                row[size:] = best[: slots + 1 - size] + worth
        pick = rows.argmax(axis=0).astype(np.int16)
        best = rows[pick, np.arange(slots + 1)]
        picks.append(pick)
    chosen: list[int] = []
    left = int(np.argmax(best))
    for choice, pick in zip(reversed(choices), reversed(picks), strict=True):
        chosen.append(int(pick[left]))
        left -= choice.sizes[chosen[-1]]
    return chosen[::-1]
