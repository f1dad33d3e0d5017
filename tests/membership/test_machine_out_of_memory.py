"""Members that run out of memory start over with the state that they kept, or as newcomers."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_ray.events import EventKind
from elastic_ray.membership.instructions import AllLost, Announce, Note, Release, Withdraw
from elastic_ray.membership.roster import WorkerPhase
from elastic_ray.membership.signals import (
    Rerun,
    StepFailed,
)
from placement.cluster.sizes import AllowedSizes, MemoryNeed
from tests.membership.driver import CONFIG, ended, growing, members_of, only, plan_in, running


def test_one_member_out_of_memory_starts_over_others_continue() -> None:
    driver = running(2)
    out = driver.notify(Rerun(worker="w1"))
    assert members_of(plan_in(out)) == ["w2"]
    assert not only(Release, out)
    assert [(w.generation, w.to) for w in only(Withdraw, out)] == [(1, ("w1",))]
    assert driver.machine.workers["w1"].phase is WorkerPhase.STARTING
    driver.switched(2, "w2")
    assert members_of(plan_in(driver.ready("w1", has_state=True))) == ["w2", "w1"]


def test_a_run_starting_over_hears_no_generations_of_before() -> None:
    driver = running(3)
    driver.target(n1=1)
    driver.notify(Rerun(worker="w3"))  # in flight: generation 3, and generation 2 may still be on its way to anybody
    out = driver.notify(Rerun(worker="w1"))
    assert [(w.generation, w.to) for w in only(Withdraw, out)] == [(g, ("w1",)) for g in (1, 2, 3)]


def test_the_only_member_out_of_memory_keeps_its_state() -> None:
    driver = running(1)
    assert driver.notify(Rerun(worker="w1")) == [Withdraw(generation=1, to=("w1",))]
    spec = plan_in(driver.ready("w1", has_state=True))
    assert members_of(spec) == ["w1"]
    driver.switched(spec.generation, "w1")
    assert driver.names == ["w1"]


def test_several_members_out_of_memory_begin_again_together() -> None:
    driver = running(3)
    driver.notify(Rerun(worker="w2"))
    driver.notify(Rerun(worker="w1"))
    assert not ended(driver.notify(Rerun(worker="w3")))
    driver.ready("w1", "w2", has_state=True)
    assert members_of(plan_in(driver.ready("w3", has_state=True))) == ["w1", "w2", "w3"]


def test_at_the_least_size_others_continue_until_it_returns() -> None:
    need = MemoryNeed(available_bytes=50, sharded_bytes=100)  # from 4 workers on
    driver = running(4, config=dataclasses.replace(CONFIG, sizes=AllowedSizes(memory=need), min_workers=4))
    out = driver.notify(Rerun(worker="w2"))
    assert members_of(plan_in(out)) == ["w1", "w3", "w4"], "they hold its rows, which an end would lose"
    (told,) = [note for note in only(Note, out) if note.kind is EventKind.WARNING]
    assert told.reason.startswith("the job continues with 3 workers, fewer than the 4 that its memory needs")
    driver.switched(2, "w1", "w3", "w4")
    out = driver.notify(Rerun(worker="w3"))
    (told,) = [note for note in only(Note, out) if note.kind is EventKind.WARNING]
    assert "continues with 2 workers, " in told.reason and "needs 100 B in a group of 2 and has 50 B" in told.reason
    driver.switched(3, "w1", "w4")
    driver.ready("w2", has_state=True)
    assert members_of(plan_in(driver.ready("w3", has_state=True))) == ["w1", "w4", "w2", "w3"], "in one change"


def test_who_trained_longest_is_waited_for_when_all_restart() -> None:
    driver = running(2)
    driver.notify(Rerun(worker="w2"))
    driver.switched(2, "w1")  # and trains on alone
    driver.notify(Rerun(worker="w1"))
    driver.ready("w2", has_state=True)
    assert not only(Announce, driver.tick(after_s=CONFIG.patience_s * 2))
    assert members_of(plan_in(driver.ready("w1", has_state=True))) == ["w1", "w2"]


def test_who_loads_meanwhile_does_not_begin_beside_the_state() -> None:
    driver = running(1)
    driver.notify(Rerun(worker="w1"))
    driver.target(n1=2)
    driver.reserved("w2")
    driver.ready("w2", loaded=40)
    assert not only(Announce, driver.tick(after_s=CONFIG.patience_s * 3))
    assert members_of(plan_in(driver.ready("w1", has_state=True))) == ["w1"]


def test_a_newcomer_does_not_begin_while_the_state_restarts() -> None:
    driver = running(1)
    driver.target(n1=2)
    driver.reserved("w2")
    driver.notify(Rerun(worker="w1"))
    driver.ready("w2")
    assert not only(Announce, driver.tick(after_s=CONFIG.patience_s * 3))
    spec = plan_in(driver.ready("w1", has_state=True))
    assert members_of(spec) == ["w1"]  # w2 comes at a step where the rest of the epoch is enough for both
    assert members_of(plan_in(driver.switched(spec.generation, "w1"))) == ["w1", "w2"]


def test_a_worker_without_whole_state_joins_as_a_newcomer() -> None:
    driver = running(2)
    out = driver.notify(Rerun(worker="w1", has_state=False))
    assert members_of(plan_in(out)) == ["w2"]
    driver.switched(2, "w2")
    assert members_of(plan_in(driver.ready("w1"))) == ["w2", "w1"]


def test_when_nobody_kept_a_whole_state_the_job_restarts() -> None:
    driver = running(2)
    driver.notify(Rerun(worker="w1", has_state=False))
    assert only(AllLost, driver.notify(Rerun(worker="w2", has_state=False)))


def test_one_that_kept_a_whole_state_is_enough() -> None:
    driver = running(2)
    driver.notify(Rerun(worker="w1", has_state=False))
    assert not ended(driver.notify(Rerun(worker="w2")))
    driver.ready("w1")
    assert members_of(plan_in(driver.ready("w2", has_state=True))) == ["w2"]


@pytest.mark.parametrize("end", ["died", "late", "died ready"])
def test_when_the_last_state_holder_goes_the_job_restarts(end: str) -> None:
    driver = running(1)
    driver.target(n1=2)
    driver.reserved("w2")
    driver.notify(Rerun(worker="w1"))
    driver.ready("w2")
    if end == "late":
        out = driver.tick(after_s=CONFIG.join_timeout_s + 1.0)
    else:
        if end == "died ready":
            driver.ready("w1", has_state=True)
        out = driver.lost("w1")
    assert only(AllLost, out)
    assert not only(Announce, out)


def test_members_lost_while_one_restarts_continue_with_that_one() -> None:
    driver = running(2)
    driver.notify(Rerun(worker="w1"))
    assert not ended(driver.lost("w2"))
    assert members_of(plan_in(driver.ready("w1", has_state=True))) == ["w1"]


def test_out_of_memory_in_a_change_that_is_entered() -> None:
    """w2's Switched is still on its way: the others wait for it in generation 2, where it is no more."""
    driver, joiner = growing(1)
    driver.switched(2, "w1")
    out = driver.notify(Rerun(worker=joiner))
    assert members_of(plan_in(out)) == ["w1"]
    driver.switched(2, joiner)
    assert driver.machine.workers[joiner].phase is WorkerPhase.STARTING
    driver.switched(3, "w1")
    assert members_of(plan_in(driver.ready(joiner, has_state=True))) == ["w1", joiner]


def test_a_joiner_with_a_withdrawn_generations_state_is_useless() -> None:
    driver = running(1)
    driver.target(n1=3)
    driver.reserved("w2", "w3")
    driver.ready("w2", "w3")
    driver.lost("w3")  # but all had entered generation 2 by then; generation 3 is in flight
    out = driver.notify(StepFailed(worker="w2", generation=2, cause="reset"))
    assert [(r.worker, r.kill) for r in only(Release, out)] == [("w2", True)]
    assert [w.generation for w in only(Withdraw, out)] == [3]
