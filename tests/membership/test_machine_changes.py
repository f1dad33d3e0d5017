"""Planned changes: growing, shrinking, moving, and what makes a change wait or come to nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from elastic_ray.events import EventKind
from elastic_ray.membership.instructions import Announce, Note, Release, Reserve, Withdraw
from elastic_ray.membership.roster import WorkerPhase
from elastic_ray.membership.signals import Lost, PrepareFailed
from tests.membership.driver import CONFIG, Driver, kinds, members_of, only, plan_in, running

# -- growing and shrinking -----------------------------------------------------------------------------------------


def test_growing_keeps_ranks_and_counts_the_longest_pause() -> None:
    driver = running(2)
    assert [r.worker for r in only(Reserve, driver.target(n1=2, n2=2))] == ["w3", "w4"]
    driver.reserved("w3", "w4")
    driver.ready("w4")
    spec = plan_in(driver.ready("w3"))
    assert members_of(spec) == ["w1", "w2", "w3", "w4"]
    places = [spec.place_of(w) for w in ("w1", "w2", "w3", "w4")]
    assert [each.local_rank for each in places] == [0, 1, 0, 1]
    assert [each.node_rank for each in places] == [0, 0, 1, 1]
    driver.switched(2, "w1", pause_s=0.2)
    assert driver.machine.world_size == 4  # in effect as soon as one is there: all ranks agreed
    driver.switched(2, "w2", "w3", pause_s=0.1)
    (note,) = only(Note, driver.switched(2, "w4", pause_s=0.0))
    assert (note.kind, note.from_workers, note.to_workers, note.pause.pause_s) == (EventKind.RESIZE, 2, 4, 0.2)


def test_joiners_are_expected_from_their_start_until_membership() -> None:
    driver = running(2)
    expected = [driver.machine.expects_joiners]
    driver.target(n1=3)
    expected.append(driver.machine.expects_joiners)  # room for it may never come
    driver.reserved("w3")
    expected.append(driver.machine.expects_joiners)
    driver.ready("w3")
    expected.append(driver.machine.expects_joiners)
    driver.switched(2, "w1", "w2", "w3")
    expected.append(driver.machine.expects_joiners)
    assert expected == [False, False, True, True, False]


def test_shrinking_takes_the_highest_ranks_and_frees_their_resources() -> None:
    driver = running(3)
    out = driver.target(n1=1)
    spec = plan_in(out)
    assert members_of(spec) == ["w1"]
    assert only(Announce, out)[0].to == ("w1", "w2", "w3")
    driver.switched(2, "w1")
    assert driver.asked == {"w1", "w2", "w3"}
    assert driver.left("w3") == [Release(worker="w3", kill=False, reason="it left its generation")]
    driver.left("w2")
    assert driver.asked == {"w1"}
    assert Counter(w.node for w in driver.machine.workers.values()) == {"n1": 1}


def test_a_leaver_may_be_heard_before_those_that_stay() -> None:
    driver = running(2)
    driver.target(n1=1)
    assert not only(Announce, driver.left("w2"))
    assert kinds(driver.switched(2, "w1")) == [EventKind.RESIZE]
    assert driver.names == ["w1"]
    assert driver.machine.in_flight is None


def test_what_has_not_joined_is_given_back_first() -> None:
    driver = running(2)
    driver.target(n1=5)
    driver.reserved("w3", "w4")
    out = driver.target(n1=3)
    assert [(r.worker, r.kill) for r in only(Release, out)] == [("w5", True), ("w4", True)]
    out = driver.target(n1=2)
    assert [r.worker for r in only(Release, out)] == ["w3"]
    assert not only(Announce, out)


def test_a_joiner_of_an_announced_change_stays_until_member() -> None:
    driver = running(1)
    driver.target(n1=2)
    driver.join("w2")
    assert not only(Release, driver.target(n1=1))
    assert members_of(plan_in(driver.switched(2, "w1", "w2"))) == ["w1"]


def test_growing_and_shrinking_at_once_is_one_change() -> None:
    driver = running(2)
    driver.target(n1=1, n2=2)
    driver.tick(after_s=1.0)
    driver.reserved("w3", "w4")
    driver.ready("w3")
    spec = plan_in(driver.ready("w4"))
    assert members_of(spec) == ["w1", "w3", "w4"]
    driver.switched(2, "w1", "w3", "w4")
    assert driver.left("w2")
    assert Counter(w.node for w in driver.machine.workers.values()) == {"n1": 1, "n2": 2}


def test_growing_and_shrinking_does_not_wait_for_joiners_forever() -> None:
    driver = running(2)
    driver.target(n1=1, n2=2)
    driver.reserved("w3")  # w4's resources may never come
    assert not only(Announce, driver.tick(after_s=CONFIG.patience_s - 0.1))
    assert members_of(plan_in(driver.tick(after_s=0.2))) == ["w1"]


def test_a_move_brings_the_state_along_and_then_leaves() -> None:
    driver = running(1)
    driver.target(n2=1)
    assert not only(Announce, driver.tick(after_s=30.0))  # nobody to hand the state to
    assert members_of(plan_in(driver.join("w2"))) == ["w1", "w2"]
    driver.switched(2, "w1")
    spec = plan_in(driver.switched(2, "w2"))
    assert members_of(spec) == ["w2"]
    driver.switched(3, "w2")
    driver.left("w1")
    assert Counter(w.node for w in driver.machine.workers.values()) == {"n2": 1}


def test_a_move_of_several_members_keeps_one_of_them() -> None:
    driver = running(3)
    driver.target(n2=2)
    driver.reserved("w4", "w5")
    driver.ready("w4")
    spec = plan_in(driver.ready("w5"))
    assert members_of(spec) == ["w1", "w4", "w5"]
    driver.switched(2, "w1", "w4", "w5")
    assert members_of(driver.ledger.specs[-1]) == ["w4", "w5"]


def test_patience_counts_from_first_joiner_not_a_failed_wish() -> None:
    driver = running(1)
    driver.target(n2=2)  # a move: w1 would leave, but nobody is there yet
    driver.tick(after_s=20.0)
    driver.reserved("w2", "w3")
    assert not only(Announce, driver.ready("w2"))
    assert members_of(plan_in(driver.ready("w3"))) == ["w1", "w2", "w3"]


def test_the_last_member_stays_when_the_job_gets_nothing() -> None:
    driver = running(2)
    assert members_of(plan_in(driver.target())) == ["w1"]
    driver.switched(2, "w1")
    driver.left("w2")
    assert not only(Announce, driver.tick(after_s=100.0))
    assert driver.names == ["w1"]


def test_a_change_below_min_workers_waits_for_coming_joiners() -> None:
    driver = running(2, config=dataclasses.replace(CONFIG, min_workers=2))
    driver.target(n2=2)
    driver.reserved("w3")
    assert not only(Announce, driver.tick(after_s=CONFIG.patience_s * 2))
    assert members_of(plan_in(driver.ready("w3"))) == ["w1", "w3"]


def test_a_target_that_changes_in_flight_is_followed_afterwards() -> None:
    driver = running(1)
    driver.target(n1=2)
    driver.join("w2")
    driver.target(n1=3)
    assert not only(Announce, driver.join("w3"))  # one change at a time
    assert members_of(plan_in(driver.switched(2, "w1", "w2"))) == ["w1", "w2", "w3"]


def test_the_same_target_again_changes_nothing() -> None:
    driver = running(2)
    assert not driver.target(n1=2)
    assert not driver.target(n1=2, n2=0)


# -- changes that come to nothing ----------------------------------------------------------------------------------


def test_a_joiner_dying_before_the_switch_is_not_noticed() -> None:
    driver = running(2)
    driver.target(n1=3)
    driver.join("w3")
    out = driver.lost("w3")
    assert [(w.generation, w.to) for w in only(Withdraw, out)] == [(2, ("w1", "w2"))]
    assert kinds(out) == [EventKind.CANCELLED]
    assert not only(Announce, out)
    assert driver.names == ["w1", "w2"]
    assert not only(Reserve, driver.tick(after_s=CONFIG.backoff_s - 0.1))
    assert [r.worker for r in only(Reserve, driver.tick(after_s=0.2))] == ["w4"]


def test_the_other_joiners_go_on_without_one_that_died() -> None:
    driver = running(1)
    driver.target(n1=3)
    driver.reserved("w2", "w3")
    driver.ready("w2", "w3")
    out = driver.lost("w3")
    assert [w.to for w in only(Withdraw, out)] == [("w1", "w2")]
    assert members_of(plan_in(out)) == ["w1", "w2"]


def test_a_joiner_dying_unannounced_only_delays_the_next() -> None:
    driver = running(1)
    driver.target(n1=2)
    driver.reserved("w2")
    out = driver.lost("w2")
    assert [type(i) for i in out] == [Release]
    assert [r.worker for r in only(Reserve, driver.tick(after_s=CONFIG.backoff_s + 0.1))] == ["w3"]


def test_an_unfulfilled_reservation_is_returned_and_asked_for_later() -> None:
    driver = running(1)
    driver.target(n1=1, dead=1)
    assert not driver.tick(after_s=CONFIG.reserve_timeout_s - 1.0)
    out = driver.tick(after_s=1.5)
    assert [(r.worker, r.kill) for r in only(Release, out)] == [("w2", True)]
    assert kinds(out) == [EventKind.CANCELLED]
    assert not only(Reserve, out + driver.tick(after_s=CONFIG.backoff_s - 0.5))
    assert [r.node for r in only(Reserve, driver.tick(after_s=1.0))] == ["dead"]
    driver.reserved("w2")  # too late: it is not ours any more
    assert driver.asked == {"w1", "w3"}


def test_a_target_on_a_dead_node_blocks_nothing_else() -> None:
    driver = running(1)
    driver.target(n1=1, dead=1, n2=1)
    assert members_of(plan_in(driver.join("w3"))) == ["w1", "w3"]
    driver.switched(2, "w1", "w3")
    driver.tick(after_s=CONFIG.reserve_timeout_s + 1.0)
    assert driver.names == ["w1", "w3"]


def test_a_joiner_that_is_late_is_given_up() -> None:
    driver = running(1)
    driver.target(n1=2)
    driver.reserved("w2")
    out = driver.tick(after_s=CONFIG.join_timeout_s + 1.0)
    assert [(r.worker, r.kill) for r in only(Release, out)] == [("w2", True)]
    assert kinds(out) == [EventKind.CANCELLED]
    assert not only(Reserve, out)
    driver.ready("w2")
    assert driver.asked == {"w1"}


def test_after_late_joiner_the_next_has_twice_as_long() -> None:
    """Thirty jobs that start at once on two cores must not start anew for ever."""
    driver = running(1)
    driver.target(n1=2)
    limits_s = []
    for number in range(2, 8):
        driver.tick(after_s=CONFIG.backoff_s)
        driver.reserved(f"w{number}")
        waited_s = 0.0
        while f"w{number}" in driver.asked:
            driver.tick(after_s=60.0)
            waited_s += 60.0
        limits_s.append(waited_s - 60.0)
    assert limits_s == [120.0, 240.0, 480.0, 960.0, 960.0, 960.0]
    driver.tick(after_s=CONFIG.backoff_s)
    driver.join("w8")
    driver.switched(2, "w1", "w8")
    driver.target(n1=3)
    driver.reserved("w9")
    driver.tick(after_s=CONFIG.join_timeout_s + 1.0)
    assert "w9" not in driver.asked


def test_joiners_are_retried_once_when_their_group_failed() -> None:
    """A joiner's death reaches its peers' sockets before the controller: the healthy ones must not pay for it."""
    driver = running(1)
    driver.target(n1=3)
    driver.reserved("w2", "w3")
    driver.ready("w2", "w3")
    failed = PrepareFailed(worker="w1", generation=2, cause="connection reset")
    out = driver.notify(failed)
    assert [w.to for w in only(Withdraw, out)] == [("w1", "w2", "w3")]
    assert not only(Release, out)
    assert not only(Announce, out)  # wait for the news of who died
    assert not driver.notify(dataclasses.replace(failed, worker="w2"))
    driver.lost("w3")
    assert members_of(plan_in(driver.tick(after_s=CONFIG.notice_s))) == ["w1", "w2"]


def test_joiners_whose_group_never_forms_are_given_up() -> None:
    driver = running(1)
    driver.target(n1=2)
    driver.join("w2")
    driver.notify(PrepareFailed(worker="w1", generation=2, cause="timeout"))
    assert plan_in(driver.tick(after_s=CONFIG.notice_s)).generation == 3
    out = driver.notify(PrepareFailed(worker="w1", generation=3, cause="timeout"))
    assert [r.worker for r in only(Release, out)] == ["w2"]


def test_a_planned_change_has_all_the_time_for_agreement() -> None:
    driver = running(2)
    driver.target(n1=1)
    assert not driver.tick(after_s=1000.0)
    assert driver.machine.in_flight is not None


@pytest.mark.parametrize("late", [0.0, 30.0])
def test_a_leaver_that_dies_while_leaving_disturbs_nobody(late: float) -> None:
    driver = running(2)
    driver.target(n1=1)
    driver.switched(2, "w1")
    assert driver.machine.workers["w2"].phase is WorkerPhase.LEAVING
    out = driver.tick(after_s=late) if late else driver.lost("w2")
    assert [(r.worker, r.kill) for r in only(Release, out)] == [("w2", True)]
    assert not only(Announce, out)
    assert driver.names == ["w1"]


def test_one_leaving_does_not_stand_for_another_too_many() -> None:
    driver = running(3)
    driver.target(n1=2)
    driver.switched(2, "w1", "w2")
    assert driver.asked == {"w1", "w2", "w3"}, "w3 has not left yet"
    assert members_of(plan_in(driver.target(n1=1))) == ["w1"]


def test_a_newcomer_has_joined_others_who_train() -> None:
    driver = Driver(CONFIG)
    driver.target(n1=2)
    driver.join("w1", "w2")
    assert not any(map(driver.machine.is_newcomer, ("w1", "w2", "w9"))), "nothing trains yet"
    driver.switched(1, "w1", "w2")
    driver.target(n1=3)
    assert not driver.machine.is_newcomer("w3"), "it is not there"
    driver.reserved("w3")
    assert driver.machine.is_newcomer("w3")
    driver.ready("w3")
    assert driver.machine.is_newcomer("w3")
    driver.switched(2, "w1", "w2", "w3")
    assert [driver.machine.is_newcomer(worker) for worker in ("w1", "w2", "w3")] == [False, False, True]
    driver.target(n1=1)
    driver.lost("w1")
    driver.lost("w2")
    assert not driver.machine.is_newcomer("w3"), "it is all there is"


def test_failing_newcomers_are_asked_for_more_and_more_rarely() -> None:
    driver, number = running(1), 1
    driver.target(n1=2)
    rests = []
    for rounds in range(10):
        number += 1
        driver.reserved(f"w{number}")
        if rounds % 2:
            driver.ready(f"w{number}")
        out = driver.notify(Lost(worker=f"w{number}", cause="it raised", newcomer=True))
        assert not only(Reserve, out)
        assert driver.names == ["w1"]
        rest_s = 0.0
        while not only(Reserve, driver.tick(after_s=0.5)):
            rest_s += 0.5
        rests.append(rest_s)
    assert rests == pytest.approx([min(CONFIG.backoff_s * 2**k, CONFIG.remember_s) for k in range(10)], abs=0.6)
    number += 1
    driver.tick(after_s=CONFIG.remember_s)
    driver.reserved(f"w{number}")
    driver.notify(Lost(worker=f"w{number}", cause="it raised", newcomer=True))
    assert not only(Reserve, driver.tick(after_s=CONFIG.backoff_s - 0.5))
    assert only(Reserve, driver.tick(after_s=1.0)), "after a while it is the first again"
