"""Owners of tiles: all covered, balanced, on different nodes, and few moves when the group changes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from elastic_ray.sync.sharded.placement import Move, RowTiling, from_words, hand_over, lost, moves, place, to_words

Owners = tuple[tuple[int, ...], ...]


def held_by(owners: Owners, world: int) -> list[set[int]]:
    return [{tile for tile, mine in enumerate(owners) if rank in mine} for rank in range(world)]


def fresh(tiles: int, world: int, copies: int, nodes: list[str] | None = None) -> Owners:
    return place(tiles, [set(range(tiles))] * world, nodes or ["n"] * world, copies)


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, list[set[int]], list[str], int]:
    """A table's tiles, what the ranks of a new group hold of them, their nodes, and copies."""
    tiles, copies = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    before = draw(st.integers(1, 6))
    owned = held_by(fresh(tiles, before, copies), before)
    staying = draw(st.lists(st.sampled_from(owned), unique_by=id, min_size=0, max_size=before))
    joiners = draw(st.integers(0 if staying else 1, 4))
    held = [*staying, *(set() for _ in range(joiners))]
    return tiles, held, draw(st.lists(st.sampled_from("ab"), min_size=len(held), max_size=len(held))), copies


@given(changes())
@settings(max_examples=30, deadline=None)
def test_every_tile_is_owned_and_ranks_are_balanced(change: tuple[int, list[set[int]], list[str], int]) -> None:
    tiles, held, nodes, copies = change
    owners = place(tiles, held, nodes, copies)
    assert owners == place(tiles, held, nodes, copies)
    assert all(len(set(mine)) == len(mine) == min(copies, len(held)) for mine in owners)
    loads = [len(each) for each in held_by(owners, len(held))]
    assert len(owners) == tiles and max(loads) - min(loads) <= 1


def most_that_stay(tiles: int, held: list[set[int]], copies: int) -> int:
    """Copies that the best balanced placement leaves where they are (its linear program has integral solutions)."""
    world = len(held)
    copies = min(copies, world)
    each, more = divmod(tiles * copies, world)
    of_rank, of_tile = np.kron(np.ones(tiles), np.eye(world)), np.kron(np.eye(tiles), np.ones(world))
    found = linprog(
        [-float(tile in mine) for tile in range(tiles) for mine in held],
        A_ub=np.vstack([of_rank, -of_rank]),
        b_ub=[each + (more > 0)] * world + [-each] * world,
        A_eq=of_tile,
        b_eq=[copies] * tiles,
        bounds=(0, 1),
    )
    return round(-found.fun)


LOW, HIGH = set(range(10)), set(range(10, 20))
THIRDS = [set(range(16)), set(range(9, 24)), set(range(24, 39))]


@given(changes())
@example((20, [LOW, LOW, HIGH, LOW], ["n"] * 4, 3))  # balance and three owners a tile leave 35 of 40
@example((39, THIRDS, ["n"] * 3, 2))  # moved 11 that could stay
@example((37, [set(range(28)), set(), set(), set(), set()], ["n"] * 5, 3))  # 8
@settings(max_examples=30, deadline=None)
def test_on_one_node_nothing_moves_that_could_stay(change: tuple[int, list[set[int]], list[str], int]) -> None:
    tiles, held, _, copies = change
    owners = place(tiles, held, ["n"] * len(held), copies)
    kept = sum(rank in mine for tile, mine in enumerate(owners) for rank, each in enumerate(held) if tile in each)
    # Which ranks own one more is decided before: that may cost a copy a rank.
    assert kept > most_that_stay(tiles, held, copies) - len(held)


@given(changes())
@settings(max_examples=30, deadline=None)
def test_moves_bring_each_owner_what_it_does_not_hold(change: tuple[int, list[set[int]], list[str], int]) -> None:
    tiles, held, nodes, copies = change
    gone = lost(tiles, held)
    owners = place(tiles, held, nodes, copies)
    if gone:
        held[0] |= set(gone)
    after = [set(each) for each in held]
    for move in moves(held, owners):
        assert move.tile in held[move.source] and move.tile not in held[move.destination]
        after[move.destination].add(move.tile)
    assert all(tile in after[rank] for tile, mine in enumerate(owners) for rank in mine)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3), st.data())
@settings(max_examples=30, deadline=None)
def test_leavers_hand_over_what_only_they_own(tiles: int, world: int, copies: int, data: st.DataObject) -> None:
    owners = fresh(tiles, world, copies)
    stays = data.draw(st.lists(st.booleans(), min_size=world, max_size=world).filter(any))
    held = [set(each) if stay else set() for each, stay in zip(held_by(owners, world), stays, strict=True)]
    for move in hand_over(owners, stays):
        assert stays[move.destination] and not stays[move.source] and move.source in owners[move.tile]
        assert not any(move.tile in each for each in held)
        held[move.destination].add(move.tile)
    assert not lost(tiles, held)


def test_as_many_copies_as_asked_for_stay() -> None:
    assert hand_over([(0, 1), (1, 2)], [False, True, True, True], 2) == (Move(0, 0, 3),)
    assert hand_over([(0, 1), (1, 2)], [False, False, True], 2) == (Move(0, 0, 2),)


def test_what_is_handed_over_goes_to_the_least_loaded() -> None:
    owners = [(0,), (0,), (0,), (0,), (1,), (1,)]
    destinations = [move.destination for move in hand_over(owners, [False, True, True, True])]
    assert Counter([*destinations, 1, 1]) == {1: 2, 2: 2, 3: 2}


def test_ranks_that_own_more_are_handed_nothing_at_first() -> None:
    owners = [(0,), (0,), (0,), (1,), (1,), (1,), (2,)]
    destinations = [move.destination for move in hand_over(owners, [False, True, True])]
    assert destinations == [2, 2, 1], "each copy weighs one"
    shared = [(0,), (1, 2), (1, 2), (1,)]
    assert [move.destination for move in hand_over(shared, [False, True, True])] == [2], "second copies count, too"


@pytest.mark.parametrize("nodes", ["ab", "aabb", "abab", "abc", "aabbcc", "aabc"])
def test_copies_are_on_different_nodes_without_majorities(nodes: str) -> None:
    owners = fresh(64, len(nodes), 2, list(nodes))
    assert all(len({nodes[rank] for rank in mine}) == 2 for mine in owners)


@given(st.lists(st.sets(st.integers(0, 7)), min_size=4, max_size=4), st.sampled_from(["abab", "aabb"]))
def test_copies_come_to_different_nodes_whatever_was_held(held: list[set[int]], nodes: str) -> None:
    for owners in (place(8, held, list(nodes), 2), place(8, [set(range(8)), set(), set(), set()], list(nodes), 2)):
        assert all({nodes[rank] for rank in mine} == {"a", "b"} for mine in owners)


def test_balance_comes_before_different_nodes() -> None:
    owners = fresh(64, 4, 2, list("aaab"))
    assert Counter(rank for mine in owners for rank in mine) == dict.fromkeys(range(4), 32)
    assert sum(3 in mine for mine in owners) == 32


def test_two_to_four_to_three_moves_few_tiles() -> None:
    owners = fresh(256, 2, 1)
    held = [*held_by(owners, 2), set(), set()]
    grown = place(256, held, ["n"] * 4, 1)
    assert len(moves(held, grown)) == 128  # the joiners' share, and nothing else
    held = held_by(grown, 4)[:3]
    for move in hand_over(grown, [True, True, True, False]):
        held[move.destination].add(move.tile)
    assert len(moves(held, place(256, held, ["n"] * 3, 1))) <= 2


def test_loss_is_covered_by_second_owners_and_copies_return() -> None:
    owners = fresh(256, 4, 2, list("aabb"))
    held = held_by(owners, 4)
    del held[2]
    assert not lost(256, held)
    after = place(256, held, list("aab"), 2)
    assert len(moves(held, after)) < 256 * 0.75
    assert len(lost(256, held_by(fresh(256, 4, 1), 4)[1:])) == 64


def test_first_owners_answer_in_turn() -> None:
    first = Counter(mine[0] for mine in fresh(256, 4, 2))
    assert max(first.values()) - min(first.values()) <= 26


@given(st.sets(st.integers(0, 99)))
def test_words_hold_sets_of_tiles(tiles: set[int]) -> None:
    assert from_words(to_words(tiles, 100), 100) == tiles


@given(st.integers(1, 2000))
def test_tiles_have_all_rows(rows: int) -> None:
    tiling = RowTiling.of(rows)
    assert sum(tiling.rows_in(tile) for tile in range(tiling.tiles)) == rows
    assert max(tiling.rows_in(tile) for tile in range(tiling.tiles)) == tiling.height
