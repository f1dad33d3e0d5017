"""Which steps one worker takes in two halves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.batch.halving import LEAST_HALF, SPACINGS, Halving

halvings = st.builds(
    Halving,
    since=st.integers(0, 3000),
    adapts=st.booleans(),
    every=st.none() | st.integers(1, 100),
    least=st.integers(1, 20),
)


def due(halving: Halving, first: int, last: int, samples: int = 64) -> list[int]:
    return [step for step in range(first, last) if halving.due(step, samples)]


@given(halving=halvings, first=st.integers(0, 3000), length=st.integers(0, 1500), samples=st.integers(0, 60))
def test_the_count_is_that_of_the_due_steps(halving: Halving, first: int, length: int, samples: int) -> None:
    found = due(halving, first, first + length, samples)
    assert halving.count(first, first + length, samples) == len(found)
    if samples < 2 * halving.least:
        assert not found, "each half has its least"


@given(halving=halvings, first=st.integers(0, 5000))
def test_no_gap_is_longer_than_is_asked_for(halving: Halving, first: int) -> None:
    longest = min(halving.every or SPACINGS[-1][1], SPACINGS[-1][1]) if halving.adapts else halving.every or 32
    start = max(first, halving.since)
    assert due(halving, start, start + 2 * longest - 1)
    if not halving.adapts:
        assert due(halving, start, start + longest) == [-(-start // longest) * longest]


def test_most_is_measured_after_a_change() -> None:
    for since in (0, 777):
        found = due(Halving(since=since, adapts=True), since, since + 2048)
        assert found[:10] == [since + step for step in (0, 4, 8, 12, 16, 20, 24, 28, 32, 40)]
        gaps = [after - before for before, after in itertools.pairwise(found)]
        assert gaps == sorted(gaps), "rarer and rarer"
        assert set(gaps) == {4, 8, 16, 32}
        assert len(found) < 0.06 * 2048


@pytest.mark.parametrize("every", [1, 3, 7])
def test_a_monitor_finds_the_steps_that_it_names(every: int) -> None:
    assert due(Halving(since=5, every=every), 0, 50) == [step for step in range(5, 50) if step % every == 0]


def test_adapting_batch_is_measured_as_often_as_monitors_ask() -> None:
    often = due(Halving(since=0, adapts=True, every=2), 0, 400)
    assert often == list(range(0, 400, 2))
    seldom = due(Halving(since=0, adapts=True, every=100), 0, 400)
    assert seldom == due(Halving(since=0, adapts=True), 0, 400)


def test_a_half_has_more_than_one_sample() -> None:
    assert LEAST_HALF == 2
    assert [samples for samples in range(7) if Halving(every=1).due(0, samples)] == [4, 5, 6]
    assert not Halving(every=1, least=16).due(0, 31)
    assert Halving(every=1, least=16).due(0, 32)
