"""Least squares within bounds: as good as SciPy's."""

from __future__ import annotations

import math

import numpy as np
import scipy.optimize

from placement.goodput import fitting
from placement.goodput.fitting import least_squares
from placement.goodput.model import Observation, ThroughputModel

INFINITE = np.full(2, np.inf)


def test_a_line_is_found_at_once() -> None:
    x = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    y = np.array([1.0, 3.0, 5.0])
    cost, found = least_squares(lambda p: x @ p - y, lambda p: x, np.zeros(2), (-INFINITE, INFINITE))
    np.testing.assert_allclose(found, [1.0, 2.0], rtol=1e-4)
    assert cost < 1e-8


def test_an_optimum_beyond_a_bound_is_found_on_it() -> None:
    """min (p - 3)^2 + (p + q - 1)^2 with p <= 2: q = -1."""
    slopes = np.array([[1.0, 0.0], [1.0, 1.0]])
    bounds = (np.array([-9.0, -9.0]), np.array([2.0, 9.0]))
    cost, found = least_squares(lambda p: slopes @ p - [3.0, 1.0], lambda p: slopes, np.zeros(2), bounds)
    np.testing.assert_allclose(found, [2.0, -1.0], rtol=1e-3)
    assert abs(cost - 0.5) < 1e-3


def test_errors_that_cannot_be_computed_are_not_stepped_to() -> None:
    def errors(p: np.ndarray) -> np.ndarray:
        return np.array([np.inf if p[0] > 2.0 else p[0] - 1.9])

    _, found = least_squares(errors, lambda p: np.array([[0.3]]), np.zeros(1), (np.zeros(1), np.full(1, np.inf)))
    assert 1.0 < found[0] <= 2.0


def test_it_is_as_good_as_scipys_on_step_times() -> None:
    """Root mean square errors of logarithms, over random jobs: 0.001 is a tenth of a percent."""
    rng = np.random.default_rng(0)
    worse, better = 0, 0
    for _ in range(200):
        problem = fitting._Regression(_observations(rng), fixed_batch=bool(rng.random() < 0.3))
        start = problem.starts()[0]
        theirs = scipy.optimize.least_squares(
            problem.errors, start, problem.slopes, problem.bounds, method="dogbox", ftol=1e-4, xtol=1e-5, max_nfev=30
        )
        difference = math.sqrt(2 * problem.solve(start)[0]) - math.sqrt(2 * theirs.cost)
        worse, better = worse + (difference > 1e-3), better + (difference < -1e-3)
    assert worse <= max(4, better), (worse, better)


def _observations(rng: np.random.Generator) -> list[Observation]:
    times = np.array([0.05, 0.002, *rng.choice([0.0, 0.01, 0.1, 0.5], 4)]) * 10 ** rng.uniform(-4, 3)
    model, noise = ThroughputModel(*times, rng.uniform(1, 8)), rng.choice([0.0, 0.02, 0.2])  # type: ignore[call-arg]
    found = []
    for _ in range(int(rng.integers(1, 30))):
        nodes = int(rng.choice([1, 1, 1, 2, 3, 8]))
        shape = nodes, nodes * int(rng.choice([1, 2, 4])), int(rng.choice([16, 50, 64])), int(rng.choice([0, 1]))
        grad = model.grad_time(shape[2]) if rng.random() < 0.5 else 0.0
        time = model.step_time(*shape) * math.exp(noise * rng.normal())
        found.append(Observation(*shape, time, grad, count=float(rng.choice([1, 10, 100]))))
    return found
