"""The batch tuner: when it changes the batch, by how much, and what it says; limits and cuts."""

from __future__ import annotations

import dataclasses
import enum
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.batch.limits import BatchChoice, BatchLimits, cut_within, split
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.batch.reports import LoaderInfo, NoiseSignal, StepReport
from elastic_ray.batch.tuner import (
    HYSTERESIS,
    MIN_STEPS,
    TRIED_AFTER,
    TRIED_FACTOR,
    BatchDoesNotFitError,
    BatchTuner,
    fit_snapshot,
)
from placement.goodput.model import GoodputModel, NoiseScale, ThroughputModel
from placement.knowledge.knowledge import Prior

# A pass costs 10 ms and 0.1 ms per sample, synchronisation 5 ms.
TRUTH = ThroughputModel(0.010, 0.0001, 0.02, 0.001, 0.005, 0.0002, 1.5)
NOISY = NoiseScale(sqr=1.0, var=20.0)
ADAPTIVE = BatchLimits(init_batch_size=64, max_batch_size=4096, local_bsz_bounds=(16, 512), gradient_accumulation=True)


def fitted(tuner: BatchTuner) -> GoodputModel | None:
    """The tuner's model, after a fit to what it has observed."""
    tuner.set_model(fit_snapshot(tuner.snapshot()))
    return tuner.model


def choice(atomic_bsz: int, accum_steps: int = 0) -> BatchChoice:
    return BatchChoice(atomic_bsz=atomic_bsz, accum_steps=accum_steps)


def measure(tuner: BatchTuner, cut: BatchChoice, replicas: int = 1, steps: int = 16, slow: float = 1.0) -> None:
    tuner.observe(
        nodes=1,
        replicas=replicas,
        atomic_bsz=cut.atomic_bsz,
        accum_steps=cut.accum_steps,
        step_time=slow * float(TRUTH.step_time(1, replicas, cut.atomic_bsz, cut.accum_steps)),
        grad_time=float(TRUTH.grad_time(cut.atomic_bsz)),
        steps=steps,
    )


def tuner_at(cut: BatchChoice, noise: NoiseScale = NOISY, limits: BatchLimits = ADAPTIVE) -> BatchTuner:
    tuner = BatchTuner(limits)
    measure(tuner, cut)
    tuner.set_noise(noise)
    tuner.set_model(GoodputModel(TRUTH, noise, limits.init_batch_size))
    return tuner


# --- growth and hysteresis ---


@pytest.mark.parametrize(("noise", "least", "most"), [(NoiseScale(sqr=1.0, var=3.0), 65, 128), (NOISY, 129, 256)])
def test_batch_grows_to_double_or_four_times_where_worthwhile(noise: NoiseScale, least: int, most: int) -> None:
    decision = tuner_at(choice(64), noise).decide(1, 1, choice(64))
    assert decision.changed
    assert least <= decision.batch_size <= most
    assert decision.reason.startswith("goodput ")
    assert "instead of 64 = 1 worker x 64 samples" in decision.reason
    model = GoodputModel(TRUTH, noise, 64)
    assert decision.goodput == model.goodput(1, 1, decision.choice.atomic_bsz, 0)
    assert decision.goodput > (1 + HYSTERESIS) * model.goodput(1, 1, 64, 0)


def test_the_batch_waits_for_enough_steps_at_its_size() -> None:
    tuner = BatchTuner(ADAPTIVE)
    tuner.set_model(GoodputModel(TRUTH, NOISY, 64))
    measure(tuner, choice(64), steps=MIN_STEPS - 1)
    assert not tuner.decide(1, 1, choice(64)).changed
    measure(tuner, choice(64), steps=1)
    assert tuner.decide(1, 1, choice(64)).changed
    measure(tuner, choice(128), steps=MIN_STEPS - 1)
    assert not tuner.decide(1, 1, choice(128)).changed


def signal(updates: int, *, present: bool = True, size: float = 1.0) -> NoiseSignal:
    return NoiseSignal(present=present, size=size, updates=updates)


def test_a_second_size_is_measured_once_where_one_was() -> None:
    tuner = tuner_at(choice(64), NoiseScale(sqr=1.0, var=0.7))
    assert not tuner.decide(1, 1, choice(64)).changed, "the model sees no gain"
    measure(tuner, choice(64), steps=TRIED_AFTER)
    second = tuner.decide(1, 1, choice(64))
    assert second.batch_size == 64 * TRIED_FACTOR
    assert second.reason == "a second batch size is measured: 96 = 1 worker x 96 samples"
    # What it has shown decides, and it is not tried again.
    tuner.set_noise(NoiseScale(sqr=1.0, var=0.6))
    measure(tuner, choice(96), steps=40)
    back = tuner.decide(1, 1, choice(96))
    assert "a second batch size" not in back.reason
    again = BatchTuner(ADAPTIVE)
    again.set_noise(NoiseScale(sqr=1.0, var=0.7))
    again.set_model(GoodputModel(TRUTH, NoiseScale(sqr=1.0, var=0.7), 64))
    measure(again, choice(64), steps=TRIED_AFTER)
    assert again.decide(1, 1, choice(64)).batch_size == 96
    for _ in range(5):
        measure(again, choice(64), steps=TRIED_AFTER)  # the batch could not change
        assert not again.decide(1, 1, choice(64)).changed


@pytest.mark.parametrize(
    "why", ["few steps", "two sizes", "little noise", "no noise", "at the limit", "no signal", "prior"]
)
def test_no_second_size_is_measured_without_need(why: str) -> None:
    noise = NoiseScale(sqr=1.0, var=0.4 if why == "little noise" else 0.7)
    limits = BatchLimits(init_batch_size=64, max_batch_size=64 if why == "at the limit" else 4096)
    tuner = BatchTuner(limits)
    if why == "two sizes":
        measure(tuner, choice(48))
    measure(tuner, choice(64), steps=TRIED_AFTER - (why == "few steps"))
    if why == "no signal":
        tuner.set_signal(signal(5, present=False), batch_size=64, steps=30)
    if why == "prior":
        tuner.set_prior(Prior(model=GoodputModel(TRUTH, noise, 64), largest_batch=64))
    if why != "no noise":
        tuner.set_noise(noise)
        tuner.set_model(GoodputModel(TRUTH, noise, 64))
    assert not tuner.decide(1, 1, choice(64)).changed


def test_without_a_signal_the_batch_stays_then_falls() -> None:
    tuner = tuner_at(choice(256))
    tuner.set_signal(signal(10, present=False), batch_size=256, steps=100)
    stays = tuner.decide(1, 1, choice(256))
    assert not stays.changed and stays.reason.startswith("the batch stays 256: no signal: after 10 estimates ")
    tuner.set_signal(signal(16, present=False), batch_size=256, steps=150)
    falls = tuner.decide(1, 1, choice(256))
    assert (falls.batch_size, falls.reason) == (128, "batch 256 -> 128: no signal in 50 steps")
    assert not tuner.decide(1, 1, choice(256)).batch_size < 128, "one step at a time"


def test_growth_too_far_is_taken_back_and_not_repeated() -> None:
    tuner, updates = tuner_at(choice(64)), 10
    tuner.set_signal(signal(9), batch_size=64, steps=90)
    tuner.set_signal(signal(updates), batch_size=64, steps=100)
    assert tuner.decide(1, 1, choice(64)).batch_size > 64
    measure(tuner, choice(128))
    tuner.set_signal(signal(11, size=50.0), batch_size=128, steps=116)
    tuner.set_signal(signal(14, size=50.0), batch_size=128, steps=140)
    back = tuner.decide(1, 1, choice(128))
    assert back.batch_size == 64 and back.reason.startswith("batch 128 -> 64: after the growth squared gradient norms")
    measure(tuner, choice(64))
    tuner.set_signal(signal(15), batch_size=64, steps=150)
    stays = tuner.decide(1, 1, choice(64))
    assert not stays.changed and "a growth was taken back, the next may come after step 240" in stays.reason
    tuner.set_signal(signal(40), batch_size=64, steps=240)
    assert 64 < tuner.decide(1, 1, choice(64)).batch_size <= 64 * 2**0.5


def test_repeated_decisions_reach_the_best_batch_and_rest_there() -> None:
    tuner, cut = tuner_at(choice(64)), choice(64)
    for _ in range(10):
        decision = tuner.decide(1, 1, cut)
        cut = decision.choice
        measure(tuner, cut)
        assert fitted(tuner) is not None
    assert not decision.changed
    best, _, _ = GoodputModel(TRUTH, NOISY, 64).best(
        1, 1, max_batch_size=4096, atomic_bsz_range=(16, 512), accumulation=True
    )
    assert decision.goodput is not None
    assert decision.goodput >= best / (1 + HYSTERESIS) * 0.97  # the fit's own error on top


def test_a_small_gain_changes_nothing() -> None:
    model = GoodputModel(TRUTH, NOISY, 64)
    _, best, _ = model.best(1, 1, max_batch_size=4096, atomic_bsz_range=(16, 512))
    near = choice(int(best * 0.85))
    decision = tuner_at(near).decide(1, 1, near)
    assert not decision.changed
    assert "not above the hysteresis of 5%" in decision.reason


def test_a_gradient_without_noise_keeps_the_initial_batch() -> None:
    signal = NoiseScale(sqr=1.0, var=1e-9)
    assert not tuner_at(choice(64), signal).decide(1, 1, choice(64)).changed
    assert tuner_at(choice(512), signal).decide(1, 1, choice(512)).batch_size == 64


def test_the_noise_scale_counts_once_it_is_set() -> None:
    tuner = tuner_at(choice(64), NoiseScale(sqr=1.0, var=1e-9))
    tuner.set_noise(NOISY)
    tuner.set_noise(None)
    assert tuner.model is not None
    assert tuner.model.noise == NOISY
    assert tuner.decide(1, 1, choice(64)).changed


# --- before there is a model ---


def test_without_a_model_the_batch_stays_and_says_why() -> None:
    tuner = BatchTuner(ADAPTIVE)
    assert fitted(tuner) is None
    first = tuner.decide(1, 2, None)
    assert (first.choice, first.changed, first.goodput) == (choice(32), True, None)
    assert first.reason == "the batch stays 64: no noise scale yet"
    tuner.set_noise(NOISY)
    assert tuner.decide(1, 2, choice(32)).reason == "the batch stays 64: no throughput model yet"
    assert fit_snapshot(tuner.snapshot()) is None


@pytest.mark.parametrize(
    ("size", "bounds", "least"), [(3, None, 2), (1, None, 2), (31, (16, 64), 16), (32, (16, 64), None), (4, None, None)]
)
def test_a_batch_without_two_halves_has_no_noise_alone(
    size: int, bounds: tuple[int, int] | None, least: int | None
) -> None:
    limits = BatchLimits(
        init_batch_size=size, max_batch_size=512, local_bsz_bounds=bounds, gradient_accumulation=bounds is not None
    )
    tuner = BatchTuner(limits)
    measure(tuner, choice(size), steps=50)
    reason = tuner.decide(1, 1, choice(size)).reason
    if least is None:
        assert reason == f"the batch stays {size}: no noise scale yet"
    else:
        assert reason == (
            f"the batch stays {size}: its gradient noise cannot be measured on one worker, for it has no two halves "
            f"of {least} samples or more; raise batch_size or lower the least of local_bsz_bounds"
        )
    assert "two halves" not in tuner.decide(1, 2, None).reason, "two workers tell it"


def test_resize_keeps_the_global_batch_as_near_as_possible() -> None:
    tuner = BatchTuner(ADAPTIVE)
    assert tuner.decide(1, 4, choice(128), current_replicas=1).choice == choice(32)
    assert tuner.decide(1, 1, choice(512), current_replicas=4).choice == choice(512, 3)
    raised = tuner.decide(1, 8, choice(64), current_replicas=1)
    assert (raised.choice, raised.batch_size) == (choice(16), 128)
    assert "the nearest cut within the limits" in raised.reason


# --- a fixed batch ---


@given(init=st.integers(1, 5000), replicas=st.integers(1, 64), upper=st.integers(1, 5000))
def test_a_fixed_batch_is_split_over_the_workers(init: int, replicas: int, upper: int) -> None:
    limits = BatchLimits(init_batch_size=init, local_bsz_bounds=(None, upper), gradient_accumulation=True)
    decision = BatchTuner(limits).decide(1, replicas, None)
    cut = decision.choice
    assert cut.atomic_bsz <= upper
    assert 0 <= decision.batch_size - init < replicas * (cut.accum_steps + 1)
    assert decision.reason.startswith(f"the batch is fixed at {init}: ")


def test_a_fixed_batch_stays_though_a_larger_were_better() -> None:
    limits = BatchLimits(init_batch_size=64)
    tuner = tuner_at(choice(64), limits=limits)
    assert not tuner.decide(1, 1, choice(64)).changed
    assert tuner.decide(1, 4, choice(64), current_replicas=1).choice == choice(16)


# --- out of memory ---


def test_out_of_memory_halves_the_bound_and_accumulates_instead() -> None:
    tuner = tuner_at(choice(512))
    assert tuner.out_of_memory(512) == "a worker ran out of memory with 512 samples; the local bound is now 256"
    assert tuner.out_of_memory(512).endswith("the local bound is 256 already")  # another worker, same failure
    decision = tuner.decide(1, 1, choice(512))
    assert decision.changed
    assert decision.choice.atomic_bsz <= 256
    assert tuner.atomic_bsz_range == (16, 256)


def test_out_of_memory_stops_at_size_known_to_run() -> None:
    tuner = tuner_at(choice(400))
    tuner.out_of_memory(512)
    assert tuner.upper == 400


def test_one_worker_accumulates_where_a_step_outweighs_its_passes() -> None:
    """The worker's share is full: only more micro-steps make the batch larger, and the update is paid for once."""
    truth = dataclasses.replace(TRUTH, alpha_s=0.2)
    limits = dataclasses.replace(ADAPTIVE, local_bsz_bounds=(16, 64))
    for update, grows in ((truth, True), (TRUTH, False)):
        tuner, cut = BatchTuner(limits), choice(64, 1)
        for _ in range(3):
            tuner.observe(
                nodes=1,
                replicas=1,
                atomic_bsz=64,
                accum_steps=cut.accum_steps,
                step_time=float(update.step_time(1, 1, 64, cut.accum_steps)),
                grad_time=float(update.grad_time(64)),
                steps=16,
            )
            tuner.set_noise(NOISY)
            fitted(tuner)
            cut = tuner.decide(1, 1, cut).choice
        assert (cut.accum_steps > 3) == grows, cut


def test_out_of_memory_without_accumulation_lowers_the_batch() -> None:
    limits = BatchLimits(init_batch_size=64, max_batch_size=256)
    tuner = tuner_at(choice(64), limits=limits)
    tuner.out_of_memory(64)
    decision = tuner.decide(1, 1, choice(64))
    assert decision.choice == choice(32)
    assert decision.reason == ("the batch falls from 64 to 32 = 1 worker x 32 samples: no worker may take more at once")
    assert not tuner.decide(1, 1, choice(32)).changed


def test_a_bound_below_the_minimum_counts_as_it() -> None:
    tuner = tuner_at(choice(64), limits=BatchLimits(init_batch_size=64, max_batch_size=256, local_bsz_bounds=(20, 64)))
    assert tuner.limit_local(4) and not tuner.limit_local(3)
    assert tuner.decide(1, 1, choice(64)).choice == choice(20)


def test_out_of_memory_keeps_a_fixed_batch_by_accumulating() -> None:
    tuner = BatchTuner(BatchLimits(init_batch_size=64))
    tuner.out_of_memory(64)
    decision = tuner.decide(1, 1, choice(64))
    assert (decision.choice, decision.batch_size) == (choice(32, 1), 64)


@pytest.mark.parametrize("limits", [ADAPTIVE, BatchLimits(init_batch_size=64)])
def test_out_of_memory_ends_at_the_lower_bound(limits: BatchLimits) -> None:
    tuner, failing = BatchTuner(limits), 64
    lowest = 1 if limits.fixed else 16
    while failing > lowest:
        tuner.out_of_memory(failing)
        assert tuner.upper is not None
        assert lowest <= tuner.upper < failing
        failing = tuner.upper
    with pytest.raises(BatchDoesNotFitError, match=f"with {lowest} samples?, the smallest local batch allowed"):
        tuner.out_of_memory(failing)


# --- observations ---


def test_outliers_and_nonsense_do_not_count() -> None:
    tuner = BatchTuner(ADAPTIVE)
    measure(tuner, choice(64), slow=50.0)  # warm-up
    for _ in range(6):
        measure(tuner, choice(64))
    measure(tuner, choice(64), slow=20.0)
    for bad in (math.nan, math.inf, 0.0, -1.0):
        tuner.observe(nodes=1, replicas=1, atomic_bsz=64, accum_steps=0, step_time=bad)
    (observation,) = tuner.snapshot().observations
    assert observation.step_time == TRUTH.step_time(1, 1, 64, 0)


def test_a_lasting_change_of_speed_counts_after_few_reports() -> None:
    tuner = BatchTuner(ADAPTIVE)
    for slow in [1.0] * 100 + [3.0] * 8:
        measure(tuner, choice(64), slow=slow)
    (observation,) = tuner.snapshot().observations
    assert observation.step_time == 3 * TRUTH.step_time(1, 1, 64, 0)


def test_memory_is_bounded_and_keeps_the_latest() -> None:
    tuner = BatchTuner(ADAPTIVE)
    for atomic_bsz in range(1, 500):
        measure(tuner, choice(atomic_bsz))
    observations = tuner.snapshot().observations
    assert len(observations) == 64
    assert observations[-1].atomic_bsz == 499


def test_a_snapshot_is_a_value_that_another_process_fits() -> None:
    tuner = tuner_at(choice(64))
    measure(tuner, choice(128))
    snapshot = pickle.loads(pickle.dumps(tuner.snapshot()))
    assert snapshot == tuner.snapshot() and fit_snapshot(snapshot) == fitted(tuner)


# --- limits ---


@given(
    init=st.integers(1, 300),
    growth=st.integers(1, 8),
    bounds=st.none() | st.tuples(st.integers(1, 64), st.integers(64, 600)),
    accumulation=st.booleans(),
    replicas=st.integers(1, 16),
    current=st.none() | st.builds(choice, st.integers(1, 600), st.integers(0, 3)),
    measured=st.booleans(),
)
def test_decisions_keep_the_limits_settle_and_have_a_reason(
    init: int,
    growth: int,
    bounds: tuple[int, int] | None,
    accumulation: bool,
    replicas: int,
    current: BatchChoice | None,
    measured: bool,
) -> None:
    init = max(init, bounds[0] if bounds else 1)
    accumulation = accumulation or bool(bounds and bounds[1] < init)
    limits = BatchLimits(
        init_batch_size=init,
        max_batch_size=init * growth,
        local_bsz_bounds=bounds,
        gradient_accumulation=accumulation,
    )
    tuner = tuner_at(current or choice(init), limits=limits) if measured else BatchTuner(limits)
    decision = tuner.decide(1, replicas, current)
    cut = decision.choice
    assert limits.lower <= cut.atomic_bsz <= (limits.upper or init * growth)
    assert accumulation or cut.accum_steps == 0
    # Every worker takes its least, whatever the limit.
    assert decision.batch_size <= max(init * growth, replicas * limits.lower * (cut.accum_steps + 1))
    assert decision.reason
    # Asked again without news, the decision stands unless the step count lets the batch grow on.
    if not measured:
        assert tuner.decide(1, replicas, cut).choice == cut


@given(
    size=st.integers(1, 300),
    largest=st.none() | st.integers(1, 64),
    replicas=st.integers(1, 16),
    current=st.none() | st.builds(choice, st.integers(1, 600), st.integers(0, 3)),
)
def test_batch_of_one_size_keeps_it_on_any_workers(
    size: int, largest: int | None, replicas: int, current: BatchChoice | None
) -> None:
    limits = BatchLimits(
        init_batch_size=size, max_batch_size=size, local_bsz_bounds=(None, largest), gradient_accumulation=True
    )
    tuner = tuner_at(current or choice(size), limits=limits)
    decision = tuner.decide(1, replicas, current)
    cut = decision.choice
    assert decision.batch_size == limits.size_of(cut, replicas) == max(size, replicas * (cut.accum_steps + 1))
    assert largest is None or cut.atomic_bsz <= largest
    assert cut == cut_within(limits, size, replicas), "as the loader cuts it that nobody tells"
    again = tuner.decide(1, replicas, cut)
    assert not again.changed and again.reason.startswith("the batch stays")


def test_what_a_cut_makes_is_within_the_limits() -> None:
    def limits(largest: int, least: int) -> BatchLimits:
        return BatchLimits(
            init_batch_size=12, max_batch_size=largest, local_bsz_bounds=(least, 4), gradient_accumulation=True
        )

    assert limits(12, 1).size_of(choice(2, 1), 4) == 12, "some take 2 samples and then 1"
    assert limits(14, 1).size_of(choice(2, 1), 3) == 12
    assert limits(12, 4).size_of(choice(4), 4) == 16, "each worker takes its least"


def test_split_prefers_few_large_micro_steps() -> None:
    assert split(64, 3) == choice(22)
    assert split(1000, 2, upper=200, accumulation=True) == choice(167, 2)
    assert split(64, 3, limit=64) == choice(21)
    assert split(4, 8) == choice(1)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"init_batch_size": 0}, ValueError, "batch_size must be 1 or more samples, but got 0"),
        ({"init_batch_size": 6.5}, TypeError, "batch_size must be a whole number of samples, but got 6.5"),
        ({"init_batch_size": True}, TypeError, "batch_size must be a whole number"),
        ({"max_batch_size": 32}, ValueError, "max_batch_size must be at least batch_size .64., but got 32"),
        ({"max_batch_size": "1024"}, TypeError, "max_batch_size must be a whole number"),
        ({"local_bsz_bounds": 16}, TypeError, "local_bsz_bounds must be a pair"),
        ({"local_bsz_bounds": (1, 2, 3)}, TypeError, "local_bsz_bounds must be a pair"),
        ({"local_bsz_bounds": (0, 64)}, ValueError, "the least of local_bsz_bounds must be 1 or more"),
        ({"local_bsz_bounds": (64, 32)}, ValueError, "least <= largest, but got .64, 32."),
        ({"local_bsz_bounds": (65, 128)}, ValueError, "not exclude batch_size=64, but the least is 65"),
        ({"local_bsz_bounds": (1, 63)}, ValueError, "take at most 63; .* set gradient_accumulation=True"),
        ({"gradient_accumulation": 2}, TypeError, "gradient_accumulation must be True or False, but got 2"),
    ],
)
def test_bad_limits_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BatchLimits(**{"init_batch_size": 64, **arguments})


def test_good_limits() -> None:
    assert BatchLimits(init_batch_size=64, local_bsz_bounds=[16, None]).upper is None
    assert BatchLimits(init_batch_size=64, local_bsz_bounds=(None, 64)).lower == 1
    assert BatchLimits(init_batch_size=64).fixed


class Size(enum.IntEnum):
    SMALL = 8
    LARGE = 32


def test_limits_are_integers_that_any_process_can_read() -> None:
    limits = BatchLimits(init_batch_size=Size.SMALL, max_batch_size=Size.LARGE, local_bsz_bounds=(None, Size.SMALL))
    assert limits == BatchLimits(init_batch_size=8, max_batch_size=32, local_bsz_bounds=(None, 8))
    assert b"Size" not in pickle.dumps(limits)


def test_why_a_batch_stays_is_told_once_per_cause() -> None:
    planner = BatchPlanner(fit_every_s=0.0)
    planner.open(LoaderInfo(limits=BatchLimits(init_batch_size=64, max_batch_size=1024)))
    group = Alone()
    shape = planner.choose(group)
    assert shape is not None
    notices = []
    for number in range(1, 40):
        signal = NoiseSignal(present=False, size=1.0, updates=number)
        report = StepReport(
            generation=1,
            nodes=1,
            replicas=1,
            shape=shape,
            steps=10,
            step_time=0.01,
            grad_time=0.0,
            noise=NOISY,
            epoch=0,
            epochs=1,
            total_steps=10 * number,
            batch_size=64,
            signal=signal,
        )
        planner.observe(report)
        snapshot = planner.due(float(number))
        assert snapshot is not None
        assert planner.fitted(fit_snapshot(snapshot)) is None, "no growth without a signal"
        notices += [notice] if (notice := planner.pop_notice()) else []
    [notice] = notices
    assert notice.startswith("the batch stays 64: no signal: after 16 estimates")


class Alone:
    """A group of one worker."""

    generation, nodes, world_size, batch, equal_shares = 1, 1, 1, None, False


# --- why it stays, in a few words ---


def test_a_decision_says_briefly_what_hinders_growth() -> None:
    limits = BatchLimits(init_batch_size=3, max_batch_size=512)
    tuner = BatchTuner(limits)
    assert tuner.decide(1, 1, choice(3)).hindered == "no halves"
    assert tuner.decide(1, 3, None).hindered == "", "three workers tell the noise"
    tuner.set_noise(NOISY)
    assert tuner.decide(1, 1, choice(3)).hindered == "", "it is known"
    tuner.set_signal(signal(15, present=False), batch_size=3, steps=30)
    assert tuner.decide(1, 1, choice(3)).hindered == "", "too few estimates to be news"
    tuner.set_signal(signal(16, present=False), batch_size=3, steps=40)
    assert tuner.decide(1, 1, choice(3)).hindered == "no signal"
    tuner.set_signal(signal(17), batch_size=3, steps=50)
    assert tuner.decide(1, 1, choice(3)).hindered == ""
    one = BatchTuner(BatchLimits(init_batch_size=3, max_batch_size=3))
    one.set_signal(signal(16, present=False), batch_size=3, steps=40)
    assert one.decide(1, 1, choice(3)).hindered == "", "there is nothing to hinder"


def test_halves_have_at_least_what_a_worker_may_take() -> None:
    for bounds, size, hindered in (((16, None), 31, True), ((16, None), 32, False), (None, 4, False), (None, 3, True)):
        limits = BatchLimits(init_batch_size=size, max_batch_size=512, local_bsz_bounds=bounds)
        found = BatchTuner(limits).decide(1, 1, choice(size)).hindered
        assert (found == "no halves") == hindered, (bounds, size)
    accumulates = BatchLimits(init_batch_size=2, max_batch_size=512, gradient_accumulation=True)
    assert BatchTuner(accumulates).decide(1, 1, choice(1, 1)).hindered == "", "its micro-steps are the halves"


def test_no_batch_is_chosen_above_the_largest_allowed() -> None:
    limits = BatchLimits(init_batch_size=64, max_batch_size=100)
    decision = tuner_at(choice(64), limits=limits).decide(1, 1, choice(64))
    assert decision.changed and 64 < decision.batch_size <= 100
    prior = BatchTuner(limits)
    prior.set_prior(Prior(model=GoodputModel(TRUTH, NOISY, 64), largest_batch=4096))
    assert 64 < prior.decide(1, 1, choice(64)).batch_size <= 100


def test_others_measurements_open_their_largest_batch_until_own_fit() -> None:
    tuner = BatchTuner(ADAPTIVE)
    assert tuner.set_prior(prior := Prior(model=GoodputModel(TRUTH, NOISY, 64), largest_batch=90))
    assert not tuner.set_prior(prior), "the same is no news"
    assert tuner.own_model is None and tuner.model == prior.model
    assert 64 < tuner.decide(1, 1, choice(64)).batch_size <= 90
    measure(tuner, choice(64), steps=MIN_STEPS - 1)
    tuner.set_model(GoodputModel(TRUTH, NOISY, 64))
    assert not tuner.decide(1, 1, choice(64)).changed, "its own size has not been measured for long enough"
    assert not tuner.set_prior(dataclasses.replace(prior, largest_batch=99)), "it has a fit of its own"


def test_others_noise_is_that_of_their_initial_batch() -> None:
    tuner = BatchTuner(ADAPTIVE)
    theirs = GoodputModel(TRUTH, NoiseScale(sqr=2.0, var=8.0), 128)
    tuner.set_prior(Prior(model=theirs, largest_batch=64))
    model = tuner.model
    assert model is not None and model.init_batch_size == 64
    assert model.noise == NoiseScale(sqr=2.0, var=16.0), "var is that of a mean of M0 samples"
    assert model.efficiency(256) == pytest.approx(theirs.efficiency(256) * theirs.efficiency(64) ** -1)


@pytest.mark.parametrize("cut", [choice(16, 3), choice(64), choice(32, 1), choice(128), choice(512, 7)])
def test_a_cut_within_the_limits_is_kept(cut: BatchChoice) -> None:
    decision = BatchTuner(ADAPTIVE).decide(1, 1, cut)
    assert (decision.choice, decision.changed) == (cut, False)


@pytest.mark.parametrize(
    ("limits", "cut"),
    [
        (dataclasses.replace(ADAPTIVE, gradient_accumulation=False), choice(16, 3)),
        (ADAPTIVE, choice(8, 7)),
        (ADAPTIVE, choice(1024)),
        (ADAPTIVE, choice(512, 8)),
    ],
)
def test_a_cut_of_other_limits_is_made_anew(limits: BatchLimits, cut: BatchChoice) -> None:
    decision = BatchTuner(limits).decide(1, 1, cut)
    assert decision.changed and decision.choice != cut
    assert decision.batch_size == min(cut.batch_size(1), 4096)


def test_steps_at_another_batch_count_anew_others_add_up() -> None:
    tuner = BatchTuner(ADAPTIVE)
    measure(tuner, choice(64), steps=5)
    measure(tuner, choice(32, 1), steps=4)
    assert (tuner.snapshot().batch_size, tuner.snapshot().steps) == (64, 9)
    measure(tuner, choice(32), replicas=4, steps=3)
    assert (tuner.snapshot().batch_size, tuner.snapshot().steps) == (128, 3)
    counts = {(o.replicas, o.atomic_bsz, o.accum_steps): o.count for o in tuner.snapshot().observations}
    assert counts == {(1, 64, 0): 5.0, (1, 32, 1): 4.0, (4, 32, 0): 3.0}
    measure(tuner, choice(64), steps=200)
    assert tuner.snapshot().observations[-1].count == 100.0, "more weigh no more"
    assert tuner.snapshot().observations[-1].grad_time == pytest.approx(float(TRUTH.grad_time(64)))
    tuner.observe(nodes=1, replicas=1, atomic_bsz=7, accum_steps=0, step_time=1.0, steps=0)
    assert tuner.snapshot().batch_size == 64, "a report of no steps says nothing"


def test_out_of_memory_trusts_only_batches_well_below() -> None:
    for known, bound in ((choice(95), 50), (choice(90), 90), (choice(40), 50)):
        tuner = BatchTuner(dataclasses.replace(ADAPTIVE, init_batch_size=16))
        measure(tuner, known, steps=MIN_STEPS)
        assert tuner.out_of_memory(100).endswith(f"the local bound is now {bound}")
    few = BatchTuner(ADAPTIVE)
    measure(few, choice(90), steps=MIN_STEPS - 1)
    assert few.out_of_memory(100).endswith("the local bound is now 50"), "it may not have run to its end"
    assert few.out_of_memory(20).endswith("the local bound is now 16"), "not below the least"


@given(
    st.sampled_from([2.0**-20, 1 / 8, 64.0]),
    st.floats(0.01, 30.0),
    st.lists(st.tuples(st.sampled_from([16, 64, 96, 200]), st.sampled_from([8, TRIED_AFTER])), min_size=1, max_size=4),
)
def test_decisions_do_not_depend_on_the_unit_of_gradients(
    unit: float, var: float, steps: list[tuple[int, int]]
) -> None:
    """A loss that is multiplied by a number has the same noise scale."""

    def decisions(by: float) -> list[Any]:
        tuner = tuner_at(choice(64), NoiseScale(sqr=by, var=var * by))
        found = []
        for size, count in steps:
            measure(tuner, choice(size), steps=count)
            decision = tuner.decide(1, 1, choice(size))
            found.append((decision.choice, decision.reason))
        return found

    assert decisions(unit) == decisions(1.0)


@pytest.mark.parametrize("noise", [NOISY, NoiseScale(sqr=1.0, var=3.0)])
def test_slow_models_are_decided_as_fast_ones(noise: NoiseScale) -> None:
    slow = ThroughputModel(1e3, 10.0, 2e3, 1e2, 5e2, 20.0, 1.5)  # TRUTH, a hundred thousand times as slow
    tuner = BatchTuner(ADAPTIVE)
    measure(tuner, choice(64), slow=1e5)
    tuner.set_noise(noise)
    tuner.set_model(GoodputModel(slow, noise, 64))
    decision = tuner.decide(1, 1, choice(64))
    assert decision.changed and decision.choice == tuner_at(choice(64), noise).decide(1, 1, choice(64)).choice
