"""How a global batch is divided among workers and micro-steps, and what its limits allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.batch.limits import BatchChoice, BatchLimits, bounded, split


@pytest.mark.parametrize(
    ("batch_size", "replicas", "options", "cut"),
    [
        (100, 3, {}, (34, 0)),
        (99, 3, {}, (33, 0)),
        (2, 3, {}, (1, 0)),
        (2, 3, {"lower": 4}, (4, 0)),
        (100, 4, {"upper": 10}, (10, 0)),
        (100, 4, {"upper": 10, "accumulation": True}, (9, 2)),
        (120, 4, {"upper": 10, "accumulation": True}, (10, 2)),
        (100, 4, {"upper": 25, "accumulation": True}, (25, 0)),
        (100, 4, {"upper": 10, "accumulation": True, "limit": 100}, (8, 2)),
        (100, 4, {"limit": 60}, (15, 0)),
        (100, 4, {"limit": 60, "lower": 20}, (20, 0)),
        (100, 4, {"limit": 3}, (1, 0)),
    ],
)
def test_a_batch_is_divided_evenly(batch_size: int, replicas: int, options: dict, cut: tuple[int, int]) -> None:
    assert split(batch_size, replicas, **options) == BatchChoice(atomic_bsz=cut[0], accum_steps=cut[1])


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 100))
def test_with_accumulation_any_batch_is_kept_from_above(batch_size: int, replicas: int, upper: int) -> None:
    cut = split(batch_size, replicas, upper=upper, accumulation=True)
    assert cut.atomic_bsz <= upper
    assert 0 <= cut.batch_size(replicas) - batch_size < replicas * (cut.accum_steps + 2)


@pytest.mark.parametrize(
    ("largest", "replicas", "cut", "size"),
    [
        (None, 4, (40, 0), 160),
        (100, 4, (40, 0), 100),
        (100, 4, (20, 0), 80),
        (100, 16, (10, 0), 128),
        (100, 16, (8, 1), 256),
        (100, 16, (10, 1), 256),
    ],
)
def test_largest_batch_leaves_each_worker_its_least(
    largest: int | None, replicas: int, cut: tuple[int, int], size: int
) -> None:
    limits = BatchLimits(init_batch_size=64, max_batch_size=largest, local_bsz_bounds=(8, None))
    assert limits.size_of(BatchChoice(atomic_bsz=cut[0], accum_steps=cut[1]), replicas) == size


@pytest.mark.parametrize(
    ("options", "bound", "cut"),
    [
        ({}, None, (30, 1)),
        ({}, 30, (30, 1)),
        ({}, 20, (20, 2)),
        ({}, 29, (20, 2)),
        ({"max_batch_size": 100}, 20, (20, 0)),
        ({"max_batch_size": 100, "gradient_accumulation": True}, 25, (20, 2)),
        ({"max_batch_size": 100, "gradient_accumulation": True, "local_bsz_bounds": (18, 40)}, 4, (18, 3)),
        ({"max_batch_size": 100, "local_bsz_bounds": (18, 60)}, 4, (18, 0)),
    ],
)
def test_a_memory_bound_keeps_the_batch_if_allowed(options: dict, bound: int | None, cut: tuple[int, int]) -> None:
    limits = BatchLimits(init_batch_size=60, **options)
    found = bounded(limits, BatchChoice(atomic_bsz=30, accum_steps=1), bound)
    assert found == BatchChoice(atomic_bsz=cut[0], accum_steps=cut[1])
