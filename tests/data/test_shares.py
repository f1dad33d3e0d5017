"""Unequal shares of a step: every sample once, in order, in proportion, within bounds."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.data.sharding import Shares, by_weight, rank_slices, split

WEIGHTS = st.lists(st.floats(1 / 64, 1.0), min_size=1, max_size=8).map(tuple)


@given(
    weights=WEIGHTS,
    extra=st.integers(0, 300),
    micro_steps=st.integers(1, 4),
    least=st.integers(1, 5),
    most=st.none() | st.integers(1, 60),
)
def test_shares_are_exact_and_keep_their_bounds(
    weights: tuple[float, ...], extra: int, micro_steps: int, least: int, most: int | None
) -> None:
    world = len(weights)
    count = world + extra
    shares = Shares(weights=weights, least=least, most=most)
    sizes = split(count, world_size=world, micro_steps=micro_steps, shares=shares)
    assert sizes.sum() == count and sizes.min() >= 1
    assert (sizes.max(axis=1) - sizes.min(axis=1) <= 1).all(), "micro-steps of a rank are equal but for one sample"
    steps = sizes.shape[1]
    if most is not None and count <= world * steps * most:
        assert sizes.max() <= most
    if count >= world * steps * 2:
        assert sizes.min() >= 2, "BatchNorm cannot do with one"
    pieces = [
        piece
        for rank in range(world)
        for piece in rank_slices(count, rank=rank, world_size=world, micro_steps=micro_steps, shares=shares)
    ]
    taken = [index for piece in pieces for index in range(count)[piece]]
    assert taken == list(range(count)), "every sample once, in the order of the step"


@given(weights=WEIGHTS, extra=st.integers(0, 40))
def test_no_other_cut_has_a_shorter_longest_step(weights: tuple[float, ...], extra: int) -> None:
    """Of the cuts that give each rank its least, none has a smaller largest samples / weight: no move helps."""
    count = 2 * len(weights) + extra
    sizes = by_weight(count, Shares(weights=weights), 1)
    longest = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    for giver, taker in itertools.permutations(range(len(weights)), 2):
        is_longest = sizes[giver] / weights[giver] == longest
        if is_longest and sizes[giver] > 2:
            assert (sizes[taker] + 1) / weights[taker] >= longest * (1 - 1e-9)


@given(world=st.integers(1, 8), extra=st.integers(0, 100), micro_steps=st.integers(1, 3))
def test_equal_weights_are_the_equal_split(world: int, extra: int, micro_steps: int) -> None:
    count = world * micro_steps + extra
    equal = split(count, world_size=world, micro_steps=micro_steps)
    shares = Shares(weights=(0.7,) * world)
    assert np.array_equal(split(count, world_size=world, micro_steps=micro_steps, shares=shares), equal)


def test_a_rank_three_times_slower_takes_a_third() -> None:
    assert by_weight(100, Shares(weights=(1.0, 1.0, 1.0, 1 / 3)), 1) == [30, 30, 30, 10]
