"""Which rows lie where, and which move: nothing is lost, and nothing moves that is there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ray.sync.sharded.placement import hand_over
from elastic_ray.sync.sharded_parameters.row_layout import (
    COPIES,
    Layout,
    Piece,
    RowMove,
    ShardId,
    by_pair,
    check_shard_sizes,
    covered,
    from_code,
    layout_of,
    lost,
    meanwhile,
    moves,
    pieces_of,
    rows_of,
    to_code,
)
from placement.cluster.sizes import MemoryNeed

ROWS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


LAYOUTS = st.builds(
    lambda world, size, nodes: layout_of(world, size, nodes[:world]),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(2, 4)),
    st.lists(st.sampled_from("abc"), min_size=8, max_size=8),
)


def held_in(layout: Layout) -> list[set[ShardId]]:
    return [set(layout.held_by(rank)) for rank in range(layout.world)]


def cells(shards: set[ShardId], rows: list[int]) -> set[tuple[int, int]]:
    return {(p.param, row) for s in shards for p in pieces_of(rows, s) for row in range(p.start, p.stop)}


@given(rows=st.integers(1, 100), world=st.integers(1, 12))
def test_rows_are_cut_as_torch_cuts_them(rows: int, world: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.chunk(torch.arange(rows), world)]
    chunks += [[]] * (world - len(chunks))
    for index, chunk in enumerate(chunks):
        assert list(range(*rows_of(rows, ShardId(world, index)))) == chunk


@given(rows=ROWS, before=LAYOUTS, size=st.sampled_from([None, 2, 3]), data=st.data())
@settings(max_examples=200, deadline=None)
def test_after_any_change_ranks_hold_shards_receiving_only_missing(
    rows: list[int], before: Layout, size: int | None, data: st.DataObject
) -> None:
    old = held_in(before)
    survivors = data.draw(st.lists(st.sampled_from(range(before.world)), min_size=1, unique=True))
    joiners = data.draw(st.integers(0, 4))
    held: list[set[ShardId]] = [old[rank] for rank in survivors] + [set() for _ in range(joiners)]
    after = layout_of(len(held), size)
    gone = lost(rows, held)
    everything = {(param, row) for param, count in enumerate(rows) for row in range(count)}
    assert {(p.param, r) for p in gone for r in range(p.start, p.stop)} == everything - cells(set().union(*held), rows)
    if gone:
        held[0] = held[0] | {ShardId(1, 0)}
    have = [cells(mine, rows) for mine in held]
    received: list[set[tuple[int, int]]] = [set() for _ in held]
    for move in moves(rows, held, after):
        moved = {(move.piece.param, row) for row in range(move.piece.start, move.piece.stop)}
        assert moved and moved <= have[move.source], "from one that has it"
        assert not moved & (have[move.destination] | received[move.destination]), "to one that lacks it, once"
        received[move.destination] |= moved
    for rank, mine in enumerate(received):
        wanted = cells(set(after.held_by(rank)), rows)
        assert mine == wanted - have[rank], "all that is needed, and nothing else"


@given(rows=ROWS, layout=LAYOUTS.filter(lambda each: each.world > 1), data=st.data())
def test_a_loss_loses_no_row_with_a_living_holder(rows: list[int], layout: Layout, data: st.DataObject) -> None:
    held = held_in(layout)
    for dead in range(layout.world):
        assert not lost(rows, [mine for rank, mine in enumerate(held) if rank != dead])
    index = data.draw(st.integers(0, layout.parts - 1))
    holders = layout.holders(index)
    assert [ShardId(layout.parts, index) in mine for mine in held] == [rank in holders for rank in range(layout.world)]
    left = [mine for rank, mine in enumerate(held) if rank not in holders]
    assert lost(rows, left) or not pieces_of(rows, ShardId(layout.parts, index))


@given(rows=ROWS, world=st.integers(2, 8), data=st.data())
def test_in_one_group_two_neighbours_lose_some(rows: list[int], world: int, data: st.DataObject) -> None:
    held = held_in(layout_of(world))
    dead = data.draw(st.integers(0, world - 1))
    assert not lost(rows, [mine for rank, mine in enumerate(held) if rank != dead])
    neighbours = {dead, (dead + 1) % world}
    left = [mine for rank, mine in enumerate(held) if rank not in neighbours]
    owned = pieces_of(rows, ShardId(world, dead))
    assert lost(rows, left) or not owned or not left or world == 2


@given(rows=ROWS, layout=LAYOUTS.filter(lambda each: each.world > 1), data=st.data())
def test_leavers_hand_over_so_that_losses_lose_nothing(rows: list[int], layout: Layout, data: st.DataObject) -> None:
    world = layout.world
    stays = data.draw(st.lists(st.booleans(), min_size=world, max_size=world).filter(any))
    held = held_in(layout)
    before = [set(mine) for mine in held]
    for move in hand_over([layout.holders(index) for index in range(layout.parts)], stays, COPIES):
        shard = ShardId(layout.parts, move.tile)
        assert shard in before[move.source] and stays[move.destination] and shard not in held[move.destination]
        assert not stays[move.source] or not any(shard in before[rank] for rank in range(world) if not stays[rank])
        held[move.destination].add(shard)
    left = [held[rank] for rank in range(world) if stays[rank]]
    assert not lost(rows, left)
    for dead in range(len(left)):
        assert len(left) == 1 or not lost(rows, left[:dead] + left[dead + 1 :])
    assert all(stays) is False or held == before


@given(rows=ROWS, before=LAYOUTS, size=st.sampled_from([None, 2, 3]), data=st.data())
@settings(max_examples=200, deadline=None)
def test_those_with_rows_follow_until_others_received_them(
    rows: list[int], before: Layout, size: int | None, data: st.DataObject
) -> None:
    survivors = data.draw(st.lists(st.sampled_from(range(before.world)), min_size=1, unique=True))
    held = [held_in(before)[rank] for rank in survivors] + [set[ShardId]() for _ in range(data.draw(st.integers(0, 4)))]
    target = layout_of(len(held), size)
    if lost(rows, held):
        return
    first = meanwhile(rows, held, target)
    assert [first.owned_by(rank) for rank in range(first.world)] == [
        target.owned_by(rank) for rank in range(first.world)
    ]
    for dead in range(first.world if first.world > 1 else 0):
        assert not lost(rows, [mine for rank, mine in enumerate(held_in(first)) if rank != dead]), "two have each row"
    now, then = (sum(_rows_moved(rows, has, to)) for has, to in ((held, first), (held, target)))
    assert now <= then, "no more moves at once than would without"
    settled = [max(a, b) for a, b in zip(_rows_moved(rows, held_in(first), target), [0] * len(held), strict=True)]
    owned = [sum(p.stop - p.start for p in pieces_of(rows, target.owned_by(rank))) for rank in range(first.world)]
    followed = [
        sum(p.stop - p.start for s in target.held_by(rank)[1:] for p in pieces_of(rows, s))
        for rank in range(first.world)
    ]
    assert all(a <= b for a, b in zip(settled, followed, strict=True)), "and then second copies at most"
    assert sum(settled) <= sum(owned)


def _rows_moved(rows: list[int], held: list[set[ShardId]], layout: Layout) -> list[int]:
    """Rows that each rank receives."""
    found = [0] * layout.world
    for move in moves(rows, held, layout):
        found[move.destination] += move.piece.stop - move.piece.start
    return found


def test_two_that_become_four_send_one_shard_each() -> None:
    held = [{ShardId(1, 0)}, {ShardId(1, 0)}, set[ShardId](), set[ShardId]()]
    first = meanwhile([40], held, layout_of(4))
    assert _rows_moved([40], held, first) == [0, 0, 10, 10]
    assert first.followers == (1, 0, 1, 0)
    assert _rows_moved([40], held_in(first), layout_of(4)) == [0, 0, 10, 10]


def test_senders_share_the_work() -> None:
    held = [{ShardId(1, 0)}, {ShardId(1, 0)}, set(), set()]
    sent = [0, 0]
    for move in moves([40, 40], held, layout_of(4)):
        sent[move.source] += move.piece.stop - move.piece.start
    assert sent[0] == sent[1] == 40


def test_a_shard_has_a_code() -> None:
    assert from_code(to_code(ShardId(17, 3))) == ShardId(17, 3)
    with pytest.raises(ValueError, match="from 0 to -1"):
        from_code(0)


def test_ranges_that_touch_are_one() -> None:
    assert covered([10], [ShardId(2, 0), ShardId(2, 1)]) == [[(0, 10)]]
    assert pieces_of([1, 4], ShardId(4, 2)) == (Piece(1, 2, 3),)


@given(world=st.integers(1, 16), size=st.integers(2, 5), data=st.data())
def test_shard_groups_are_on_one_node_where_possible(world: int, size: int, data: st.DataObject) -> None:
    nodes = data.draw(st.lists(st.sampled_from("abcd"), min_size=world, max_size=world))
    layout = layout_of(world, size, nodes)
    if world % size or world < 2 * size:
        assert layout == layout_of(world) and not layout.is_replicated
        return
    assert layout.world == world and layout.parts == size and layout.is_replicated
    assert sorted(rank for group in layout.groups for rank in group) == list(range(world))
    for index in range(size):
        assert [layout.owned_by(rank) for rank in layout.owners(index)] == [ShardId(size, index)] * (world // size)
    on_one = [len({nodes[rank] for rank in group}) == 1 for group in layout.groups]
    assert sum(on_one) >= sum(nodes.count(node) // size for node in set(nodes))


@given(shard_size=st.integers(2, 4), world=st.integers(1, 24))
def test_no_rank_holds_more_rows_than_counted(shard_size: int, world: int) -> None:
    rows = 24 * shard_size * world  # which all layouts divide evenly
    need = MemoryNeed(available_bytes=rows, sharded_bytes=rows, copies=COPIES, shard_size=shard_size)
    layout = layout_of(world, shard_size)
    for rank in range(world):
        pieces = [piece for shard in layout.held_by(rank) for piece in pieces_of([rows], shard)]
        held = sum(piece.stop - piece.start for piece in pieces)
        assert held <= need.need_bytes(world)
        assert held == need.need_bytes(world) or (world > 2 * shard_size and world % shard_size)


def test_both_sides_of_a_pair_know_pieces_in_order() -> None:
    early, late = Piece(0, 8, 9), Piece(1, 0, 4)
    moved = [RowMove(0, 1, late), RowMove(1, 0, early), RowMove(0, 1, early)]
    assert by_pair(moved) == by_pair(moved[::-1]) == {(0, 1): (early, late), (1, 0): (early,)}


def test_ranks_must_shard_by_the_same_size() -> None:
    check_shard_sizes([4, 4, 4])
    check_shard_sizes([0])
    with pytest.raises(ValueError, match="is None on rank 0 and 4 on rank 2"):
        check_shard_sizes([0, 0, 4])
    with pytest.raises(ValueError, match="is 2 on rank 0 and None on rank 1"):
        check_shard_sizes([2, 0, 4])
