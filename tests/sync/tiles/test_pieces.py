"""Pieces of tensors, the rectangles that they are, and what ranks agree on before they write them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.checkpoints.sharded.rectangles import Rectangle, rectangles
from elastic_ray.consensus.saving import Readiness, SaveAgreement, Saving
from elastic_ray.state.pieces import Pieces, shared_out, split_tree
from elastic_ray.sync.optimizer_tiles.holder import writers
from elastic_ray.sync.optimizer_tiles.tiling import Span, Tiling

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shape=SHAPES, data=st.data())
def test_rectangles_are_elements_of_run_in_order_and_few(shape: tuple[int, ...], data: Any) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel - 1))
    length = data.draw(st.integers(1, numel - start))
    places = torch.arange(numel).reshape(shape)
    found: list[int] = []
    count = 0
    for each in rectangles(shape, start, length):
        inside = places[tuple(slice(o, o + s) for o, s in zip(each.offsets, each.sizes, strict=True))]
        assert each.start == inside.reshape(-1)[0] and each.length == inside.numel()
        found += inside.reshape(-1).tolist()
        count += 1
    assert found == list(range(start, start + length))
    assert count <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 2)])
def test_tensor_without_elements_is_one_rectangle_from_its_beginning(shape: tuple[int, ...]) -> None:
    assert list(rectangles(shape, 0, 0)) == [Rectangle(0, (0,) * len(shape), shape)]
    assert list(rectangles((), 0, 1)) == [Rectangle(0, (), ())], "a number is one as well"


@given(shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=6), world=st.integers(1, 6))
def test_ranks_share_out_what_all_hold_each_element_once(shapes: list[list[int]], world: int) -> None:
    tree = {"a": [torch.arange(math.prod(shape)).reshape(shape) for shape in shapes], "b": 3}
    parts = [split_tree(shared_out(tree, rank, world)) for rank in range(world)]
    assert parts[0][0]["b"] == 3 and all("b" not in (skeleton or {}) for skeleton, _ in parts[1:])
    for number, whole in enumerate(tree["a"]):
        held = [
            piece
            for _, tensors in parts
            for each in tensors
            if each.path == ("a", number)
            for piece in each.pieces.held
        ]
        found = [value for _, piece in sorted(held, key=lambda p: p[0]) for value in piece.reshape(-1).tolist()]
        assert found == whole.reshape(-1).tolist()


def test_pieces_lie_within_their_tensor() -> None:
    for start, tensor in ((3, torch.ones(2)), (-1, torch.ones(2)), (0, torch.ones(2, dtype=torch.int64))):
        with pytest.raises(ValueError, match=r"held must lie within 4 elements of float32, but got 2 of"):
            Pieces((2, 2), torch.float32, ((start, tensor),))


def test_each_tile_is_written_by_one_owner_evenly() -> None:
    tiling = Tiling(tuple((Span("p", 64 * i, 64, False),) for i in range(12)))
    owners = [(0, 1), (0, 2), (0, 3)] * 4
    found = writers(tiling, owners)
    assert all(writer in mine for writer, mine in zip(found, owners, strict=True))
    assert sorted(found.count(rank) for rank in range(4)) == [3, 3, 3, 3]


class Writer:
    def __init__(self, readiness: Readiness) -> None:
        self.answer = readiness

    def readiness(self, rank: int, world_size: int, *, now: bool) -> Readiness:
        return self.answer

    def standing(self) -> Readiness:
        return self.answer

    def start(self) -> None: ...


READY, NOT_YET, NEVER = Readiness.READY, Readiness.NOT_YET, Readiness.NEVER


@pytest.mark.parametrize(
    ("answers", "now", "outcome"),
    [
        ((READY, READY, READY), False, Saving.TOGETHER),
        ((READY, READY, READY), True, Saving.TOGETHER),
        ((READY, NOT_YET, READY), False, Saving.LATER),
        ((READY, NOT_YET, READY), True, Saving.ALONE),
        ((READY, NOT_YET, NEVER), False, Saving.ALONE),
        ((READY, None, READY), False, Saving.ALONE),
    ],
)
@pytest.mark.parametrize("rides", [False, True])
def test_ranks_decide_the_same(
    answers: tuple[Readiness | None, ...], now: bool, outcome: Saving, rides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.randbits", lambda bits: (1 << bits) - 2)
    ranks = [SaveAgreement() for _ in answers]
    for rank, answer in zip(ranks, answers, strict=True):
        if answer is not None:
            rank.serve(Writer(answer))
    if rides:
        ballots = [each.values(number, 3) for number, each in enumerate(ranks)]
        for each in ranks:
            each.conclude(torch.tensor(ballots, dtype=torch.float32).sum(0).tolist(), 3)
        heard = [each.pop_sums(3) for each in ranks]
        assert heard[0] and all(each.pop_sums(3) == () for each in ranks), "sums count at the edge of their step"
    else:
        ballots = [each.ballot(number, 3, divided=True, now=now) for number, each in enumerate(ranks)]
        heard = [tuple(sum(each) for each in zip(*ballots, strict=True))] * 3
    decided = {
        each.decide(sums, number, 3, now=now) for number, (each, sums) in enumerate(zip(ranks, heard, strict=True))
    }
    assert decided == {outcome}
    orders = [each.pop_order() for each in ranks]
    if outcome is Saving.TOGETHER:
        assert {order.token for order in orders if order is not None} == {"0ffffffff"}
        assert [order.rank for order in orders if order is not None] == [0, 1, 2]
    else:
        assert orders == [None] * 3
    assert ranks[0].together == (outcome is not Saving.ALONE or not ranks[0].refusals)
    assert all(each.pop_order() is None for each in ranks), "an order is for once"


def test_a_groups_agreement_does_not_count_in_the_next() -> None:
    agreement = SaveAgreement()
    agreement.serve(Writer(READY))
    agreement.decide([2.0, 0.0, 7.0, 0.0, 0.0], 0, 2, now=False)
    agreement.conclude([0.0, 7.0, 0.0, 0.0], 2)
    agreement.start()
    assert agreement.pop_order() is None and agreement.pop_sums(2) == ()
    agreement.decide([2.0, 0.0, 7.0, 0.0, 1.0], 0, 2, now=False)
    assert agreement.refusals == 1 and not agreement.together
    agreement.start()
    assert agreement.together, "the rank that could not may have left"
    agreement.given_up = True
    agreement.start()
    assert not agreement.together
