"""Which losses of all workers are failures; no Ray."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ray.background import Background
from elastic_ray.checkpoints.automatic import StateFile
from elastic_ray.checkpoints.interval import PRIOR_MEAN_TIME_S
from elastic_ray.job.journal import Journal
from elastic_ray.job.supervisor import JobSupervisor
from elastic_ray.record.losses import Losses
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.worker.messages import StateSaved
from tests.job.specs import spec


def remembered(**counts: float) -> Any:
    return SimpleNamespace(**counts)


def test_so_many_losses_are_allowed() -> None:
    losses = Losses(max_failures=1)
    assert losses.all_lost(0)
    assert not losses.all_lost(9) and losses.failures == 2


def test_a_job_without_a_limit_restarts_every_time() -> None:
    losses = Losses(max_failures=-1)
    assert all(losses.all_lost(0) for _ in range(9)) and losses.failures == 9


def test_by_default_a_job_restarts_while_it_makes_progress() -> None:
    losses = Losses(max_failures=0)
    assert all(losses.all_lost(saved) for saved in (0, 0, 5, 5, 5, 6, 6, 6))
    assert not losses.all_lost(6)
    assert not Losses(max_failures=0, restart=False).all_lost(5)


def test_what_was_counted_is_recalled() -> None:
    losses = Losses(max_failures=0)
    losses.recall(remembered(lost=3.0, failures=3, raised=0, fruitless=3, saved_steps=7))
    assert not losses.all_lost(7)
    losses.recall(remembered(lost=3.0, failures=3, raised=0, fruitless=3, saved_steps=7))
    assert losses.all_lost(8)


@pytest.mark.parametrize(("allowed", "trains_on"), [(2, [True, True, False]), (0, [True] * 3), (-1, [True] * 3)])
def test_a_worker_lost_to_its_exception_is_a_failure(allowed: int, trains_on: list[bool]) -> None:
    losses = Losses(max_failures=allowed)
    assert [losses.one_raised() for _ in range(3)] == trains_on and losses.raised == 3 and losses.failures == 0


def test_an_exception_that_costs_the_last_worker_counts_once() -> None:
    losses = Losses(max_failures=2)
    losses.one_raised()
    assert losses.all_lost(0) and (losses.failures, losses.raised) == (1, 0)
    losses.one_raised()
    losses.settled()  # the others trained on
    assert not losses.all_lost(0) and (losses.failures, losses.raised) == (2, 1)


def test_what_a_worker_raised_before_others_trained_on_counts() -> None:
    losses = Losses(max_failures=2)
    losses.recall(remembered(lost=0.0, failures=0, raised=1, fruitless=0, saved_steps=0))
    assert losses.one_raised() and not losses.one_raised()
    assert not losses.all_lost(0) and (losses.failures, losses.raised, losses.lost) == (1, 2, 1.0)


def test_a_restart_without_limit_counts_no_fruitless_ones() -> None:
    for allowed in (-1, 1):
        losses = Losses(max_failures=allowed)
        losses.all_lost(5)
        assert (losses.fruitless, losses.saved_steps) == (0, 0)
    losses = Losses(max_failures=0)
    losses.all_lost(0)
    losses.all_lost(5)
    assert (losses.fruitless, losses.saved_steps) == (1, 5)


def test_a_group_that_grew_has_lost_nothing() -> None:
    losses = Losses(max_failures=0)
    for before, after in ((2, 3), (0, 2), (2, 2)):
        losses.some_lost(before, after)
    assert losses.lost == 0.0
    losses.some_lost(1, 0)
    losses.some_lost(4, 1)
    assert losses.lost == 1.75


def test_members_count_as_their_part_of_the_job() -> None:
    losses = Losses(max_failures=0)
    losses.some_lost(4, 3)
    losses.some_lost(2, 2)
    assert losses.mean_time_s(0.0) == pytest.approx(PRIOR_MEAN_TIME_S / 1.25)
    losses.all_lost(0)
    assert losses.mean_time_s(900.0) == pytest.approx((PRIOR_MEAN_TIME_S + 900.0) / 2.25)


def test_wall_clock_that_is_set_back_is_no_matter(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobSupervisor(spec(storage_path=str(tmp_path / "run")), None, Background(), journal)
    begin_s = time.time()
    monkeypatch.setattr(time, "time", lambda: begin_s - 3600.0)
    state = StateFile(path="state", size=1, sha256="", resume_point=ResumePoint(epoch=0, steps=1))
    mean_s = job.saved(StateSaved(state=state, pause_s=0.0, cost_s=0.0, write_s=0.0))
    assert PRIOR_MEAN_TIME_S <= mean_s < PRIOR_MEAN_TIME_S + 60.0
