"""The vectorised goodput against ``GoodputModel.best``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.speeds import numbers_of, of_numbers
from placement.goodput.step_time import ThroughputModel

WORKERS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 32, 64])
NODES = np.maximum(1, -(-WORKERS // 4))


class BoundedModel(NamedTuple):
    model: GoodputModel
    max_batch_size: int | None
    atomic_bsz_range: tuple[int, int] | None
    accumulation: bool


def goodputs(asks: Sequence[BoundedModel], nodes: Any, workers: Any) -> Any:
    shape = len(asks), len(workers)
    n, r = (np.ascontiguousarray(np.broadcast_to(each, shape)) for each in (nodes, workers))
    return of_numbers(np.array([numbers_of(*ask) for ask in asks], dtype=np.float64), n, r)


@st.composite
def asked(draw: st.DrawFn) -> BoundedModel:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    a = rng.lognormal(-3, 1, 7)
    times = ThroughputModel(a[0], a[1] / 30, a[2], a[3] / 10, a[4] / 3, a[5] / 20, 1 + 2 * rng.random(), a[6] / 3)
    least = draw(st.integers(8, 32))
    initial = draw(st.integers(least, 256))
    limit = draw(st.none() | st.integers(initial, 200 * initial))
    bounds = least, least * draw(st.integers(2, 32))
    noise = NoiseScale(sqr=1.0, var=float(10 ** rng.uniform(-1, 4)))
    return BoundedModel(GoodputModel(times, noise, initial), limit, bounds, draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(ask=asked())
def test_it_agrees_with_the_model(ask: BoundedModel) -> None:
    """Within 10 % where batches are large; whole numbers of samples and micro-steps explain the rest."""
    (row,) = goodputs([ask], NODES, WORKERS)
    exact, atomic, _ = ask.model.best(
        NODES,
        WORKERS,
        max_batch_size=ask.max_batch_size,
        atomic_bsz_range=ask.atomic_bsz_range,
        accumulation=ask.accumulation,
    )
    assert ((row > 0) == (exact > 0)).all()
    fits = (exact > 0) & (atomic >= 16)
    if ask.max_batch_size is None or ask.max_batch_size >= 4 * ask.model.init_batch_size:
        assert np.allclose(row[fits], exact[fits], rtol=0.25)
        assert not fits.any() or abs(np.median(row[fits] / exact[fits]) - 1) < 0.1


def test_rows_do_not_depend_on_each_other() -> None:
    rng = np.random.default_rng(0)
    asks = [
        BoundedModel(
            GoodputModel(ThroughputModel(0.02, 1e-3, 0.02, 1e-3, 0.01, 1e-3, 1.5), NoiseScale(1.0, v), 64),
            4096,
            (8, 512),
            True,
        )
        for v in rng.uniform(1, 1e3, 5).tolist()
    ]
    together = goodputs(asks, NODES, WORKERS)
    assert np.array_equal(together, np.concatenate([goodputs([ask], NODES, WORKERS) for ask in asks]))


@pytest.mark.parametrize("limit", [None, 256])
def test_without_bounds_a_share_is_one_micro_step(limit: int | None) -> None:
    times = ThroughputModel(0.0, 0.0044, 0.002, 0.002, 0.002, 0.002, 1.0)
    workers = np.array([1, 2, 4, 8])
    ask = BoundedModel(GoodputModel(times, NoiseScale(90.0, 500.0), 64), limit, None, False)
    (row,) = goodputs([ask], np.ones(4, dtype=np.int64), workers)
    exact, _, _ = ask.model.best(np.ones(4), workers, max_batch_size=limit)
    assert np.allclose(row, exact, rtol=0.1)


@pytest.mark.parametrize(
    ("limit", "bounds", "accumulation", "runs"),
    [
        (None, None, False, [True, True, True, False, False]),  # a fixed batch of 64 on more than 64 workers
        (256, None, False, [True] * 4 + [False]),
        (256, (8, 64), False, [True, True, False, False, False]),  # and 8 each
        (256, (8, 16), False, [False, True, False, False, False]),
        (None, (8, 16), False, [False, True, False, False, False]),  # 64 do not fit on one
        (None, (8, 16), True, [True, True, False, False, False]),
    ],
)
def test_what_does_not_fit_has_a_goodput_of_nothing(limit: Any, bounds: Any, accumulation: bool, runs: Any) -> None:
    times = ThroughputModel(0.02, 1e-3, 0.02, 1e-3, 0.01, 1e-3, 1.5)
    ask = BoundedModel(GoodputModel(times, NoiseScale(1.0, 100.0), 64), limit, bounds, accumulation)
    workers = np.array([1, 8, 64, 65, 257])
    (row,) = goodputs([ask], np.ones_like(workers), workers)
    assert (row > 0).tolist() == runs and (row[~np.array(runs)] == 0.0).all()
    assert goodputs([ask], np.zeros_like(workers), workers).tolist() == [[0.0] * 5]
