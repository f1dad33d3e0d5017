"""Which losses of all workers are failures; no Ray."""

from __future__ import annotations

import pytest

from elastic_ray.durability import PRIOR_MEAN_TIME_S
from elastic_ray.job.losses import Losses


def test_so_many_losses_are_allowed() -> None:
    losses = Losses(max_failures=1)
    assert losses.all_lost()
    assert not losses.all_lost() and losses.failures == 2


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
