"""Learning-rate rules: promises that all of them keep, and what each computes."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.batch.scaling_rules import (
    GROWTH_A_STEP,
    RULES,
    AdamScale,
    AdaScale,
    Legw,
    ScalingRule,
    held_back,
    resolve,
    step_gain,
)
from placement.goodput.model import NoiseScale

noises = st.none() | st.builds(
    NoiseScale, sqr=st.floats(-1e6, 1e6, allow_subnormal=False), var=st.floats(-1, 1e6, allow_subnormal=False)
)
BALANCED = NoiseScale(sqr=1.0, var=1.0)


@pytest.mark.parametrize("name", RULES)
class TestEveryRule:
    @given(groups=st.lists(noises, max_size=4), scale=st.floats(1e-2, 1e4), progress=st.floats(0, 1e4))
    def test_gives_one_finite_factor_per_group(
        self, name: str, groups: list[NoiseScale | None], scale: float, progress: float
    ) -> None:
        factors = RULES[name]().factors(scale, groups, progress)
        assert len(factors) == len(groups)
        assert all(0 <= factor <= max(scale, 1) * (1 + 1e-9) for factor in factors)

    def test_is_one_at_the_initial_batch(self, name: str) -> None:
        assert RULES[name]().factors(1.0, [BALANCED, None], 100.0) == (1.0, 1.0)

    def test_never_falls_as_the_batch_grows(self, name: str) -> None:
        factors = [RULES[name]().factors(scale, [BALANCED], 1e6)[0] for scale in (0.5, 1, 2, 5, 100)]
        assert factors == sorted(factors)

    def test_is_a_value(self, name: str) -> None:
        rule = RULES[name]()
        assert isinstance(rule, ScalingRule)
        assert pickle.loads(pickle.dumps(rule)) == rule == RULES[name]()


@pytest.mark.parametrize(
    "name, factor",
    [("adascale", 1.6), ("adamscale", math.sqrt(1.6)), ("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)],
)
def test_known_factors(name: str, factor: float) -> None:
    assert RULES[name]().factors(4.0, [BALANCED], 0.0) == pytest.approx((factor,))


def test_adascale_lies_between_its_limits_per_group() -> None:
    signal, noise = NoiseScale(sqr=1.0, var=0.0), NoiseScale(sqr=0.0, var=1.0)
    assert AdaScale().factors(8.0, [signal, noise, None], 0.0) == pytest.approx((1.0, 8.0, 1.0))


def test_legw_warms_up_longer_for_a_larger_batch() -> None:
    rule = Legw(warmup_epochs=2.0)
    assert [rule.factors(4.0, [None], epoch)[0] for epoch in (0, 2, 4, 8, 50)] == [0.0, 0.5, 1.0, 2.0, 2.0]
    assert Legw(warmup_epochs=0).factors(4.0, [None], 0.0) == (2.0,)


def test_step_gain_is_the_gain_or_its_least() -> None:
    assert step_gain(4.0, BALANCED) == pytest.approx(1.6)
    assert (step_gain(4.0, None), step_gain(0.5, None)) == (1.0, 0.5)


factors = st.lists(st.floats(0.0, 1e4), min_size=1, max_size=4)


@given(wanted=factors, held=st.lists(st.floats(0.0, 1e4), max_size=4))
def test_a_factor_rises_slowly_and_falls_at_once(wanted: list[float], held: list[float]) -> None:
    got = held_back(wanted, held)
    assert len(got) == len(wanted)
    before = held if len(held) == len(wanted) else [1.0] * len(wanted)
    for now, want, old in zip(got, wanted, before, strict=True):
        assert now <= want
        assert now == want or now == pytest.approx(max(old, 1.0) * GROWTH_A_STEP)
        if want <= max(old, 1.0):
            assert now == want


def test_a_factor_doubles_in_eight_steps_and_gets_there() -> None:
    held: tuple[float, ...] = ()
    seen = []
    for _ in range(30):
        held = held_back((4.0, 0.5), held)
        seen.append(held)
    assert seen[7] == pytest.approx((2.0, 0.5))
    assert seen[15] == pytest.approx((4.0, 0.5)) and seen[-1] == (4.0, 0.5)
    assert held_back((8.0,), held) == pytest.approx((GROWTH_A_STEP,)), "other groups are not those that were held"


def test_names_and_objects_resolve() -> None:
    assert resolve(None, adam_like=True) == AdamScale()
    assert resolve(None, adam_like=False) == AdaScale()
    assert resolve("legw", adam_like=True) == Legw()
    assert resolve(Legw(warmup_epochs=3), adam_like=True) == Legw(warmup_epochs=3)
    with pytest.raises(ValueError, match="one of adam, adamscale, adascale, legw, linear, none, sqrt, but got 'lars'"):
        resolve("lars", adam_like=True)
    for wrong in (7, AdaScale):
        with pytest.raises(TypeError, match="must be a name or an object with factors"):
            resolve(wrong, adam_like=False)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_bad_options_are_named(bad: float) -> None:
    with pytest.raises(ValueError, match="power must be"):
        AdamScale(power=bad)
    with pytest.raises(ValueError, match="warmup_epochs must be"):
        Legw(warmup_epochs=-1.0)
