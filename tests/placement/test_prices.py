"""The price solver against an integer program, and what it promises whatever the input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from placement.policies.goodput.dual_prices import Options, bound, find_multipliers, solve


def optimum(options: Options) -> float:
    """The exact best sum, by HiGHS: one binary variable per job and option."""
    jobs, choices = options.values.shape
    possible = np.isfinite(options.values)
    one = np.zeros((jobs, jobs * choices))
    for j in range(jobs):
        one[j, j * choices : (j + 1) * choices] = 1
    use = np.array([np.where(options.pool_of == k, options.sizes, 0.0).ravel() for k in range(len(options.capacities))])
    solved = milp(
        -np.where(possible, options.values, 0.0).ravel(),
        constraints=[LinearConstraint(one, 1, 1), LinearConstraint(use, -np.inf, options.capacities)],
        integrality=np.ones(jobs * choices),
        bounds=Bounds(0, possible.ravel().astype(float)),
    )
    assert solved.success
    return float(-solved.fun)


@st.composite
def questions(draw: st.DrawFn, kinds: int = 1, most_jobs: int = 12) -> Options:
    """Concave and other curves, as jobs have them; everybody has at least one worker of some type."""
    jobs = draw(st.integers(1, most_jobs))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = np.array([1, 2, 3, 4, 6, 8, 12, 16])
    speed = sizes ** rng.uniform(0.2, 1.0, (jobs, kinds, 1)) * rng.uniform(0.9, 1.1, (jobs, kinds, len(sizes)))
    values = rng.uniform(0.1, 1.0, (jobs, 1, 1)) * rng.uniform(1.0, 3.0, (jobs, kinds, 1)) * speed
    slots = draw(st.integers(jobs, 6 * jobs))
    shape = (jobs, kinds * len(sizes))
    return Options(
        values=values.reshape(shape),
        sizes=np.broadcast_to(np.tile(sizes, kinds), shape).astype(np.float64),
        pool_of=np.broadcast_to(np.repeat(np.arange(kinds), len(sizes)), shape),
        capacities=np.array([float(slots)] + [float(draw(st.integers(1, 16))) for _ in range(kinds - 1)]),
        base=np.zeros(jobs, dtype=np.int64),
    )


def check(options: Options, picks: np.ndarray) -> None:
    rows = np.arange(len(picks))
    assert (options.used(picks) <= options.capacities + 1e-9).all()
    assert np.isfinite(options.values[rows, picks]).all()
    left = options.capacities - options.used(picks)
    extra = options.sizes - np.where(
        options.pool_of == options.pool_of[rows, picks][:, None], options.sizes[rows, picks][:, None], 0.0
    )
    better = options.values > options.values[rows, picks][:, None] + 1e-6
    assert not (better & (extra <= left[options.pool_of])).any(), "something idle would add value"


@settings(max_examples=60, deadline=None)
@given(options=questions())
def test_one_type_is_within_one_per_cent_of_optimum(options: Options) -> None:
    solution = solve(options)
    check(options, solution.picks)
    assert options.worth(solution.picks) >= 0.99 * optimum(options)


@settings(max_examples=40, deadline=None)
@given(options=questions(kinds=3, most_jobs=5))
def test_several_types_are_within_one_per_cent_of_optimum(options: Options) -> None:
    solution = solve(options)
    check(options, solution.picks)
    assert options.worth(solution.picks) >= 0.99 * optimum(options)


@pytest.mark.parametrize("seed", range(5))
def test_many_jobs_on_several_types_come_near_their_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.array([1.0, 2, 4, 8, 16, 24])
    speed = sizes ** rng.uniform(0.3, 0.9, (50, 1, 1)) * rng.uniform(1.0, 3.0, (50, 3, 1))
    values = (rng.uniform(0.1, 1.0, (50, 1, 1)) * speed).reshape(50, 18)
    options = Options(
        values=values,
        sizes=np.broadcast_to(np.tile(sizes, 3), values.shape),
        pool_of=np.broadcast_to(np.repeat(np.arange(3), 6), values.shape),
        capacities=np.array([50.0, 24.0, 16.0]),
        base=np.zeros(50, dtype=np.int64),
    )
    solution = solve(options)
    check(options, solution.picks)
    assert options.worth(solution.picks) >= 0.95 * bound(options, solution.multipliers), (
        solution.multipliers,
        options.used(solution.picks),
    )


@settings(max_examples=40, deadline=None)
@given(options=questions(kinds=2))
def test_the_bound_is_a_bound(options: Options) -> None:
    assert bound(options, find_multipliers(options)) >= optimum(options) - 1e-6


def test_large_cases_are_nearly_exact() -> None:
    rng = np.random.default_rng(1)
    sizes = np.array([1.0, 2, 4, 8, 16, 32, 64])
    values = rng.uniform(0.1, 1.0, (500, 1)) * sizes ** rng.uniform(0.3, 0.9, (500, 1))
    shape = values.shape
    options = Options(
        values=values,
        sizes=np.broadcast_to(sizes, shape),
        pool_of=np.zeros(shape, dtype=np.int64),
        capacities=np.array([640.0]),
        base=np.zeros(500, dtype=np.int64),
    )
    solution = solve(options)
    check(options, solution.picks)
    assert options.worth(solution.picks) >= 0.999 * bound(options, solution.multipliers)


def test_a_base_that_does_not_fit_is_refused() -> None:
    ones = np.ones((2, 1))
    with pytest.raises(ValueError, match="base must fit"):
        Options(
            values=ones,
            sizes=ones,
            pool_of=np.zeros((2, 1), dtype=np.int64),
            capacities=np.ones(1),
            base=np.zeros(2, dtype=np.int64),
        )
