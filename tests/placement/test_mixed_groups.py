"""Groups on GPUs of several types: the model, and its parameters from measurements."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from placement.goodput.fitting import Observation, fit
from placement.goodput.mixed import MeasuredPart, MixedGroup, MixedObservation, TypePart
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.step_time import ThroughputModel

NOISE = NoiseScale(sqr=1.0, var=20.0)
FAST = ThroughputModel(0.01, 1e-3, 0.04, 2e-3, 0.01, 1e-3, 1.6)
SLOW = ThroughputModel(0.02, 3e-3, 0.04, 2e-3, 0.01, 1e-3, 1.6)

seconds = st.floats(1e-4, 1.0)
models = st.builds(
    ThroughputModel, seconds, st.floats(1e-5, 0.1), seconds, seconds, seconds, seconds, st.floats(1.0, 10.0)
)
parts = st.builds(
    TypePart, gpu=st.just("a"), workers=st.integers(1, 6), model=models, most=st.none() | st.integers(1, 64)
)
some_parts = st.lists(parts, min_size=1, max_size=3).map(
    lambda found: tuple(dataclasses.replace(part, gpu=f"t{i}") for i, part in enumerate(found))
)
sizes = st.integers(1, 500)


def group(given: tuple[TypePart, ...]) -> MixedGroup:
    return MixedGroup(parts=given, nodes=min(2, sum(part.workers for part in given)))


@settings(deadline=None)
@given(some_parts, parts, sizes)
def test_another_worker_never_lowers_the_rate_before_synchronisation(
    there: tuple[TypePart, ...], more: TypePart, samples: int
) -> None:
    before = group(there).grad_time(samples)
    after = group((*there, dataclasses.replace(more, gpu="new", workers=1))).grad_time(samples)
    assert after <= before * (1 + 1e-9)


@settings(deadline=None)
@given(some_parts, sizes)
def test_it_is_never_better_than_sum_of_its_parts(there: tuple[TypePart, ...], samples: int) -> None:
    rate = samples / group(there).grad_time(samples)
    alone = 0.0
    for part in there:
        m = samples if part.most is None else min(part.most, samples)
        alone += part.workers * m / float(part.model.grad_time(m))
    assert rate <= alone * (1 + 1e-9)


@settings(deadline=None)
@given(some_parts, sizes)
def test_shares_are_whole_bounded_and_the_fastest(there: tuple[TypePart, ...], samples: int) -> None:
    mixed = group(there)
    if samples > mixed.most:
        assert mixed.grad_time(samples) == math.inf
        with pytest.raises(ValueError, match="samples must be at most"):
            mixed.shares(samples)
        return
    shares = mixed.shares(samples)
    assert sum(map(sum, shares)) == samples
    times, next_times = [], []
    for part, own in zip(there, shares, strict=True):
        assert len(own) == part.workers and list(own) == sorted(own, reverse=True)
        assert all(0 <= m <= (part.most or samples) for m in own)
        times += [float(part.model.grad_time(m)) for m in own if m]
        next_times += [float(part.model.grad_time(m + 1)) for m in own if m < (part.most or samples + 1)]
    assert mixed.grad_time(samples) == pytest.approx(max(times), rel=1e-6)
    # One sample less of the slowest would have to go to another, which would take as long as that: nothing is won.
    assert all(time >= max(times) * (1 - 1e-6) for time in next_times)


@settings(deadline=None)
@given(models, st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 64), st.integers(0, 3))
def test_with_one_type_it_is_model_of_that_type(
    model: ThroughputModel, workers: list[int], m: int, accum_steps: int
) -> None:
    replicas = sum(workers)
    nodes = min(2, replicas)
    mixed = MixedGroup(parts=tuple(TypePart(gpu="a", workers=k, model=model) for k in workers), nodes=nodes)
    step_s = mixed.step_time(replicas * m * (accum_steps + 1), accum_steps)
    assert step_s == pytest.approx(float(model.step_time(nodes, replicas, m, accum_steps)), rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(models, st.integers(1, 8), st.booleans(), st.sampled_from([None, 512, 4096]), st.booleans())
@example(ThroughputModel(1.0, 1 / 256, 1.0, 1.0, 1.0, 1.0, 1.0), 3, True, 4096, False)  # full between two tried sizes
def test_with_one_type_best_batch_is_worth_as_much(
    model: ThroughputModel, replicas: int, bounded: bool, most: int | None, accumulation: bool
) -> None:
    bound = 64 if bounded else None
    mixed = MixedGroup(parts=(TypePart(gpu="a", workers=replicas, model=model, most=bound),), nodes=1)
    found = mixed.best(NOISE, 128, max_batch_size=most, accumulation=accumulation).goodput
    plain, _, _ = GoodputModel(model, NOISE, 128).best(
        1, replicas, max_batch_size=most, atomic_bsz_range=(1, bound), accumulation=accumulation
    )
    assert found == pytest.approx(float(plain), rel=0.03)


def test_shares_follow_speed() -> None:
    fast, slow = ThroughputModel(0, 1e-3, 0, 0, 0, 0, 1), ThroughputModel(0, 3e-3, 0, 0, 0, 0, 1)
    mixed = MixedGroup(
        parts=(TypePart(gpu="fast", workers=2, model=fast), TypePart(gpu="slow", workers=1, model=slow)), nodes=2
    )
    assert mixed.shares(70) == ((30, 30), (10,))
    assert mixed.step_time(70) == pytest.approx(0.03)
    bounded = dataclasses.replace(mixed, parts=(dataclasses.replace(mixed.parts[0], most=20), mixed.parts[1]))
    assert bounded.shares(70) == ((20, 20), (30,))
    assert bounded.best(NOISE, 70, held_batch=70).shares == ((20, 20), (30,))


@pytest.mark.parametrize(("held", "accum_steps"), [(32, 0), (33, 1), (64, 1), (96, 2)])
def test_a_held_batch_takes_fewest_micro_steps(held: int, accum_steps: int) -> None:
    parts = tuple(TypePart(gpu=gpu, workers=1, model=FAST, most=16) for gpu in "ab")
    found = MixedGroup(parts=parts, nodes=1).best(NOISE, 32, held_batch=held, max_batch_size=128, accumulation=True)
    assert (found.batch_size, found.accum_steps) == (held, accum_steps)


def test_worker_that_is_too_slow_to_help_gets_nothing() -> None:
    hopeless = ThroughputModel(10.0, 1e-3, 0, 0, 0, 0, 1)
    mixed = MixedGroup(
        parts=(TypePart(gpu="a", workers=2, model=FAST), TypePart(gpu="b", workers=1, model=hopeless)), nodes=1
    )
    assert mixed.shares(64)[1] == (0,)
    assert mixed.best(NOISE, 64).smallest_share == 0


def test_parts_and_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="workers must be 1 or more, but got 0"):
        TypePart(gpu="a", workers=0, model=FAST)
    with pytest.raises(ValueError, match="parts must hold the workers of one type or more"):
        MixedGroup(parts=(), nodes=1)
    with pytest.raises(ValueError, match="nodes must lie between 1 and the 1 worker, but got 2"):
        MixedGroup(parts=(TypePart(gpu="a", workers=1, model=FAST),), nodes=2)
    with pytest.raises(ValueError, match="grad_time must be above 0 seconds"):
        MeasuredPart(gpu="a", workers=1, atomic_bsz=1, grad_time=0.0)


def test_the_slower_link_counts_with_its_own_overlap() -> None:
    slow_link = dataclasses.replace(SLOW, alpha_n=0.5, gamma=1.0)
    mixed = MixedGroup(
        parts=(TypePart(gpu="a", workers=1, model=FAST), TypePart(gpu="b", workers=1, model=slow_link)), nodes=2
    )
    assert mixed.sync_time() == 0.5
    assert mixed.step_time(64) == pytest.approx(mixed.grad_time(64) + 0.5)


def test_the_step_waits_for_the_slowest_type_alone() -> None:
    fast, slow = (
        MeasuredPart(gpu=g, workers=k, atomic_bsz=8, grad_time=s) for g, k, s in [("a", 2, 0.1), ("b", 1, 0.2)]
    )
    seen = MixedObservation(parts=(fast, slow), nodes=2, accum_steps=1, step_time=0.5, count=7).by_type()
    assert seen == {"a": (Observation(1, 1, 8, 0, 0.1, 0.1, 7),), "b": (Observation(2, 3, 8, 1, 0.5, 0.2, 7),)}


def measured(true: MixedGroup, batch: int, rng: np.random.Generator, noise: float) -> MixedObservation:
    """Steps of a group with times that scatter."""

    def scattered(seconds: float) -> float:
        return seconds * math.exp(noise * rng.normal())

    told = []
    for part, shares in zip(true.parts, true.shares(batch), strict=True):
        m = sum(shares) / len(shares)
        grad_s = scattered(float(part.model.grad_time(max(shares))))
        told.append(MeasuredPart(gpu=part.gpu, workers=part.workers, atomic_bsz=m, grad_time=grad_s))
    step_s = scattered(true.step_time(batch))
    return MixedObservation(parts=tuple(told), nodes=true.nodes, accum_steps=0, step_time=step_s)


@pytest.mark.parametrize(("noise", "rel"), [(0.0, 0.03), (0.03, 0.08)])
def test_fitting_recovers_the_types_from_mixed_groups(noise: float, rel: float) -> None:
    rng, seen = np.random.default_rng(0), []
    for fast, slow in [(1, 1), (2, 1), (2, 2), (4, 2), (1, 4), (4, 4)]:
        here = (TypePart(gpu="fast", workers=fast, model=FAST), TypePart(gpu="slow", workers=slow, model=SLOW))
        seen += [measured(MixedGroup(parts=here, nodes=2), batch, rng, noise) for batch in (64, 200, 600, 1800)]
    pure = [Observation(1, r, m, 0, FAST.step_time(1, r, m, 0), FAST.grad_time(m)) for r in (1, 2) for m in (16, 64)]
    known: dict[str, list[Observation]] = {"fast": pure, "slow": []}
    for each in seen:
        for gpu, found in each.by_type().items():
            known[gpu] += found
    fitted = {gpu: fit(given) for gpu, given in known.items()}
    for m in (16, 64, 200):
        assert fitted["fast"].grad_time(m) == pytest.approx(FAST.grad_time(m), rel=rel)
        assert fitted["slow"].grad_time(m) == pytest.approx(SLOW.grad_time(m), rel=rel)
    for fast, slow, batch in [(3, 1, 300), (2, 3, 800)]:
        true, expected = (
            MixedGroup(
                parts=(TypePart(gpu="fast", workers=fast, model=a), TypePart(gpu="slow", workers=slow, model=b)),
                nodes=2,
            ).step_time(batch)
            for a, b in [(FAST, SLOW), (fitted["fast"], fitted["slow"])]
        )
        assert expected == pytest.approx(true, rel=2 * rel)
