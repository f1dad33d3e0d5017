"""How ranks find out from sums alone whether all of them say the same (pure)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


def agreed_generations_ahead(sum_of_distances: float, sum_of_squares: float, world_size: int) -> int:
    """Whether all ranks have prepared the same next generation, from two sums over the ranks.

    Each rank contributes d, how many generations ahead of the present one its prepared group is (0 for none), and
    d squared. All d are equal exactly when ``world_size`` x sum(d^2) = sum(d)^2 (Cauchy-Schwarz).

    Returns:
        The common d, 0 where the ranks do not agree (yet).
    """
    total, squares = round(sum_of_distances), round(sum_of_squares)
    return total // world_size if total > 0 and world_size * squares == total * total else 0


def names_ballot(names: Sequence[tuple[tuple[int, int], str]]) -> list[float]:
    """A digest d of the sums that a rank adds to, d squared, their number and its square; exact in float64."""
    digest, count = zlib.crc32(repr(list(names)).encode()) & 0xFFFFF, len(names)
    return [float(digest), float(digest * digest), float(count), float(count * count)]


def names_agree(sums: Sequence[float], world_size: int) -> bool:
    """Whether all ranks have the same digest and number by the sums of their ballots, as in
    :func:`agreed_generations_ahead`."""
    return all(world_size * round(b) == round(a) ** 2 for a, b in zip(sums[::2], sums[1::2], strict=True))
