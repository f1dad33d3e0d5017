"""Streams: every rank counts, so that all agree on the shares and on the tail."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from elastic_ray.data.batches import StepSplit, StreamBatches
from elastic_ray.data.order import StreamSharder


class Numbers(IterableDataset[int]):
    """0..n-1 in an order drawn, as users do, from the global generator while it is read."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = -1
        self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.n))
        while left:
            self.read += 1
            yield left.pop(random.randrange(len(left)))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 120),
    schedule=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 12), st.integers(1, 3), st.booleans()),
        min_size=1,
        max_size=30,
    ),
    drop_last=st.booleans(),
)
def test_each_item_exactly_once_under_any_schedule(
    n: int, schedule: list[tuple[int, int, int, bool]], drop_last: bool
) -> None:
    ranks = [StreamSharder(Numbers(n), seed=3)]
    used: list[int] = []
    tries = most = 0
    while True:
        wanted, extra, micro_steps, killed = schedule[tries % len(schedule)]
        tries += 1
        if ranks[0].can_switch(wanted):
            position = ranks[0].position
            joiners = range(max(0, wanted - len(ranks)))
            ranks = ranks[:wanted] + [StreamSharder(Numbers(n), seed=3, position=position) for _ in joiners]
        world = len(ranks)
        most = max(most, 2 * wanted, 3 * world + extra)
        drawn = []
        for rank, stream in enumerate(ranks):
            random.random()  # what the training draws differs from rank to rank
            drawn.append(
                stream.next_step(
                    batch_size=world + extra,
                    world_size=world,
                    rank=rank,
                    micro_steps=micro_steps,
                    drop_last=drop_last,
                )
            )
            assert len(stream._ahead) <= most, "bounded by the largest step that was drawn"
        assert {stream.total for stream in ranks} <= {None, n}, "the items that are drawn and not committed count"
        steps = [step for step in drawn if step is not None]
        if not steps:
            break
        assert len(steps) == world, "all ranks see the same end"
        items = [item for step in steps for micro in step.items for item in micro]
        assert {step.count for step in steps} == {len(items)}
        assert len({len(step.items) for step in steps}) == 1
        assert all(micro for step in steps for micro in step.items)
        if killed and world > 1 and tries < 200:
            del ranks[tries % world]
            continue
        assert len({stream.commit() for stream in ranks}) == 1
        used += items
    assert len(set(used)) == len(used)
    if not drop_last:
        assert sorted(used) == list(range(n))
        assert ranks[0].total == n


def test_seek_goes_both_ways_and_epochs_differ() -> None:
    stream = StreamSharder(Numbers(30), seed=0, epoch=4)
    draw = {"batch_size": 5, "world_size": 1, "rank": 0}
    first = stream.next_step(**draw)
    stream.commit()
    second = stream.next_step(**draw)
    assert stream.next_step(**draw) == second, "not committed: drawn again"
    stream.seek(10)
    third = stream.next_step(**draw)
    stream.seek(0)
    assert stream.next_step(**draw) == first
    stream.seek(5)
    assert stream.next_step(**draw) == second
    stream.seek(10)
    assert stream.next_step(**draw) == third
    stream.start_epoch(5)
    assert stream.position == 0
    assert stream.next_step(**draw) != first


def test_little_is_read_ahead_and_set_epoch_is_called() -> None:
    numbers = Numbers(1000)
    stream = StreamSharder(numbers, seed=0, epoch=9)
    assert numbers.epoch == 9
    stream.next_step(batch_size=10, world_size=2, rank=0)
    assert numbers.read == 14
    assert stream.total is None


def test_what_cannot_work_says_why() -> None:
    with pytest.raises(TypeError, match="one-time iterator"):
        StreamSharder(iter([1]), seed=0)
    with pytest.raises(ValueError, match="at least 1 item, but list gave none"):
        StreamSharder([], seed=0).next_step(batch_size=4, world_size=1, rank=0)
    with pytest.raises(ValueError, match="ended after 3 of the 7 items"):
        StreamSharder([1, 2, 3], seed=0, position=7)


def test_fewer_items_than_ranks_go_to_the_first_ones() -> None:
    drawn = [StreamSharder([1, 2, 3], seed=0).next_step(batch_size=4, world_size=4, rank=rank) for rank in range(4)]
    assert [(step.items, step.count) for step in drawn if step is not None] == [
        ([[1]], 3),
        ([[2]], 3),
        ([[3]], 3),
        ([], 3),
    ]


def test_a_streams_end_is_far_until_it_is_known() -> None:
    """The total of a pass is what is known to be there: what is left allows a change of group, or not."""
    batches = StreamBatches(Numbers(11), seed=0, collate=list)
    cut = StepSplit(batch_size=4, micro_steps=1, world_size=2, rank=1, drop_last=False)
    batches.start(0, 0, cut, new_pass=True)
    found, position = [], 0
    while True:
        step = batches.step(0, position, cut)
        found.append((sum(map(sum, step.sizes)) if step.sizes else 0, step.total))
        if not step.sizes:
            break
        position += found[-1][0]
        batches.commit()
    assert sum(size for size, _ in found) == 11
    assert all(total >= position for position, (_, total) in zip((4, 8, 11), found, strict=False))
    assert found[0] == (4, 8), "as many again, while the end is not in sight"
    assert found[-2:] == [(3, 11), (0, 11)]
