"""Sharding: an epoch's samples are used exactly once, whatever happens to the group that uses them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ray.data.batches import StepSplit
from elastic_ray.data.sharding import (
    Permutation,
    Shares,
    batch_ends,
    can_switch,
    epoch_key,
    micro_steps_for,
    rank_slices,
    split,
    step_size,
)
from tests.data.pieces import rank_indices

worlds = st.integers(1, 8)
attempts = st.lists(st.tuples(worlds, st.integers(0, 40), st.integers(1, 5), st.booleans()), min_size=1, max_size=60)


@settings(max_examples=300, deadline=None)
@given(total=st.integers(1, 300), schedule=attempts, drop_last=st.booleans(), seed=st.integers(0, 5))
def test_each_sample_exactly_once_under_any_schedule(
    total: int, schedule: list[tuple[int, int, int, bool]], drop_last: bool, seed: int
) -> None:
    order = Permutation(samples=total, key=epoch_key(seed=seed, epoch=0))
    world, position, used, tries = 1, 0, [], 0
    while True:
        wanted, extra, micro_steps, killed = schedule[tries % len(schedule)]
        tries += 1
        if can_switch(position=position, total=total, world_size=wanted):
            world = wanted
        batch_size = world + extra
        count = step_size(position=position, total=total, batch_size=batch_size, world_size=world, drop_last=drop_last)
        if count == 0:
            break
        assert world <= count <= batch_size + world - 1
        step = order[position : position + count]
        assert len(step) == count
        pieces = [rank_indices(step, rank=r, world_size=world, micro_steps=micro_steps) for r in range(world)]
        assert len({len(mine) for mine in pieces}) == 1  # every rank synchronises after as many micro-steps
        assert all(len(piece) >= 1 for mine in pieces for piece in mine)
        np.testing.assert_array_equal(np.concatenate([piece for mine in pieces for piece in mine]), step)
        if killed and world > 1 and tries < 200:
            world -= 1  # not committed: the survivors draw the same samples again
            continue
        used.extend(step.tolist())
        position += count
    if drop_last:
        assert total - len(used) < batch_size
        assert used == order[: len(used)].tolist()
    else:
        assert sorted(used) == list(range(total))


@given(world=worlds, batch=st.integers(1, 40), total=st.integers(1, 200))
def test_a_fixed_group_ends_every_epoch_it_can_start(world: int, batch: int, total: int) -> None:
    batch = max(batch, world)
    if total < world:
        assert not can_switch(position=0, total=total, world_size=world)
        return
    position = 0
    while count := step_size(position=position, total=total, batch_size=batch, world_size=world):
        assert count >= world
        position += count
    assert position == total


@pytest.mark.parametrize(
    ("total", "batch", "world", "drop_last", "sizes"),
    [
        (21, 8, 4, False, [8, 8, 5]),
        (18, 8, 4, False, [8, 6, 4]),  # the leftover of 2 is filled up to one sample a rank
        (17, 8, 4, False, [8, 5, 4]),
        (28, 24, 4, False, [20, 8]),  # two samples a rank in the last step
        (25, 24, 1, False, [24, 1]),  # as a DataLoader would
        (9, 4, 4, False, [4, 5]),  # nothing to take from: the leftover goes along
        (11, 4, 4, False, [4, 7]),
        (3, 8, 3, False, [3]),
        (18, 8, 4, True, [8, 8]),
        (3, 8, 4, True, []),
        (16, 8, 4, True, [8, 8]),
    ],
)
def test_step_sizes(total: int, batch: int, world: int, drop_last: bool, sizes: list[int]) -> None:
    got, position = [], 0
    while count := step_size(position=position, total=total, batch_size=batch, world_size=world, drop_last=drop_last):
        got.append(count)
        position += count
    assert got == sizes


@pytest.mark.parametrize(
    ("samples", "drop_last", "ends"),
    [(7, False, [3, 6, 7]), (7, True, [3, 6]), (6, False, [3, 6]), (6, True, [3, 6]), (2, False, [2]), (2, True, [])],
)
def test_batches_end_at_multiples_of_their_size(samples: int, drop_last: bool, ends: list[int]) -> None:
    assert batch_ends(samples, 3, drop_last=drop_last) == ends


@given(count=st.integers(1, 500), world=worlds, micro_steps=st.integers(1, 9))
def test_split_is_even(count: int, world: int, micro_steps: int) -> None:
    sizes = split(count, world_size=world, micro_steps=micro_steps)
    slices = [rank_slices(count, rank=rank, world_size=world, micro_steps=micro_steps) for rank in range(world)]
    assert [index for own in slices for piece in own for index in range(count)[piece]] == list(range(count))
    if count < world:
        assert sizes.tolist() == [[1]] * count + [[0]] * (world - count) and slices[count:] == [[]] * (world - count)
        return
    assert sizes.shape == (world, micro_steps_for(count, world_size=world, micro_steps=micro_steps))
    assert sizes.sum() == count
    assert sizes.min() >= 1
    assert sizes.max() - sizes.min() <= 1
    assert np.ptp(sizes.sum(axis=1)) <= 1
    assert (sizes.shape[1] == micro_steps) == (count >= world * micro_steps)


def test_one_rank_leaves_no_step_below_its_least() -> None:
    """A step of two halves needs `least` samples: the one before gives of its own, where it keeps as many."""
    assert [step_size(position=p, total=12, batch_size=10, world_size=1, least=4) for p in (0, 8)] == [8, 4]
    assert [step_size(position=p, total=5, batch_size=4, world_size=1, least=4) for p in (0, 4)] == [4, 1]


def sizes_of(total: int, batch: int, world: int, least: int) -> list[int]:
    found, position = [], 0
    while count := step_size(position=position, total=total, batch_size=batch, world_size=world, least=least):
        found.append(count)
        position += count
    assert position == total
    return found


@pytest.mark.parametrize(
    ("total", "batch", "world", "least", "sizes"),
    [
        (5, 4, 1, 2, [3, 2]),
        (3, 2, 1, 2, [2, 1]),  # the first would keep one itself
        (4, 3, 1, 2, [2, 2]),
        (12, 11, 1, 1, [11, 1]),
        (6, 4, 2, 2, [6]),  # two steps would leave somebody one sample
        (7, 5, 2, 2, [7]),
        (6, 4, 2, 1, [4, 2]),
        (8, 5, 2, 2, [4, 4]),
        (7, 4, 4, 1, [7]),
        (8, 4, 4, 1, [4, 4]),
        (9, 5, 4, 1, [5, 4]),
        (15, 12, 4, 1, [11, 4]),
        (16, 14, 4, 1, [8, 8]),  # two samples a rank in the last step
        (16, 8, 4, 1, [8, 8]),
        (17, 8, 4, 1, [8, 5, 4]),
    ],
)
def test_the_last_steps_leave_each_rank_what_it_needs(
    total: int, batch: int, world: int, least: int, sizes: list[int]
) -> None:
    assert sizes_of(total, batch, world, least) == sizes


@given(batch=st.integers(1, 40), total=st.integers(1, 200), world=worlds, least=st.integers(1, 2))
def test_a_cut_knows_the_sizes_of_an_epochs_steps(batch: int, total: int, world: int, least: int) -> None:
    cut = StepSplit(batch_size=batch, micro_steps=1, world_size=world, rank=0, drop_last=False, least=least)
    position = 0
    for size in sizes_of(total, max(batch, world), world, least):
        assert cut.count(position, total) == size
        assert sum(map(sum, cut.sizes(size, position))) == size
        position += size
    assert cut.count(total, total) == 0


def test_a_rest_smaller_than_ranks_is_taken_or_dropped() -> None:
    assert step_size(position=8, total=10, batch_size=4, world_size=3) == 2
    assert step_size(position=8, total=10, batch_size=4, world_size=3, drop_last=True) == 0
    shares = Shares(weights=(1.0, 3.0, 2.0), least=1, most=None)
    assert split(2, world_size=3, micro_steps=4, shares=shares).tolist() == [[1], [1], [0]]


def test_slices_of_a_rank_are_contiguous() -> None:
    assert rank_slices(11, rank=1, world_size=2, micro_steps=2) == [slice(6, 9), slice(9, 11)]


def test_can_switch_waits_for_the_tail() -> None:
    assert can_switch(position=2, total=10, world_size=4)
    assert not can_switch(position=3, total=10, world_size=4), "some would have a single sample"
    assert can_switch(position=10, total=10, world_size=4)
    assert not can_switch(position=3, total=3, world_size=4), "the next epoch could not start"


def test_a_position_beyond_the_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"position must be in 0\.\.10"):
        step_size(position=11, total=10, batch_size=4, world_size=2)
