"""The noise scale: known values, unbiased on gradients of known statistics, smoothing, serialisation."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.batch.noise_scale import (
    TINY,
    SmoothedNoise,
    estimate,
    estimate_groups,
    estimate_successive,
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


@pytest.mark.parametrize("samples", [1, 0, -3])
def test_one_gradient_is_not_enough(samples: int) -> None:
    with pytest.raises(ValueError, match=f"samples must be 2 or more .* got {samples}"):
        estimate(mean_sq_norm=1.0, sq_norm_of_mean=1.0, samples=samples, scale=1.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_scale_must_be_positive(scale: float) -> None:
    with pytest.raises(ValueError, match="scale must be"):
        estimate(mean_sq_norm=1.0, sq_norm_of_mean=1.0, samples=2, scale=scale)


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


@pytest.mark.parametrize("batch", [2, 8, 64])
def test_successive_gradients_agree_with_replicas(batch: int) -> None:
    gradients, sqr, var = gaussian_gradients(40_000, batch, seed=1)
    before, now = gradients[::2], gradients[1::2]
    noise = estimate_successive(
        prev_sq_norm=(before**2).sum(-1).mean(),
        sq_norm=(now**2).sum(-1).mean(),
        dot=(before * now).sum(-1).mean(),
        scale=batch / M0,
    )
    assert noise.sqr == pytest.approx(sqr, rel=0.02)
    assert noise.var == pytest.approx(var, rel=0.02)


def test_successive_gradients_are_the_dot_product_and_half_the_squared_difference() -> None:
    noise = estimate_successive(prev_sq_norm=4.0, sq_norm=9.0, dot=5.0, scale=3.0)
    assert (noise.sqr, noise.var) == pytest.approx((5.0, (4 + 9 - 2 * 5) / 2 * 3))


def test_groups_are_left_out_together_when_one_overflowed() -> None:
    both = estimate_groups(mean_sq_norms=[1.0, 2.0], sq_norms_of_mean=[0.5, 2.0], samples=2, scale=1.0)
    assert both == (NoiseScale(sqr=0, var=0.5), NoiseScale(sqr=2, var=0))
    norms = {"sq_norms_of_mean": [0.5, 2.0], "samples": 2, "scale": 1.0}
    assert estimate_groups(mean_sq_norms=[1.0, math.inf], **norms) is None  # type: ignore[arg-type]
    assert SmoothedNoise().add(None, 1.0) == SmoothedNoise()


# --- smoothing ---


def test_no_value_before_the_first_update_and_no_bias_after_it() -> None:
    assert SmoothedNoise().value is None
    assert SmoothedNoise().groups == ()
    noise = SmoothedNoise().update([3.0, 1.0], [0.5, 0.25], 2.0)
    assert noise.value is not None
    assert (noise.value.sqr, noise.value.var) == pytest.approx((4.0, 0.75))
    assert [group.sqr for group in noise.groups] == pytest.approx([3.0, 1.0])


@given(updates=st.lists(st.tuples(finite, finite, scales), min_size=1, max_size=30))
def test_smoothed_values_stay_within_what_was_seen_and_above_zero(
    updates: list[tuple[float, float, float]],
) -> None:
    noise = SmoothedNoise()
    for sqr, var, scale in updates:
        noise = noise.update(sqr, var, scale)
    value = noise.value
    assert value is not None
    for got, seen in ((value.sqr, [u[0] for u in updates]), (value.var, [u[1] for u in updates])):
        slack = 1e-9 * max(map(abs, seen))
        assert got >= TINY
        assert max(min(seen), TINY) - slack <= got <= max(max(seen), TINY) + slack
    assert 0 < noise.weight <= 1
    assert math.isfinite(value.gain(1e6))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_steps_that_overflowed_are_left_out(bad: float) -> None:
    noise = SmoothedNoise().update([1.0, 2.0], [1.0, 2.0], 1.0)
    assert noise.update([bad, 2.0], [1.0, 2.0], 1.0) is noise
    assert noise.update([1.0, 2.0], [1.0, bad], 1.0) is noise


def test_memory_is_counted_in_samples_and_bounded_by_the_window() -> None:
    def forgotten(scale: float, steps: int) -> float:
        noise = SmoothedNoise(window=100.0).update(0.0, 1.0, 1.0, steps=1000)
        for _ in range(steps):
            noise = noise.update(1.0, 1.0, scale)
        assert noise.value is not None
        return noise.value.sqr

    assert forgotten(1.0, 100) == pytest.approx(1 - math.exp(-1), rel=0.01)
    assert forgotten(4.0, 25) == pytest.approx(forgotten(1.0, 100), rel=0.01)


def test_the_first_wild_gradients_are_soon_forgotten() -> None:
    noise = SmoothedNoise()
    for step in range(200):
        noise = noise.update(1000.0 if step < 10 else 1.0, 1.0, 1.0)
    assert noise.value is not None
    assert noise.value.sqr < 5.0  # a plain mean would be 51


def test_another_estimator_starts_the_window_anew_and_keeps_the_value() -> None:
    noise = SmoothedNoise()
    for _ in range(5000):
        noise = noise.update(1.0, 1.0, 1.0, successive=True)
    switched = noise.update(2.0, 1.0, 1.0)
    assert switched.value is not None
    assert 1.0 < switched.value.sqr < 1.2
    for _ in range(60):
        switched = switched.update(2.0, 1.0, 1.0)
    assert switched.value is not None
    assert switched.value.sqr == pytest.approx(2.0, abs=0.05)


def test_state_survives_pickle_and_json() -> None:
    noise = SmoothedNoise().update([1.0, 2.0], [3.0, 4.0], 2.0, successive=True)
    assert pickle.loads(pickle.dumps(noise)) == noise
    assert SmoothedNoise.from_dict(json.loads(json.dumps(noise.to_dict()))) == noise


def test_groups_must_not_change() -> None:
    with pytest.raises(ValueError, match="each of the 2 parameter groups, but got 1 and 1"):
        SmoothedNoise().update([1.0, 2.0], [1.0, 2.0], 1.0).update(1.0, 1.0, 1.0)


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
