"""Who meets whom: everyone meets everyone once a tournament, whatever the number of ranks."""

from __future__ import annotations

import collections

import pytest

from elastic_ray.sync.averaging.algorithms import pairs


@pytest.mark.parametrize("world", range(1, 12))
def test_pairs_are_disjoint_and_mutual(world: int) -> None:
    for meeting in range(40):
        partners = pairs(meeting, world)
        assert len(partners) == world
        assert all(
            partner is None or (partner != rank and partners[partner] == rank) for rank, partner in enumerate(partners)
        )
        assert partners.count(None) == world % 2, "of an odd number of ranks one rests"


@pytest.mark.parametrize("world", range(2, 12))
def test_everyone_meets_everyone_once_a_tournament(world: int) -> None:
    turns = world - 1 + world % 2
    for tournament in range(4):
        met: collections.Counter[tuple[int, int | None]] = collections.Counter()
        for turn in range(turns):
            met.update(enumerate(pairs(tournament * turns + turn, world)))
        others = [(rank, other) for rank in range(world) for other in range(world) if other != rank]
        rests = [(rank, None) for rank in range(world)] if world % 2 else []
        assert met == collections.Counter([*others, *rests])


def test_order_changes_from_tournament_to_tournament_and_with_seed() -> None:
    assert len({tuple(pairs(3 * tournament, 4)) for tournament in range(20)}) == 3
    assert [pairs(meeting, 8) for meeting in range(7)] != [pairs(meeting, 8, seed=1) for meeting in range(7)]


def test_a_ranks_model_reaches_all_others_in_a_tournament() -> None:
    for world in (4, 5, 8):
        values = [[float(rank == own) for own in range(world)] for rank in range(world)]
        for meeting in range(world - 1 + world % 2):
            partners = pairs(meeting, world)
            values = [
                own if partner is None else [(a + b) / 2 for a, b in zip(own, values[partner], strict=True)]
                for own, partner in zip(values, partners, strict=True)
            ]
        assert all(share > 0 for row in values for share in row)
        assert all(abs(sum(row[own] for row in values) - 1.0) < 1e-12 for own in range(world)), "the mean stays"
