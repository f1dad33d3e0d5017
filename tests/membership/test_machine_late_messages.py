"""Messages that are late, repeated, or of workers and generations that are gone."""

from __future__ import annotations

from elastic_ray.events import Pause
from elastic_ray.membership.signals import (
    Left,
    Lost,
    PrepareFailed,
    Ready,
    Rerun,
    Reserved,
    StepFailed,
    Stimulus,
    Switched,
)
from tests.membership.driver import CONFIG, Driver, growing, members_of, plan_in, running


def test_messages_of_gone_or_unknown_workers_mean_nothing() -> None:
    driver = running(2)
    driver.lost("w2")
    driver.switched(2, "w1")
    strangers: list[Stimulus] = []
    for worker in ("w2", "w77"):
        strangers += [
            Reserved(worker=worker),
            Ready(worker=worker),
            Left(worker=worker),
            Rerun(worker=worker),
            Lost(worker=worker, cause="again"),
            StepFailed(worker=worker, generation=2, cause="late"),
            PrepareFailed(worker=worker, generation=2, cause="late"),
            Switched(worker=worker, generation=1, pause=Pause(state_s=9.0)),
        ]
    assert not [i for stimulus in strangers for i in driver.notify(stimulus)]
    assert not driver.tick(after_s=CONFIG.notice_s * 2)


def test_messages_of_old_generations_mean_nothing() -> None:
    driver = running(2)
    driver.notify(StepFailed(worker="w1", generation=1, cause="reset"))
    driver.tick(after_s=CONFIG.notice_s + 0.1)
    driver.switched(2, "w1", "w2")
    assert not driver.switched(1, "w1", "w2")
    assert not driver.notify(StepFailed(worker="w2", generation=1, cause="late"))
    assert not driver.notify(PrepareFailed(worker="w2", generation=1, cause="late"))
    assert not driver.tick(after_s=CONFIG.notice_s * 2)
    assert driver.machine.generation == 2


def test_early_ready_and_repeated_ready_mean_nothing() -> None:
    driver = Driver()
    driver.target(n1=1)
    assert not driver.ready("w1")
    driver.join("w1")
    assert not driver.ready("w1")
    driver.switched(1, "w1")
    assert not driver.reserved("w1")


def test_ready_may_overtake_the_rerun_before_it() -> None:
    driver = running(2)
    assert not driver.ready("w2", has_state=True)
    assert members_of(plan_in(driver.notify(Rerun(worker="w2")))) == ["w1"]
    assert members_of(plan_in(driver.switched(2, "w1"))) == ["w1", "w2"]


def test_a_late_switch_to_an_older_generation_changes_nothing() -> None:
    driver = running(3)
    driver.lost("w1")
    driver.lost("w2")
    driver.switched(3, "w3")
    assert not driver.notify(Switched(worker="w3", generation=2, pause=Pause(state_s=1.0)))
    assert driver.names == ["w3"]


def test_a_withdrawn_but_agreed_change_ends_in_alls_generation() -> None:
    driver, joiner = growing(2)
    driver.lost(joiner)
    assert not driver.switched(2, "w1")  # the withdrawal crossed it
    driver.notify(StepFailed(worker="w1", generation=2, cause="called off"))
    spec = plan_in(driver.tick(after_s=CONFIG.notice_s + 0.1))
    assert (members_of(spec), spec.void_below) == (["w1", "w2"], 3)
