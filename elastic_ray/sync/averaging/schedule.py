"""Who meets whom when models are averaged in pairs: a tournament, as a function of numbers all ranks share (pure)."""

from __future__ import annotations

import random


def pairs(meeting: int, world_size: int, seed: int = 0) -> list[int | None]:
    """The partner of each rank in one meeting; None for one that rests.

    ``world_size - 1`` meetings (of an odd number of ranks ``world_size``, each with another rank that rests) make a
    tournament in which everyone meets everyone once, by the circle method: one stays, the others go round. Every
    tournament has another order, drawn from the seed and its number alone.

    Args:
        meeting: number of the meeting, from 0.
        world_size: ranks, 1 or more.
        seed: of the orders.

    >>> pairs(0, 4) == pairs(0, 4)
    True
    >>> sorted(pairs(0, 2))
    [0, 1]
    """
    seats = world_size + world_size % 2
    if seats == 0 or world_size == 1:
        return [None] * world_size
    tournament, turn = divmod(meeting, seats - 1)
    order = list(range(seats))
    random.Random(f"{seed}/{world_size}/{tournament}").shuffle(order)
    circle = [order[0], *order[1 + turn :], *order[1 : 1 + turn]]
    partners: list[int | None] = [None] * world_size
    for one, other in zip(circle[: seats // 2], reversed(circle[seats // 2 :]), strict=True):
        if max(one, other) < world_size:
            partners[one], partners[other] = other, one
    return partners
