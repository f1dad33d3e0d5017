"""Measurements that a job reports to the allocator: they change rarely, though every report moves medians a little."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_ray.batch.planner import told
from placement.goodput.fitting import Observation

ONE = Observation(nodes=1, replicas=2, atomic_bsz=8, accum_steps=0, step_time=0.1, count=3.0, spread=0.05)
TWO = dataclasses.replace(ONE, replicas=4, count=250.0)


def test_counts_are_told_as_powers_of_ten() -> None:
    assert told((), [TWO, ONE]) == (dataclasses.replace(ONE, count=1.0), dataclasses.replace(TWO, count=100.0))
    assert [each.count for count in (0.5, 9.0, 10.0, 99.0, 5000.0) for each in told((), [counted(count)])] == [
        1.0, 1.0, 10.0, 10.0, 100.0,
    ]  # fmt: skip


def counted(count: float) -> Observation:
    return dataclasses.replace(ONE, count=count)


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({}, True),
        ({"count": 9.0}, True),
        ({"count": 10.0}, False),
        ({"step_time": 0.108}, True),
        ({"step_time": 0.093}, True),
        ({"step_time": 0.12}, False),
        ({"step_time": 0.08}, False),
        ({"spread": 0.065}, True),
        ({"spread": 0.08}, False),
        ({"spread": 0.02}, False),
    ],
)
def test_what_has_hardly_changed_is_told_as_before(fields: dict[str, float], same: bool) -> None:
    before = told((), [ONE, TWO])
    now = told(before, [dataclasses.replace(ONE, **fields), TWO])
    assert (now is before) is same and now[1] is before[1]


def test_a_smaller_count_is_not_told_after_a_larger() -> None:
    before = told((), [TWO])
    assert told(before, [dataclasses.replace(TWO, count=20.0)]) is before


def test_another_number_of_measurements_is_told() -> None:
    before = told((), [ONE])
    assert len(told(before, [ONE, TWO])) == 2 and len(told(told(before, [ONE, TWO]), [ONE])) == 1
