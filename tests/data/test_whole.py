"""Batches that stay whole: each exactly once over all ranks, however the group changes between two steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.data.sharding import batch_ends, batches_of, whole_step

LENGTHS = st.lists(st.integers(1, 7), max_size=30)


def ends_of(lengths: list[int]) -> list[int]:
    """Where batches of these lengths end."""
    return [sum(lengths[: i + 1]) for i in range(len(lengths))]


@given(lengths=LENGTHS, worlds=st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_each_batch_is_taken_once_whole_at_any_size(lengths: list[int], worlds: list[int]) -> None:
    ends, position, taken, steps = ends_of(lengths), 0, [], 0
    while True:
        world = worlds[steps % len(worlds)]
        step = whole_step(ends, position=position, world_size=world)
        if not step:
            break
        assert len(step) == min(world, len(ends) - len(taken)), "only the last step leaves ranks idle"
        taken += step
        position, steps = step[-1][1], steps + 1
    assert taken == list(zip([0, *ends], ends, strict=False))


@given(lengths=LENGTHS, world=st.integers(1, 9))
def test_ranks_differ_by_at_most_one_batch(lengths: list[int], world: int) -> None:
    ends, position = ends_of(lengths), 0
    counts = [0] * world
    while step := whole_step(ends, position=position, world_size=world):
        for rank, _ in enumerate(step):
            counts[rank] += 1
        position = step[-1][1]
    assert max(counts) - min(counts) <= 1
    assert counts == [batches_of(len(ends), rank=rank, world_size=world) for rank in range(world)]


@given(samples=st.integers(0, 200), batch_size=st.integers(1, 30), drop_last=st.booleans())
def test_batches_are_those_of_a_data_loader(samples: int, batch_size: int, drop_last: bool) -> None:
    ends = batch_ends(samples, batch_size, drop_last=drop_last)
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    full, rest = divmod(samples, batch_size)
    assert sizes == [batch_size] * full + ([rest] if rest and not drop_last else [])


def test_a_position_within_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="position must be where a batch begins, but got 4"):
        whole_step([3, 6], position=4, world_size=2)
