"""Options of Adam's for a batch that has changed: half-lives in samples, and the exact correction of the bias."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.batch.scaling_rules import Adam, adam_options, bias_correction, remembered
from placement.goodput.model import NoiseScale

GROUP = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True}


def test_known_options_at_four_times_the_batch() -> None:
    assert adam_options(GROUP, 4.0, 2.0, 1.0, 4.0) == {
        "betas": (0.9**4, 0.95**4),  # Malladi et al. 2022, Marek et al. 2025
        "eps": pytest.approx(0.5e-8),  # Malladi et al. 2022
        "weight_decay": pytest.approx(0.2),  # Wang and Aitchison 2024
    }


def test_weight_decay_in_the_loss_stays() -> None:
    assert "weight_decay" not in adam_options({**GROUP, "decoupled_weight_decay": False}, 4.0, 2.0, 1.0, 4.0)


def test_rate_goes_by_gain_or_scale() -> None:
    noise = [NoiseScale(sqr=1.0, var=1.0)]
    assert Adam().factors(4.0, noise, 0.0) == (pytest.approx(math.sqrt(1.6)),)
    assert Adam(by_noise=False).factors(4.0, noise, 0.0) == (2.0,)


@given(st.floats(0.125, 64.0), st.floats(0.1, 0.9999), st.floats(0.1, 8.0))
def test_half_lives_are_the_same_in_samples(scale: float, beta2: float, factor: float) -> None:
    found = adam_options({**GROUP, "betas": (0.9, beta2)}, scale, factor, 1.0, scale)
    for given_beta, scaled in zip((0.9, beta2), found["betas"], strict=True):
        assert math.log(0.5) / math.log(scaled) * scale == pytest.approx(math.log(0.5) / math.log(given_beta))
    assert factor * found["weight_decay"] / scale == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("beta2", "scale", "becomes"),
    [(0.999, 16, 0.999**16), (0.98, 16, 0.95), (0.95, 4, 0.95), (0.9, 4, 0.9), (0.9, 0.5, 0.9**0.5)],
)
def test_least_beta2_bounds_the_scaled_one(beta2: float, scale: float, becomes: float) -> None:
    rule = Adam(by_noise=False, least_beta2=0.95)
    assert beta2 ** rule.memory_scale(beta2, scale) == pytest.approx(becomes)
    assert Adam().memory_scale(beta2, scale) == scale
    with pytest.raises(ValueError, match="least_beta2 must be 0 or more and below 1, but got 1"):
        Adam(least_beta2=1.0)


@given(st.lists(st.floats(0.25, 16.0), min_size=1, max_size=30), st.floats(0.5, 0.999))
def test_moments_of_equal_gradients_are_unbiased(scales: list[float], beta: float) -> None:
    """With every gradient 1, m_hat and v_hat must be 1 at each step, whatever the batches were."""
    moment = samples = 0.0
    for step, scale in enumerate(scales, 1):
        present, samples = beta**scale, samples + scale
        moment = present * moment + (1 - present)
        by_adam = moment / (1 - present**step)  # as the optimizer corrects it
        assert by_adam / bias_correction(beta, step, samples, scale) == pytest.approx(1.0, rel=1e-9)


@given(st.integers(1, 1000), st.floats(0.25, 16.0), st.floats(0.5, 0.999))
def test_one_batch_needs_no_correction(steps: int, scale: float, beta: float) -> None:
    assert bias_correction(beta, steps, steps * scale, scale) == pytest.approx(1.0)
    assert bias_correction(0.0, steps, steps * scale, scale) == 1.0


@given(st.lists(st.floats(0.25, 16.0), min_size=1, max_size=30), st.floats(0.5, 0.999))
def test_second_moment_of_noise_alone_is_known(scales: list[float], beta2: float) -> None:
    """Squared gradients of 1 / scale, as noise has them: v_hat is what is remembered."""
    moment, samples, held = 0.0, 0.0, 1.0
    for step, scale in enumerate(scales, 1):
        present, samples = beta2**scale, samples + scale
        moment = present * moment + (1 - present) / scale
        held = remembered(held, beta2, samples, scale, math.sqrt(scale))
        v_hat = moment / (1 - present**step) / bias_correction(beta2, step, samples, scale)
        assert v_hat == pytest.approx(held, rel=1e-6)


def test_growth_is_remembered_for_a_half_life() -> None:
    held, steps, beta2 = 1.0, 1e6, 0.99
    for scale in [1.0] * 3 + [4.0] * 17:  # 68 steps' samples: half of them
        steps += scale
        held = remembered(held, beta2, steps, scale, math.sqrt(scale))
    assert held == pytest.approx(0.25 + 0.75 * beta2**68)
