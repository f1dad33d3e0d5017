"""Which rows lie where, and which move: nothing is lost, and nothing moves that is there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ray.sync.sharded_parameters.row_layout import (
    Piece,
    ShardId,
    covered,
    from_code,
    hand_over,
    lost,
    moves,
    pieces_of,
    rows_of,
    shards_of,
    to_code,
)

ROWS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def held_in(world: int) -> list[set[ShardId]]:
    return [set(shards_of(world, rank)) for rank in range(world)]


def cells(shards: set[ShardId], rows: list[int]) -> set[tuple[int, int]]:
    return {(p.param, row) for s in shards for p in pieces_of(rows, s) for row in range(p.start, p.stop)}


@given(rows=st.integers(1, 100), world=st.integers(1, 12))
def test_rows_are_cut_as_torch_cuts_them(rows: int, world: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.chunk(torch.arange(rows), world)]
    chunks += [[]] * (world - len(chunks))
    for index, chunk in enumerate(chunks):
        assert list(range(*rows_of(rows, ShardId(world, index)))) == chunk


@given(rows=ROWS, before=st.integers(1, 7), data=st.data())
@settings(max_examples=200, deadline=None)
def test_after_any_change_each_rank_holds_its_shards_and_received_only_what_it_lacked(
    rows: list[int], before: int, data: st.DataObject
) -> None:
    old = held_in(before)
    survivors = data.draw(st.lists(st.sampled_from(range(before)), min_size=1, unique=True))
    joiners = data.draw(st.integers(0, 4))
    held: list[set[ShardId]] = [old[rank] for rank in survivors] + [set() for _ in range(joiners)]
    gone = lost(rows, held)
    everything = {(param, row) for param, count in enumerate(rows) for row in range(count)}
    assert {(p.param, r) for p in gone for r in range(p.start, p.stop)} == everything - cells(set().union(*held), rows)
    if gone:
        with pytest.raises(ValueError, match="every row must have a holder"):
            moves(rows, held)
        return
    have = [cells(mine, rows) for mine in held]
    received: list[set[tuple[int, int]]] = [set() for _ in held]
    for move in moves(rows, held):
        moved = {(move.piece.param, row) for row in range(move.piece.start, move.piece.stop)}
        assert moved and moved <= have[move.source], "from one that has it"
        assert not moved & (have[move.destination] | received[move.destination]), "to one that lacks it, once"
        received[move.destination] |= moved
    for rank, mine in enumerate(received):
        wanted = cells(set(shards_of(len(held), rank)), rows)
        assert mine == wanted - have[rank], "all that is needed, and nothing else"


@given(rows=ROWS, world=st.integers(2, 8), data=st.data())
def test_one_loss_of_any_rank_loses_no_row_and_two_neighbours_lose_some(
    rows: list[int], world: int, data: st.DataObject
) -> None:
    held = held_in(world)
    dead = data.draw(st.integers(0, world - 1))
    assert not lost(rows, [mine for rank, mine in enumerate(held) if rank != dead])
    neighbours = {dead, (dead + 1) % world}
    left = [mine for rank, mine in enumerate(held) if rank not in neighbours]
    owned = pieces_of(rows, ShardId(world, dead))
    assert lost(rows, left) or not owned or not left or world == 2


@given(rows=ROWS, world=st.integers(2, 8), data=st.data())
def test_leavers_hand_over_so_that_one_more_loss_loses_nothing(
    rows: list[int], world: int, data: st.DataObject
) -> None:
    stays = data.draw(st.lists(st.booleans(), min_size=world, max_size=world).filter(any))
    held = held_in(world)
    before = [set(mine) for mine in held]
    for shard, source, destination in hand_over(held, stays):
        assert shard in before[source] and stays[destination] and shard not in held[destination]
        assert not stays[source] or not any(shard in before[rank] for rank in range(world) if not stays[rank])
        held[destination].add(shard)
    left = [held[rank] for rank in range(world) if stays[rank]]
    assert not lost(rows, left)
    for dead in range(len(left)):
        assert len(left) == 1 or not lost(rows, left[:dead] + left[dead + 1 :])
    assert all(stays) is False or held == before


def test_senders_share_the_work() -> None:
    held = [{ShardId(1, 0)}, {ShardId(1, 0)}, set(), set()]
    sent = [0, 0]
    for move in moves([40, 40], held):
        sent[move.source] += move.piece.stop - move.piece.start
    assert sent[0] == sent[1] == 40


def test_a_shard_has_a_code() -> None:
    assert from_code(to_code(ShardId(17, 3))) == ShardId(17, 3)
    with pytest.raises(ValueError, match="from 0 to -1"):
        from_code(0)


def test_ranges_that_touch_are_one() -> None:
    assert covered([10], [ShardId(2, 0), ShardId(2, 1)]) == [[(0, 10)]]
    assert pieces_of([1, 4], ShardId(4, 2)) == (Piece(1, 2, 3),)
