"""Remaining work, weights and the discount of a change."""

from __future__ import annotations

import math

import numpy as np
import pytest

from placement.cluster.jobs import Progress, goodputs
from placement.goodput.remaining import (
    concave_value,
    discount,
    overdue,
    rank_weights,
    remaining,
    seconds_left,
    seconds_to_end,
)
from tests.placement.views import view


def test_remaining_work_comes_from_declared_epochs_and_measured_progress() -> None:
    assert remaining(Progress(done=30.0, epoch_ends=(10.0, 20.0), epochs=5)) == pytest.approx(20.0)
    assert remaining(Progress(done=3.0, epochs=5)) == pytest.approx(12.0)  # an epoch takes 3 at least
    assert remaining(Progress(done=3.0, epochs=1)) == 0.0, "it may be about to end"
    assert remaining(Progress(done=3.0)) is None
    assert remaining(None) is None
    late = remaining(Progress(done=99.0, epoch_ends=(10.0,), epochs=2))
    assert late is not None and late > 0  # longer than declared: about to end, not ended


def test_rank_weights_fall_with_the_remaining_time() -> None:
    weights = rank_weights(np.array([100.0, 1.0, 10.0]), 1.0)
    assert weights.tolist() == pytest.approx([1 / 3, 1.0, 2 / 3])
    soft = rank_weights(np.array([100.0, 1.0, 10.0]), 1.0, 1.0)
    assert soft.tolist() == pytest.approx([1 / 3, 1.0, 2 / 3], abs=0.04)
    assert rank_weights(np.array([10.0, 11.0]), 1.0, 1.0).tolist() == pytest.approx(
        [0.75, 0.75], abs=0.02
    )  # near equal
    assert rank_weights(np.array([5.0, 5.0]), 1.0).tolist() == pytest.approx([0.75, 0.75])
    assert rank_weights(np.array([np.nan] * 4), 1.0).tolist() == pytest.approx([0.625] * 4)
    assert rank_weights(np.array([1.0, np.nan, 100.0]), 1.0)[1] == pytest.approx(2 / 3)


def test_a_change_costs_more_the_less_is_left() -> None:
    part = discount(np.array([[1.0, 2.0]]), np.array([100.0]), np.array([50.0]), np.array([600.0]))
    assert part.tolist() == [pytest.approx([100 / 150, 50 / 100])]
    assert discount(np.array([[1.0]]), np.array([np.nan]), np.array([50.0]), np.array([600.0]))[0, 0] == pytest.approx(
        600 / 650
    )
    assert discount(np.array([[1.0]]), np.array([10.0]), np.array([0.0]), np.array([600.0]))[0, 0] == 1.0


def test_a_change_that_an_arrival_undoes_costs_two_pauses() -> None:
    def part(arrivals_per_s: float) -> float:
        short = np.array([[1.0]]), np.array([100.0]), np.array([50.0]), np.array([600.0])
        return float(discount(*short, arrivals_per_s)[0, 0])

    assert part(0.0) == pytest.approx(100 / 150)
    assert part(0.01) == pytest.approx(100 / (100 + 50 * (2 - math.exp(-1.0))))
    assert part(1e9) == pytest.approx(100 / 200)
    assert part(0.0) > part(1e-4) > part(1e-2) > part(1.0)


def test_happiness_is_continuous_in_its_power() -> None:
    speed = np.array([0.5, 1.0, 8.0])
    assert np.allclose(concave_value(speed, 1e-9), concave_value(speed, 0.0), atol=1e-5)
    assert concave_value(speed, 1.0).tolist() == pytest.approx([-0.5, 0.0, 7.0])


def test_what_is_left_of_a_known_job_is_seconds() -> None:
    known = view("a", progress=Progress(done=10.0, epoch_ends=(10.0,), epochs=3), init_batch_size=64)
    left = seconds_left([known, known, view("b")], np.array([32.0, 0.0, 32.0]))
    assert left[:2].tolist() == [20.0 * 64 / 32, 0.0] and np.isnan(left[2])


def test_lateness_is_time_left_over_time_on_equal_share() -> None:
    """A third is done: 40 s are left and 20 done at speed 1, half of both at speed 2."""
    known = view("a", progress=Progress(done=10.0, epoch_ends=(10.0,), epochs=3), init_batch_size=64, submitted_s=5.0)
    unknown = view("b", progress=Progress(done=10.0), init_batch_size=64)
    small = view("c", progress=Progress(done=10.0), init_batch_size=None)
    rate, speed = np.array([32.0, 32.0, 32.0]), np.array([2.0, 1.0, 1.0])
    late = overdue(  # type: ignore[call-arg]
        [known, unknown, small, view("d")],
        *(np.append(each, 1.0) for each in (np.array([40.0, 40.0, 40.0]), rate, speed)),
        65.0,
    )
    assert late[:3].tolist() == pytest.approx([(60 + 20) / 30, (65 + 40) / 60, (65 + 40) / 40]) and np.isnan(late[3])


def test_overdue_jobs_have_a_hundredth_of_an_epoch() -> None:
    assert remaining(Progress(done=99.0, epoch_ends=(10.0, 30.0), epochs=2)) == pytest.approx(0.15)
    assert remaining(Progress(done=40.0, epoch_ends=(10.0, 30.0), epochs=3)) == pytest.approx(5.0), "15 each"


def test_ranks_are_soft_or_sharp() -> None:
    left = np.array([4.0, 1.0])
    assert rank_weights(left, 1.0, 1.0).tolist() == pytest.approx([(0.5 + 0.5 + 0.2) / 2, (0.5 + 0.8 + 0.5) / 2])
    assert rank_weights(left, 2.0).tolist() == [0.25, 1.0] and rank_weights(left, 0.0).tolist() == [1.0, 1.0]
    assert rank_weights(left, 1.0, 2.0).tolist() == pytest.approx([(1 + 1 / 17) / 2, (1 + 16 / 17) / 2])
    many = np.arange(1.0, 1002.0)
    assert rank_weights(many, 1.0, 1.0).tolist() == rank_weights(many, 1.0).tolist()
    assert rank_weights(many[:1000], 1.0, 1.0).tolist() != rank_weights(many[:1000], 1.0).tolist()
    assert rank_weights(np.array([]), 1.0).tolist() == [] and rank_weights(np.array([5.0]), 1.0).tolist() == [1.0]
    # Two of three are known: their ranks of two count as of three.
    assert rank_weights(np.array([4.0, np.nan, 1.0]), 1.0).tolist() == pytest.approx([0.5, 2 / 3, 1.0])


def test_a_changed_job_trains_for_a_second_at_least() -> None:
    part = discount(np.array([[100.0, 0.0]]), np.array([10.0]), np.array([3.0]), np.array([600.0]))
    assert part.tolist() == [pytest.approx([1 / 4, 600 / 603])], "a tenth of a second is left, or all time"


def test_time_to_the_end_is_known_after_an_epoch() -> None:
    """Ten iterations of 64 samples are left, at the goodput of each size."""
    known = view("a", progress=Progress(done=10.0, epoch_ends=(10.0,), epochs=2))
    found = seconds_to_end(known, [4])
    assert found is not None and found[1:].tolist() == pytest.approx((640 / goodputs(known, [4])[1:]).tolist())
    unknown = (Progress(done=10.0, epochs=2, usual_epoch=9.0), Progress(done=10.0, epoch_ends=(10.0,)), None)
    for progress in unknown:
        assert seconds_to_end(view("a", progress=progress), [4]) is None
    assert seconds_to_end(view("a", progress=known.progress, goodput=None), [4]) is None


def test_a_job_that_has_done_nothing_is_not_late() -> None:
    def late(progress: Progress | None, left: float = 40.0, speed: float = 2.0) -> float:
        job = view("a", progress=progress, init_batch_size=64, submitted_s=5.0)
        return float(overdue([job], np.array([left]), np.array([32.0]), np.array([speed]), 65.0)[0])

    third = Progress(done=10.0, epoch_ends=(10.0,), epochs=3)
    assert late(third) == pytest.approx((60 + 20) / 30) and late(third, speed=4.0) == pytest.approx((60 + 10) / 15)
    assert np.isnan(late(None)) and np.isnan(late(Progress(done=0.0), left=0.0))
    assert late(Progress(done=5.0, epochs=1)) == 2.0, "as much is taken to be left as was done"
    early = view("a", progress=third, init_batch_size=64, submitted_s=99.0)
    assert overdue([early], np.array([40.0]), np.array([32.0]), np.array([2.0]), 65.0).tolist() == pytest.approx(
        [20 / 30]
    )
