"""Which losses of all workers are failures; no Ray."""

from __future__ import annotations

import pytest

from elastic_ray.durability import PRIOR_MEAN_TIME_S
from elastic_ray.job.losses import Losses


def test_a_job_that_was_evicted_and_has_saved_itself_has_not_failed() -> None:
    losses = Losses(max_failures=0)
    assert losses.evict(True)
    losses.saved()
    assert not losses.evict(True), "no news"
    assert losses.all_lost() and losses.failures == 0


@pytest.mark.parametrize("saved_before", [True, False])
def test_nodes_that_vanish_are_a_failure_though_the_allocator_sees_it_first(saved_before: bool) -> None:
    losses = Losses(max_failures=0)
    if saved_before:
        losses.saved()  # long ago: it says nothing about this notice
    losses.evict(True)
    assert not losses.all_lost() and losses.failures == 1


def test_after_an_eviction_losses_count_again() -> None:
    losses = Losses(max_failures=1)
    losses.evict(True)
    losses.saved()
    losses.evict(False)
    assert losses.all_lost()
    assert not losses.all_lost()


def test_a_job_without_a_limit_restarts_every_time() -> None:
    losses = Losses(max_failures=-1)
    assert all(losses.all_lost() for _ in range(9)) and losses.failures == 9


def test_members_count_as_their_part_of_the_job() -> None:
    losses = Losses(max_failures=0)
    losses.some_lost(4, 3)
    losses.some_lost(2, 2)
    assert losses.mean_time_s(0.0) == pytest.approx(PRIOR_MEAN_TIME_S / 1.25)
    losses.all_lost()
    assert losses.mean_time_s(900.0) == pytest.approx((PRIOR_MEAN_TIME_S + 900.0) / 2.25)
