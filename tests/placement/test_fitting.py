"""Fitting: step times come back from measurements, and what was never seen follows the priors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import approx_fprime

from placement.goodput import fitting
from placement.goodput.model import Observation, ThroughputModel, fit


@st.composite
def configurations(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(nodes, replicas, atomic_bsz, accum_steps)"""
    nodes = draw(st.integers(1, 64))
    most = 10**4
    return nodes, draw(st.integers(nodes, most)), draw(st.integers(1, most)), draw(st.integers(0, most))


def observe(
    model: ThroughputModel,
    configs: list[tuple[int, int, int, int]],
    *,
    noise: float = 0.0,
    grad: bool = False,
) -> list[Observation]:
    rng = np.random.default_rng(0)
    return [
        Observation(*c, model.step_time(*c) * math.exp(noise * rng.normal()), model.grad_time(c[2]) if grad else 0.0)
        for c in configs
    ]


GRID = [
    (n, r, m, s)
    for n, r in [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (3, 12)]
    for m, s in [(16, 0), (64, 0), (64, 1), (256, 0)]
]


@pytest.mark.parametrize(("grad", "unit"), [(False, 1e-4), (False, 1e4), (True, 1.0)])
@pytest.mark.parametrize("gamma", [1.0, 1.8, 6.0])
@pytest.mark.parametrize("local", [0.0, 0.02, 0.3])
def test_fit_recovers_step_times(grad: bool, unit: float, gamma: float, local: float) -> None:
    times = np.array([0.05, 0.002, 3 * local + 0.1, 0.05, local, local / 10]) * unit
    true = ThroughputModel(*times, gamma)  # type: ignore[call-arg]
    fitted = fit(observe(true, GRID, grad=grad))
    for config in [*GRID, (1, 3, 128, 0), (2, 6, 100, 2)]:
        assert fitted.step_time(*config) == pytest.approx(true.step_time(*config), rel=0.02)
    noisy = fit(observe(true, GRID, noise=0.02, grad=grad))
    for config in GRID:
        assert noisy.step_time(*config) == pytest.approx(true.step_time(*config), rel=0.05)
    assert noisy == fit(observe(true, GRID, noise=0.02, grad=grad))


def test_slopes_are_the_derivatives_of_errors() -> None:
    true = ThroughputModel(0.05, 0.002, 0.3, 0.05, 0.1, 0.01, 2.5, 0.1)
    problem = fitting._Regression(observe(true, GRID, noise=0.5, grad=True), fixed_batch=False)
    for start in problem.starts():
        numeric = approx_fprime(start, problem.errors, 1e-7)
        np.testing.assert_allclose(problem.slopes(start), numeric, atol=1e-5)


def test_one_batch_size_is_half_constant() -> None:
    model = fit([Observation(1, 1, 50, 0, 0.4), Observation(1, 1, 50, 1, 0.8)])
    assert model.alpha_c == pytest.approx(0.2, rel=1e-3)
    assert model.beta_c * 50 == pytest.approx(0.2, rel=1e-3)


def test_with_fixed_batch_what_was_never_tried_scales_perfectly() -> None:
    """Half of the compute as a constant would say 1.33 of two replicas, and a job would never try them."""
    one = [Observation(nodes=1, replicas=1, atomic_bsz=64, accum_steps=0, step_time=0.25)]
    model = fit(one, fixed_batch=True)
    assert model.step_time(1, 2, 32, 0) == pytest.approx(0.125, rel=1e-3)
    two = Observation(nodes=1, replicas=2, atomic_bsz=32, accum_steps=0, step_time=0.2)
    assert fit([*one, two], fixed_batch=True).step_time(1, 2, 32, 0) == pytest.approx(0.2, rel=0.05)


def test_what_one_replica_cannot_tell_is_taken_as_free() -> None:
    model = fit([Observation(1, 1, 50, 0, 0.4), Observation(1, 1, 100, 0, 0.7)])
    assert (model.alpha_n, model.beta_n, model.alpha_r, model.beta_r) == (0, 0, 0, 0)
    assert model.grad_time(200) == pytest.approx(1.3, rel=0.01)
    assert model.step_time(4, 16, 50, 0) == pytest.approx(0.4, rel=0.01)


def test_several_nodes_are_at_least_as_slow_as_one() -> None:
    one_node = [c for c in GRID if c[0] == 1]
    true = ThroughputModel(0.05, 0.002, 9.0, 9.0, 0.2, 0.05, 1.0)
    model = fit(observe(true, one_node))
    assert (model.alpha_n, model.beta_n) == (model.alpha_r, model.beta_r)
    assert model.alpha_r == pytest.approx(0.2, rel=0.05)
    assert model.step_time(2, 4, 64, 0) == model.step_time(1, 4, 64, 0)


def test_two_replicas_do_not_tell_of_a_third() -> None:
    true = ThroughputModel(0.05, 0.002, 0.4, 0.3, 0.2, 0.3, 1.0)
    model = fit(observe(true, [c for c in GRID if c[1] <= 2]))
    assert (model.beta_n, model.beta_r) == (0, 0)
    assert model.sync_time(1, 16) == model.sync_time(1, 2) == pytest.approx(0.2, rel=0.05)
    seen_within = fit(observe(true, [c for c in GRID if c[0] == 1 or c[1] == 2]))
    assert seen_within.beta_n == seen_within.beta_r == pytest.approx(0.3, rel=0.05)


def test_one_slow_size_on_several_nodes_forbids_no_larger() -> None:
    within = [c for c in GRID if c[0] == 1 and c[1] <= 4]
    true = ThroughputModel(0.05, 0.002, 0.4, 0.01, 0.1, 0.01, 1.0)
    model = fit([*observe(true, within), *observe(true, [(2, 8, 64, 0)])])
    assert model.step_time(2, 8, 64, 0) == pytest.approx(true.step_time(2, 8, 64, 0), rel=0.03)
    assert model.beta_n < 0.05 * model.alpha_n  # all of it growth would be 0.46 s for 6 more replicas, each time
    assert model.step_time(4, 16, 64, 0) < 1.3 * true.step_time(2, 8, 64, 0)


def test_an_unseen_node_is_taken_as_free() -> None:
    true = ThroughputModel(0.05, 0.002, 0.4, 0.03, 0.2, 0.03, 1.0)
    model = fit(observe(true, [c for c in GRID if c[1] == 1 or c[0] > 1]))
    assert (model.alpha_r, model.beta_r) == (0, 0)
    assert model.alpha_n == pytest.approx(0.4, rel=0.05)


def test_time_of_the_gradient_separates_compute_from_synchronisation() -> None:
    model = fit([Observation(1, 2, 32, 0, 1.0, grad_time=0.25)])
    assert model.grad_time(32) == pytest.approx(0.25, rel=0.01)
    assert model.step_time(1, 2, 32, 0) == pytest.approx(1.0, rel=0.01)
    unknown = fit([Observation(1, 2, 32, 0, 1.0)])
    assert unknown.step_time(1, 8, 32, 0) == pytest.approx(1.0, rel=0.01)
    assert unknown.grad_time(32) == pytest.approx(1.0, rel=0.02)  # hence more replicas look worth a try


@pytest.mark.parametrize(
    ("grad", "configs"), [(True, [(1, 1, 32, 1)]), (False, [(1, 1, 32, 0), (1, 1, 32, 3)]), (True, GRID)]
)
def test_steps_fixed_time_is_told_from_its_micro_steps(grad: bool, configs: list[tuple[int, int, int, int]]) -> None:
    true = ThroughputModel(0.05, 0.002, 0.4, 0.03, 0.2, 0.03, 1.0, 0.3)
    model = fit(observe(true, configs, grad=grad))
    assert model.alpha_s == pytest.approx(0.3, rel=0.05)
    assert model.step_time(1, 1, 32, 9) == pytest.approx(true.step_time(1, 1, 32, 9), rel=0.02)
    assert fit(observe(true, [(1, 1, 32, 0)])).alpha_s == 0


@pytest.mark.parametrize("unit", [1e-300, 1e307])
def test_only_the_ratio_of_counts_weighs(unit: float) -> None:
    counted = [Observation(1, 1, 32, 0, 1.0, count=1.0), Observation(1, 1, 32, 0, 2.0, count=9.0)]
    scaled = [Observation(1, 1, 32, 0, o.step_time, count=unit * o.count) for o in counted] * 2
    assert fit(scaled).step_time(1, 1, 32, 0) == pytest.approx(fit(counted * 2).step_time(1, 1, 32, 0), rel=1e-6)


def test_counts_weigh() -> None:
    once, often = Observation(1, 1, 32, 0, 1.0), Observation(1, 1, 32, 0, 2.0, count=99)
    assert fit([once, often]).step_time(1, 1, 32, 0) == pytest.approx(2**0.99, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            lambda c, t, g, w: Observation(*c, t, g, w),  # type: ignore[call-arg]
            configurations(),
            st.floats(0, 1e300, exclude_min=True),
            st.one_of(st.just(0.0), st.floats(0, 1e300)),
            st.floats(1e-3, 1e6),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_fit_takes_whatever_is_valid(observations: list[Observation]) -> None:
    model = fit(observations)
    assert all(math.isfinite(model.step_time(o.nodes, o.replicas, o.atomic_bsz, o.accum_steps)) for o in observations)


def test_identical_observations_are_one() -> None:
    assert fit([Observation(1, 2, 8, 1, 0.5)] * 20).step_time(1, 2, 8, 1) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit([]), "at least one measured step"),
        (lambda: Observation(1, 1, 8, 0, 0.0), "step_time must be above 0, but got 0.0"),
        (lambda: Observation(1, 1, 8, 0, math.nan), "step_time must be finite"),
        (lambda: Observation(2, 1, 8, 0, 1.0), r"replicas must be at least nodes \(2\), but got 1"),
        (lambda: Observation(1, 1, 8, 0, 1.0, count=0), "count must be above 0"),
    ],
)
def test_bad_values_name_what_would_be_right(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


def test_only_observations_are_fitted() -> None:
    with pytest.raises(TypeError, match="must be Observation"):
        fit([(1, 1, 8, 0, 1.0)])
