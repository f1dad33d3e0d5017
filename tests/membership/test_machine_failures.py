"""Unplanned changes: workers that die or hang, in a step or in a planned change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic_ray.events import EventKind, Pause
from elastic_ray.membership.instructions import AllLost, Announce, Note, Release, Reserve, Withdraw
from elastic_ray.membership.signals import (
    PrepareFailed,
    StepFailed,
    Stimulus,
    Switched,
)
from tests.membership.driver import CONFIG, Driver, ended, growing, kinds, members_of, only, plan_in, running


def test_a_superseded_generation_is_noted_with_its_proof() -> None:
    driver = running(2)
    driver.target(n1=3)
    driver.join("w3")
    proof = {"proof": {"link": 5}}
    driver.notify(Switched(worker="w1", generation=2, pause=Pause(), proof=proof))
    out = driver.lost("w3")
    (note,) = only(Note, out)
    assert (note.kind, note.generation, note.from_workers, note.to_workers) == (EventKind.RESIZE, 2, 2, 3)
    assert note.detail == proof, "what follows refers to it"
    (then,) = only(Note, driver.switched(3, "w1", "w2"))
    assert (then.kind, then.from_workers, then.to_workers) == (EventKind.FAILURE, 3, 2)


# -- members that die ----------------------------------------------------------------------------------------------


def test_survivors_go_on_at_once_when_a_member_dies() -> None:
    driver = running(3)
    out = driver.lost("w1")
    spec = plan_in(out)
    assert (members_of(spec), spec.generation, spec.void_below) == (["w2", "w3"], 2, 2)
    assert [(r.worker, r.kill) for r in only(Release, out)] == [("w1", True)]
    assert [r.worker for r in only(Reserve, out)] == ["w4"]  # the target has not changed
    assert not driver.notify(StepFailed(worker="w2", generation=1, cause="reset"))
    assert not driver.notify(StepFailed(worker="w3", generation=1, cause="reset"))
    assert not driver.tick(after_s=CONFIG.notice_s * 2)
    driver.switched(2, "w2")
    (note,) = only(Note, driver.switched(2, "w3", pause_s=0.7))
    assert (note.kind, note.from_workers, note.to_workers, note.pause.pause_s) == (EventKind.FAILURE, 3, 2, 0.7)


def test_a_failed_step_waits_briefly_for_news_of_deaths() -> None:
    driver = running(3)
    assert not driver.notify(StepFailed(worker="w2", generation=1, cause="reset"))
    assert not driver.tick(after_s=CONFIG.notice_s - 0.1)
    assert members_of(plan_in(driver.lost("w1"))) == ["w2", "w3"]
    assert not driver.tick(after_s=CONFIG.notice_s)


def test_without_such_news_all_members_go_on() -> None:
    driver = running(3)
    driver.notify(StepFailed(worker="w2", generation=1, cause="reset"))
    spec = plan_in(driver.tick(after_s=CONFIG.notice_s + 0.1))
    assert (members_of(spec), spec.void_below) == (["w1", "w2", "w3"], 2)
    assert "reset" in spec.reason


def test_two_deaths_at_once_end_in_one_generation() -> None:
    driver = running(4)
    driver.lost("w1")
    assert members_of(plan_in(driver.lost("w3"))) == ["w2", "w4"]
    driver.notify(StepFailed(worker="w2", generation=2, cause="could not connect"))  # of the one in between
    assert not only(Announce, driver.tick(after_s=CONFIG.notice_s * 2))
    assert kinds(driver.switched(3, "w2", "w4")) == [EventKind.FAILURE]


def test_all_lost() -> None:
    driver = running(2)
    driver.lost("w1")
    out = driver.lost("w2")
    (lost,) = only(AllLost, out)
    assert (
        lost.reason.startswith("lost all 2 workers: worker w1 on node n1: ") and "; worker w2 on node " in lost.reason
    )
    assert isinstance(out[-1], AllLost)  # what came after it would not be given back by the reset
    assert not driver.tick(after_s=10.0)
    assert not driver.target(n1=5)


def test_a_reset_returns_everything_and_begins_with_higher_numbers() -> None:
    driver = running(2)
    driver.target(n1=3, n2=1)
    driver.reserved("w3")
    driver.lost("w1")
    driver.lost("w2")
    driver.machine.trained = True
    released = driver.machine.reset()
    assert not driver.machine.trained, "the group that is to come has not"
    for instruction in released:
        driver.ledger.book(instruction)
    assert {r.worker for r in only(Release, released)} == {"w3", "w4", "w5"}
    assert not driver.asked
    asked = [r.worker for r in only(Reserve, driver.tick(after_s=0.1))]
    assert asked == ["w6", "w7", "w8", "w9"]
    driver.reserved(*asked)
    driver.ready(*asked)
    assert driver.ledger.specs[-1].generation > 2
    assert kinds(driver.switched(driver.ledger.specs[-1].generation, *asked)) == [EventKind.STARTED]


def test_a_hung_member_is_lost_like_a_dead_one() -> None:
    driver = running(2)
    out = driver.lost("w2", "it has been silent for 2.1 s")
    assert members_of(plan_in(out)) == ["w1"]
    driver.switched(2, "w1")
    assert not driver.notify(Switched(worker="w2", generation=1, pause=Pause(state_s=0.0)))  # it wakes up
    assert not driver.notify(StepFailed(worker="w2", generation=2, cause="called off"))
    assert not driver.tick(after_s=CONFIG.notice_s * 2)


def test_members_silent_in_a_forced_generation_are_lost_together() -> None:
    driver = running(4)
    driver.lost("w1")
    driver.switched(2, "w2")
    out = driver.tick(after_s=CONFIG.switch_timeout_s + 0.1)
    assert {(r.worker, r.kill) for r in only(Release, out)} == {("w3", True), ("w4", True)}
    spec = plan_in(out)
    assert members_of(spec) == ["w2"]
    assert "w3, w4" in spec.reason


def test_a_forced_generation_that_nobody_formed_is_retried_soon() -> None:
    driver = running(3)
    driver.lost("w1")
    assert not driver.notify(PrepareFailed(worker="w2", generation=2, cause="timeout"))
    assert not driver.tick(after_s=CONFIG.notice_s * 2)  # w3 has not spoken
    assert not driver.notify(PrepareFailed(worker="w3", generation=2, cause="timeout"))
    assert members_of(plan_in(driver.tick(after_s=CONFIG.notice_s + 0.1))) == ["w2", "w3"]


def test_a_forced_generation_breaking_while_entered_is_replaced() -> None:
    driver = running(3)
    driver.lost("w1")
    driver.notify(StepFailed(worker="w2", generation=2, cause="reset"))
    assert plan_in(driver.tick(after_s=CONFIG.notice_s + 0.1)).generation == 3


# -- failures and planned changes ----------------------------------------------------------------------------------


def test_a_failure_supersedes_a_planned_change_the_joiner_stays() -> None:
    driver, joiner = growing(2)
    out = driver.lost("w1")
    assert [(w.generation, w.to) for w in only(Withdraw, out)] == [(2, (joiner,))]
    spec = plan_in(out)
    assert (members_of(spec), spec.void_below) == (["w2"], 3)
    assert members_of(plan_in(driver.switched(3, "w2"))) == ["w2", joiner]


def test_a_suspicion_holds_new_changes_back() -> None:
    driver = running(2)
    driver.notify(StepFailed(worker="w1", generation=1, cause="reset"))
    assert not only(Announce, driver.target(n1=1))
    driver.tick(after_s=CONFIG.notice_s + 0.1)
    assert members_of(plan_in(driver.switched(2, "w1", "w2"))) == ["w1"]


def test_joiner_dying_after_the_switch_is_a_member_lost() -> None:
    driver, joiner = growing(2)
    driver.switched(2, "w1", "w2", joiner)
    assert members_of(plan_in(driver.lost(joiner))) == ["w1", "w2"]


def test_joiner_dying_in_the_switch_is_replaced_by_force() -> None:
    driver, joiner = growing(2)
    driver.switched(2, "w1")
    spec = plan_in(driver.lost(joiner))
    assert (members_of(spec), spec.void_below) == (["w1", "w2"], 3)


def test_member_dying_in_the_switch_leaves_the_joiner_surviving() -> None:
    """The joiner may have trained in generation 2 already: left behind, its state would differ from the others'."""
    driver, joiner = growing(2)
    driver.switched(2, "w1")
    out = driver.lost("w2")
    assert members_of(plan_in(out)) == ["w1", joiner]
    assert not only(Withdraw, out)
    assert not driver.switched(2, joiner)  # late, of the generation before
    assert members_of(plan_in(driver.lost("w1", "died in generation 3 too"))) == [joiner]


@pytest.mark.parametrize("evidence", ["switched", "failed"])
def test_a_joiner_holding_the_last_state_saves_the_job(evidence: str) -> None:
    driver, joiner = growing(1)
    driver.switched(2, "w1")
    out = driver.lost("w1")
    assert not ended(out)
    assert [w.to for w in only(Withdraw, out)] == [(joiner,)]  # so that it speaks up
    speaks: Stimulus = StepFailed(worker=joiner, generation=2, cause="called off")
    if evidence == "switched":
        speaks = Switched(worker=joiner, generation=2, pause=Pause(state_s=0.0))
    spec = plan_in(driver.notify(speaks, after_s=CONFIG.notice_s / 2))
    assert (members_of(spec), spec.void_below) == ([joiner], 3)
    assert kinds(driver.switched(3, joiner)) == [EventKind.FAILURE]


@pytest.mark.parametrize("switched", [False, True])
def test_a_stateless_joiner_does_not_begin_anew_after_training(switched: bool) -> None:
    driver, _ = growing(1)
    if switched:
        driver.switched(2, "w1")
    assert not ended(driver.lost("w1"))
    assert only(AllLost, driver.tick(after_s=CONFIG.notice_s + 0.1))


def test_nothing_is_lost_with_a_member_before_training() -> None:
    driver = Driver()
    driver.target(n1=2)
    driver.reserved("w1", "w2")
    driver.ready("w1", "w2")
    driver.switched(1, "w1")
    out = driver.lost("w1")
    assert not ended(out)
    assert members_of(plan_in(out)) == ["w2"]


def test_a_joiner_that_never_enters_a_change_is_lost() -> None:
    driver, joiner = growing(2)
    driver.switched(2, "w1", "w2")
    out = driver.tick(after_s=CONFIG.switch_timeout_s + 0.1)
    assert [(r.worker, r.kill) for r in only(Release, out)] == [(joiner, True)]
    assert members_of(plan_in(out)) == ["w1", "w2"]


def test_a_torn_vote_is_cured_by_the_agreed_generation() -> None:
    """w2's last collective of generation 1 failed, w1's did not: w2 enters generation 2 all the same."""
    driver, joiner = growing(2)
    driver.notify(StepFailed(worker="w2", generation=1, cause="reset"))
    driver.switched(2, "w1", "w2", joiner)
    assert not driver.tick(after_s=CONFIG.notice_s * 2)


def test_a_failure_in_the_entered_generation_is_not_past() -> None:
    driver, joiner = growing(2)
    driver.notify(StepFailed(worker="w2", generation=2, cause="reset"))
    driver.switched(2, "w1")
    assert members_of(plan_in(driver.tick(after_s=CONFIG.notice_s + 0.1))) == ["w1", "w2", joiner]


def test_a_leaver_whose_last_step_failed_is_released() -> None:
    driver = running(2)
    driver.target(n1=1)
    driver.switched(2, "w1")
    out = driver.notify(StepFailed(worker="w2", generation=1, cause="reset"))
    assert [(r.worker, r.kill) for r in only(Release, out)] == [("w2", True)]
    other = running(2)
    other.target(n1=1)
    other.notify(StepFailed(worker="w2", generation=1, cause="reset"))
    out = other.switched(2, "w1")
    assert [(r.worker, r.kill) for r in only(Release, out)] == [("w2", True)]
    assert not other.tick(after_s=CONFIG.notice_s * 2)


def test_a_leaver_that_leaves_a_broken_generation_is_lost() -> None:
    """It took up the planned change, which the forced one has replaced: nobody else will ever hold its state."""
    driver = running(2)
    driver.target(n1=1)
    assert members_of(plan_in(driver.lost("w1"))) == ["w2"]
    assert only(AllLost, driver.left("w2"))


def test_a_joiner_without_the_state_waits_for_the_news() -> None:
    """It is the first to speak of the generation, which nobody has trained in; nobody has died."""
    driver, joiner = growing(2)
    assert not driver.notify(StepFailed(worker=joiner, generation=2, cause="reset"))
    assert not driver.tick(after_s=CONFIG.notice_s - 0.1)
    spec = plan_in(driver.tick(after_s=0.2))
    assert (members_of(spec), spec.generation, spec.reason) == (["w1", "w2"], 3, "a collective failed: reset")
    assert members_of(plan_in(driver.switched(3, "w1", "w2"))) == ["w1", "w2", joiner]


@pytest.mark.parametrize(("generation", "saves"), [(1, False), (2, True)])
def test_the_last_joiner_speaks_for_the_generation_it_enters(generation: int, saves: bool) -> None:
    driver, joiner = growing(1)
    driver.lost("w1")
    out = driver.notify(StepFailed(worker=joiner, generation=generation, cause="late"), after_s=CONFIG.notice_s / 2)
    assert [members_of(each.spec) for each in only(Announce, out)] == [[joiner]] * saves


def reserving() -> Driver:
    driver = Driver()
    driver.target(n1=1)
    return driver


def starting() -> Driver:
    driver = reserving()
    driver.reserved("w1")
    return driver


def forced() -> Driver:
    driver = running(3)
    driver.lost("w1")
    return driver


def leaving() -> Driver:
    driver = running(2)
    driver.target(n1=1)
    driver.switched(2, "w1")
    return driver


@pytest.mark.parametrize(
    ("made", "limit_s"),
    [
        (reserving, CONFIG.reserve_timeout_s),
        (starting, CONFIG.join_timeout_s),
        (forced, CONFIG.switch_timeout_s),
        (leaving, CONFIG.switch_timeout_s),
    ],
)
def test_who_comes_at_the_last_moment_is_not_late(made: Callable[[], Driver], limit_s: float) -> None:
    driver = made()
    assert not only(Release, driver.tick(after_s=limit_s))
    assert only(Release, driver.tick(after_s=0.001))


def test_news_of_a_death_has_its_time() -> None:
    driver = running(3)
    driver.notify(StepFailed(worker="w2", generation=1, cause="reset"))
    assert not driver.tick(after_s=CONFIG.notice_s - 0.001)
    assert only(Announce, driver.tick(after_s=0.001))


def test_a_late_reservation_is_followed_by_a_pause() -> None:
    driver = reserving()
    assert only(Release, driver.tick(after_s=CONFIG.reserve_timeout_s + 1.0))
    assert not only(Reserve, driver.tick(after_s=CONFIG.backoff_s - 0.001))
    assert only(Reserve, driver.tick(after_s=0.001))
