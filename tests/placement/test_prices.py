"""The price solver against an integer program, and what it promises whatever the input."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from placement.policies.goodput.dual_prices import (
    Options,
    _exchange,
    _spread,
    bound,
    fill,
    find_multipliers,
    solve,
    solve_exactly,
)


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


def two_jobs(capacity: float = 3.0, base: tuple[int, int] = (0, 0)) -> Options:
    """Nothing to three units of one type, of which each further one is worth less: 10, 4, 2 and 6, 3, 1."""
    return Options(
        values=np.array([[0.0, 10, 14, 16], [0, 6, 9, 10]]),
        sizes=np.array([[0.0, 1, 2, 3]] * 2),
        pool_of=np.zeros((2, 4), dtype=np.int64),
        capacities=np.array([capacity]),
        base=np.array(base),
    )


@pytest.mark.parametrize(
    ("capacity", "picks", "price"),
    [(0, [0, 0], 10), (1, [1, 0], 6), (2, [1, 1], 4), (3, [2, 1], 3), (4, [2, 2], 2), (5, [3, 2], 1), (6, [3, 3], 0)],
)
def test_price_is_the_worth_of_what_is_not_had(capacity: float, picks: list[int], price: float) -> None:
    solution = solve(two_jobs(capacity))
    assert solution.picks.tolist() == picks
    assert solution.multipliers.tolist() == pytest.approx([price], rel=2e-3)
    for near in (0.01, 3.0, 500.0):
        assert find_multipliers(two_jobs(capacity), np.array([near])).tolist() == pytest.approx([price], rel=2e-3)


def test_the_bound_is_values_and_capacity_at_prices() -> None:
    """At a price of 3.5 the jobs keep 7 and 2.5, and three units are worth 10.5."""
    assert bound(two_jobs(), np.array([3.5])) == pytest.approx(7.0 + 2.5 + 10.5)
    assert bound(two_jobs(), np.array([0.0])) == 26.0


def test_a_decision_gains_at_most_all_beyond_its_base() -> None:
    assert _spread(two_jobs()) == 26.0 and _spread(two_jobs(base=(1, 1))) == 10.0


def test_rest_is_filled_where_it_adds_most() -> None:
    assert fill(two_jobs(), np.array([0, 0])).tolist() == [2, 1], "10 for the first, 6 for the next, then 4 for one"
    assert fill(two_jobs(4.0), np.array([1, 1])).tolist() == [2, 2]
    assert fill(two_jobs(2.0), np.array([2, 0])).tolist() == [2, 0], "nothing is taken away"
    worse = dataclasses.replace(two_jobs(), values=np.array([[0.0, 10, 9, 8], [0, 6, 6, 6]]))
    assert fill(worse, np.array([3, 0])).tolist() == [1, 1], "who gains by less leaves it to others"


def test_pairs_exchange_what_greed_has_given() -> None:
    """One unit of each of two types: the first job took the type on which alone the second runs well."""
    options = Options(
        values=np.array([[0.0, 5.0, 4.0], [0.0, 5.0, 1.0]]),
        sizes=np.array([[0.0, 1, 1]] * 2),
        pool_of=np.array([[0, 0, 1]] * 2),
        capacities=np.array([1.0, 1.0]),
        base=np.array([0, 0]),
    )
    for start in ([0, 0], [1, 2], [1, 0]):
        assert _exchange(options, np.array(start)).tolist() == [2, 1]
    assert solve(options).picks.tolist() == [2, 1] == solve_exactly(options).tolist()
    assert options.used(np.array([2, 1])).tolist() == [1.0, 1.0] and options.worth(np.array([2, 1])) == 9.0


def test_without_jobs_or_options_nothing_is_chosen() -> None:
    none = np.zeros((0, 0))
    empty = Options(values=none, sizes=none, pool_of=none.astype(int), capacities=np.ones(2), base=np.zeros(0, int))
    assert solve(empty).picks.size == 0 and solve(empty).multipliers.tolist() == [0.0, 0.0]
