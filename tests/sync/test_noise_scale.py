"""The noise scale: known values, unbiased on gradients of known statistics, smoothing, serialisation."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.sync.statistics.noise_scale import (
    LEAST_FRESH,
    TINY,
    SmoothedNoise,
    estimate,
    estimate_groups,
)
from placement.goodput.model import NoiseScale

M0 = 8
finite = st.floats(-1e12, 1e12)
scales = st.floats(1e-3, 1e4)


def gaussian_gradients(count: int, batch: int, *, seed: int = 0) -> tuple[np.ndarray, float, float]:
    """``count`` gradients over ``batch`` samples each, and the true sqr and var at M0."""
    rng = np.random.default_rng(seed)
    mean = rng.normal(size=50)
    std = rng.uniform(0.5, 4.0, size=50)
    gradients = mean + rng.normal(size=(count, 50)) * std / math.sqrt(batch)
    return gradients, float(mean @ mean), float(std @ std) / M0


def test_known_values() -> None:
    # (1, 0) and (0, 1): a = 1, b = 1/2; orthogonal gradients have no signal in common.
    assert estimate(mean_sq_norm=1.0, sq_norm_of_mean=0.5, samples=2, scale=4.0) == NoiseScale(sqr=0, var=2)
    # Identical gradients have no noise.
    assert estimate(mean_sq_norm=9.0, sq_norm_of_mean=9.0, samples=5, scale=2.0) == NoiseScale(sqr=9, var=0)
    # Opposite gradients: the raw signal is negative, and stays so.
    assert estimate(mean_sq_norm=1.0, sq_norm_of_mean=0.0, samples=2, scale=1.0) == NoiseScale(sqr=-1, var=1)


@given(a=finite, b=finite, samples=st.integers(2, 512), scale=scales)
def test_estimate_inverts_the_expectations(a: float, b: float, samples: int, scale: float) -> None:
    """a = sqr + K var / scale and b = sqr + var / scale give the two back."""
    noise = estimate(mean_sq_norm=a, sq_norm_of_mean=b, samples=samples, scale=scale)
    tolerance = 1e-9 * max(abs(a), abs(b), 1.0) * samples
    assert noise.sqr + samples * noise.var / scale == pytest.approx(a, rel=1e-9, abs=tolerance)
    assert noise.sqr + noise.var / scale == pytest.approx(b, rel=1e-9, abs=tolerance)


@pytest.mark.parametrize("samples, batch", [(2, 8), (4, 16), (8, 4), (3, 1)])
def test_unbiased_over_replicas(samples: int, batch: int) -> None:
    gradients, sqr, var = gaussian_gradients(20_000 * samples, batch)
    steps = gradients.reshape(-1, samples, 50)
    a = (steps**2).sum(-1).mean()
    b = (steps.mean(1) ** 2).sum(-1).mean()
    # Both are linear in a and b, so the mean of the estimates is the estimate of the means.
    noise = estimate(mean_sq_norm=a, sq_norm_of_mean=b, samples=samples, scale=samples * batch / M0)
    assert noise.sqr == pytest.approx(sqr, rel=0.02)
    assert noise.var == pytest.approx(var, rel=0.02)


def test_groups_are_left_out_together_when_one_overflowed() -> None:
    both = estimate_groups(mean_sq_norms=[1.0, 2.0], sq_norms_of_mean=[0.5, 2.0], samples=2, scale=1.0)
    assert both == (NoiseScale(sqr=0, var=0.5), NoiseScale(sqr=2, var=0))
    norms = {"sq_norms_of_mean": [0.5, 2.0], "samples": 2, "scale": 1.0}
    assert estimate_groups(mean_sq_norms=[1.0, math.inf], **norms) is None
    assert SmoothedNoise().add(None, 1.0) == SmoothedNoise()


# --- smoothing ---

estimates = st.lists(st.tuples(finite, finite, scales), min_size=1, max_size=30)


def smoothed(updates: list[tuple[float, float, float]]) -> SmoothedNoise:
    noise = SmoothedNoise()
    for sqr, var, scale in updates:
        noise = noise.update(sqr, var, scale)
    return noise


def halves(count: int, batch: int, *, seed: int, signal: float = 1.0) -> tuple[list[NoiseScale], float, float]:
    """Estimates from two halves of ``count`` batches at fixed weights, and the true sqr and var at M0."""
    gradients, sqr, var = gaussian_gradients(2 * count, batch // 2, seed=seed)
    mean = np.random.default_rng(seed).normal(size=50)  # as gaussian_gradients draws it
    found = []
    for pair in (gradients + (math.sqrt(signal) - 1) * mean).reshape(count, 2, 50):
        a, b = float((pair**2).sum(-1).mean()), float((pair.mean(0) ** 2).sum())
        found.append(estimate(mean_sq_norm=a, sq_norm_of_mean=b, samples=2, scale=batch / M0))
    return found, signal * sqr, var


def averages(found: list[NoiseScale], batch: int) -> SmoothedNoise:
    noise = SmoothedNoise()
    for each in found:
        noise = noise.add([each], batch / M0)
    return noise


def test_no_value_before_first_update_no_bias_after_it() -> None:
    assert SmoothedNoise().whole() is None
    assert SmoothedNoise().groups() == ()
    assert not SmoothedNoise().has_signal
    noise = SmoothedNoise().update([3.0, 1.0], [0.5, 0.25], 2.0)
    whole = noise.whole()
    assert whole is not None
    assert (whole.sqr, whole.var) == pytest.approx((4.0, 0.75))
    assert [group.sqr for group in noise.groups()] == pytest.approx([3.0, 1.0])


@given(updates=estimates, scale=st.floats(1.0, 1e4))
def test_smoothed_values_are_positive_and_bounded_by_those_seen(
    updates: list[tuple[float, float, float]], scale: float
) -> None:
    noise, largest = smoothed(updates), max(abs(sqr) + abs(var) for sqr, var, _ in updates)
    whole = noise.whole(scale)
    assert (whole is None) == (largest == 0.0)
    if whole is None:
        return
    assert TINY <= whole.var <= max(20 * largest, 2 * TINY)
    assert TINY <= whole.sqr <= max(100 * largest, 2 * TINY)
    assert 0 < noise.weight <= 1
    assert math.isfinite(whole.gain(1e6))
    assert noise.groups(scale) == (whole,), "one group is the whole model"


@given(
    updates=st.lists(
        st.tuples(st.floats(-100, 1e3), st.floats(0.01, 1e3), st.floats(0.5, 64)), min_size=1, max_size=30
    ),
    unit=st.floats(1e-9, 1e9),
)
def test_the_ratio_does_not_depend_on_the_gradients_unit(
    updates: list[tuple[float, float, float]], unit: float
) -> None:
    whole = smoothed(updates).whole()
    other = smoothed([(sqr * unit, var * unit, scale) for sqr, var, scale in updates]).whole()
    assert whole is not None and other is not None
    largest = max(abs(sqr) + var for sqr, var, _ in updates)
    if whole.sqr > 1e-6 * largest and other.sqr > 1e-6 * largest * unit:  # else they cancel
        assert other.var / other.sqr == pytest.approx(whole.var / whole.sqr, rel=1e-3)


@given(updates=estimates, scale=st.floats(1.0, 1e4))
def test_without_signal_gain_is_at_most_the_scales_root(
    updates: list[tuple[float, float, float]], scale: float
) -> None:
    noise = smoothed(updates)
    whole = noise.whole(scale)
    if whole is not None and not noise.has_signal:
        assert whole.gain(scale) <= math.sqrt(scale) * (1 + 1e-9)
        assert all(group.gain(scale) <= math.sqrt(scale) * (1 + 1e-9) for group in noise.groups(scale))


@pytest.mark.parametrize("batch", [4, 16, 128])
def test_averages_of_halves_have_no_bias(batch: int) -> None:
    everything, sqr, var = halves(60 * 100, batch, seed=7)
    found = [averages(everything[60 * run : 60 * (run + 1)], batch).whole() for run in range(100)]
    known = [noise for noise in found if noise is not None]
    assert np.mean([noise.var for noise in known]) == pytest.approx(var, rel=0.05)
    assert np.mean([noise.sqr for noise in known]) == pytest.approx(sqr, rel=0.1)


@pytest.mark.parametrize(("batch", "signal", "tolerance"), [(16, 0.0, 0.2), (16, 0.2, 0.2), (64, 1.0, 0.4)])
def test_the_standard_error_is_the_scatter_of_the_average(batch: int, signal: float, tolerance: float) -> None:
    """Over many runs of one process. Where the signal is clear, the scatter of the unit makes up a part of it."""
    signals, errors = [], []
    everything, _, _ = halves(100 * 150, batch, seed=3, signal=signal)
    for run in range(150):
        noise = averages(everything[100 * run : 100 * (run + 1)], batch)
        signals.append(noise._signal(1))
        errors.append(noise._error(1))
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(signals), rel=tolerance)


def test_a_signal_below_its_error_counts_as_that_error() -> None:
    below = 0
    everything, _, var = halves(40 * 100, 16, seed=5, signal=0.0)
    for run in range(100):
        noise = averages(everything[40 * run : 40 * (run + 1)], 16)
        whole = noise.whole()
        assert whole is not None
        signal, error = noise._signal(1) * noise.size, noise._error(1) * noise.size
        assert whole.sqr == pytest.approx(max(signal, error))
        assert 0.005 * var < whole.sqr < 10 * var, "no signal at all does not read as endless noise"
        below += signal < error
    assert below > 60, "most of the time none stands out"


def test_a_clear_signal_is_present_after_a_few_estimates() -> None:
    found, sqr, _ = halves(60, 64, seed=2, signal=4.0)
    assert not averages(found[:3], 64).has_signal, "their scatter is not known yet"
    noise = averages(found, 64)
    signal = noise.signal
    assert signal.present and signal.updates == 60
    assert signal.size == pytest.approx(noise.whole().sqr + noise.whole().var, rel=0.5)
    assert signal.size > sqr


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_steps_that_overflowed_are_left_out(bad: float) -> None:
    noise = SmoothedNoise().update([1.0, 2.0], [1.0, 2.0], 1.0)
    assert noise.update([bad, 2.0], [1.0, 2.0], 1.0) is noise
    assert noise.update([1.0, 2.0], [1.0, bad], 1.0) is noise


def test_a_gradient_of_zero_says_nothing_of_its_noise() -> None:
    assert SmoothedNoise().update([0.0, 0.0], [0.0, 0.0], 1.0) == SmoothedNoise()
    noise = SmoothedNoise().update([1.0, 2.0], [1.0, 2.0], 1.0)
    assert noise.update([0.0, 0.0], [0.0, 0.0], 4.0) is noise
    assert noise.update([0.0, 1.0], [0.0, 1.0], 4.0) is not noise, "a group may be frozen"


@pytest.mark.parametrize("first", [(-2.0, 1.0), (-1.0, 1.0 + 1e-12), (-1.0, 1.0)])
def test_a_noisy_first_estimate_does_not_outweigh_later_ones(first: tuple[float, float]) -> None:
    """At a batch below the initial one ``sqr`` can take away more than ``var`` gives: the size is unknown then."""
    noise = SmoothedNoise().update(*first, 0.5)
    for _ in range(60):
        noise = noise.update(1.0, 1.0, 0.5)
    whole = noise.whole()
    assert whole is not None
    assert (whole.sqr, whole.var) == pytest.approx((1.0, 1.0), rel=0.4)


def test_memory_counts_in_samples_and_is_bounded_by_window() -> None:
    def forgotten(scale: float, steps: int) -> float:
        noise = SmoothedNoise(window=100.0).update(0.0, 2.0, 1.0, steps=1000)
        for _ in range(steps):
            noise = noise.update(1.0, 1.0, scale)
        whole = noise.whole()
        assert whole is not None
        return whole.sqr

    assert forgotten(1.0, 100) == pytest.approx(1 - math.exp(-1), rel=0.01)
    assert forgotten(4.0, 25) == pytest.approx(forgotten(1.0, 100), rel=0.01)


def test_one_estimate_never_weighs_more_than_its_largest_share() -> None:
    noise = SmoothedNoise()
    for _ in range(200):
        noise = noise.update(1.0, 1.0, 1.0)
    jumped = noise.update(0.0, 2.0, 1e4, steps=100).whole()  # far more samples than the window holds
    assert jumped is not None
    assert jumped.sqr == pytest.approx(1.0 - LEAST_FRESH, rel=1e-4)


def test_the_first_wild_gradients_are_soon_forgotten() -> None:
    noise = SmoothedNoise()
    for step in range(200):
        noise = noise.update(1000.0 if step < 10 else 1.0, 1.0, 1.0)
    whole = noise.whole()
    assert whole is not None
    assert whole.sqr < 5.0  # a plain mean would be 51


def test_where_gradients_shrink_the_ratio_follows_within_the_window() -> None:
    """Signal a thousandth, noise a hundredth: var / sqr is 10 from then on."""
    noise, plain, ratios = SmoothedNoise(window=200.0), [0.0, 0.0], []
    for step in range(1600):
        sqr, var = (100.0, 100.0) if step < 600 else (0.1, 1.0)
        noise = noise.update(sqr, var, 1.0)
        share = 1 / min(step + 1, 200)
        plain = [old + share * (new - old) for old, new in zip(plain, (sqr, var), strict=True)]
        whole = noise.whole()
        assert whole is not None
        ratios.append((whole.var / whole.sqr, plain[1] / plain[0]))
    assert ratios[599] == pytest.approx((1.0, 1.0))
    assert ratios[999][0] > 5.0, "after two windows"
    assert ratios[999][1] < 1.2, "gradients of long ago decide over an average of plain values"
    assert ratios[-1][0] == pytest.approx(10.0, rel=0.1)
    assert whole.sqr + whole.var == pytest.approx(1.1, rel=0.1)


@given(updates=st.lists(st.tuples(finite, finite, finite, finite, scales), max_size=8))
def test_state_survives_pickle_and_json(updates: list[tuple[float, float, float, float, float]]) -> None:
    noise = SmoothedNoise(window=50.0)
    for sqr, other, var, another, scale in updates:
        noise = noise.update([sqr, other], [var, another], scale)
    assert pickle.loads(pickle.dumps(noise)) == noise
    again = SmoothedNoise.from_dict(json.loads(json.dumps(noise.to_dict())))
    assert again == noise
    assert again.whole(2.0) == noise.whole(2.0) and again.signal == noise.signal


@pytest.mark.parametrize("sizes", ([20, 60, 60, 60], [4, 28], [1, 9, 30]))
def test_gradients_of_unequal_size_show_the_same_noise(sizes: list[int]) -> None:
    """Means over many steps of unequal shares are the truth, as those of equal ones are."""
    rng = np.random.default_rng(3)
    total, steps = sum(sizes), 4000
    mean = rng.normal(size=50)
    std = rng.uniform(0.5, 4.0, size=50)
    found = []
    for _ in range(steps):
        own = [mean + rng.normal(size=50) * std / math.sqrt(size) for size in sizes]
        whole = sum(size * gradient for size, gradient in zip(sizes, own, strict=True)) / total
        found.append(
            estimate(
                mean_sq_norm=sum(n * float(g @ g) for n, g in zip(sizes, own, strict=True)) / total,
                sq_norm_of_mean=float(whole @ whole),
                samples=len(sizes),
                scale=total / M0,
            )
        )
    assert np.mean([noise.var for noise in found]) == pytest.approx(float(std @ std) / M0, rel=0.03)
    assert np.mean([noise.sqr for noise in found]) == pytest.approx(float(mean @ mean), rel=0.1)
