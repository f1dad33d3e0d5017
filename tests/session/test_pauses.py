"""A rank's pause between two groups, by what it was waiting for."""

from __future__ import annotations

import time

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.events import Pause
from elastic_ray.steps.step import StepClock

SHAPE = BatchChoice(atomic_bsz=8)
WAIT_S = 0.02


def step(clock: StepClock) -> None:
    clock.edge(SHAPE, 1, 8, "")


def test_change_is_vote_group_and_state_before_the_step() -> None:
    clock = StepClock()
    begun_s = time.monotonic()
    step(clock)
    for moment in (clock.change_begins, clock.group_stands):
        time.sleep(WAIT_S)  # the time that is measured
        moment()
    time.sleep(WAIT_S)  # the time that is measured
    pause = clock.resume(1)
    assert min(pause.vote_s, pause.group_s, pause.state_s) >= WAIT_S
    assert sum(pause.detail.values()) == pause.pause_s <= time.monotonic() - begun_s
    assert clock.first_step_s is None
    time.sleep(WAIT_S)  # the time that is measured
    step(clock)
    first_s = clock.first_step_s
    assert first_s is not None and first_s >= WAIT_S
    step(clock)
    assert clock.first_step_s == first_s, "the second step is not the first"


def test_group_that_breaks_before_training_is_part_of_waiting() -> None:
    clock = StepClock()
    step(clock)
    clock.change_begins()
    clock.group_stands()
    time.sleep(WAIT_S)  # the time that is measured
    broken_s = time.monotonic()
    clock.change_begins()  # the failure of that group
    clock.group_stands()
    pause = clock.resume(1)
    assert pause.group_s >= WAIT_S and pause.state_s <= time.monotonic() - broken_s


def test_change_put_off_is_forgotten_with_the_next_step() -> None:
    clock = StepClock()
    step(clock)
    clock.change_begins()
    step(clock)
    time.sleep(WAIT_S)  # the time that is measured
    clock.change_begins()
    assert clock.resume(1).vote_s >= WAIT_S


def test_a_joiner_has_no_pause() -> None:
    clock = StepClock()
    clock.group_stands()
    assert clock.resume(1) == Pause()
    step(clock)
    assert clock.first_step_s is None
