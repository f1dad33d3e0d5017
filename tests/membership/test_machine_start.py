"""The first start: resources, the first generation, and what a job begins with."""

from __future__ import annotations

import dataclasses

from elastic_ray.events import EventKind
from elastic_ray.membership.instructions import Announce, Launch, Note, Release, Reserve, Withdraw
from placement.cluster.sizes import AllowedSizes
from tests.membership.driver import CONFIG, Driver, ended, kinds, members_of, only, plan_in, running


def test_the_first_start_asks_for_resources_launches_and_begins() -> None:
    driver = Driver()
    asked = only(Reserve, driver.target(n1=1, n2=1))
    assert [(r.worker, r.node) for r in asked] == [("w1", "n1"), ("w2", "n2")]
    assert driver.reserved("w1") == [Launch(worker="w1", node="n1")]
    driver.reserved("w2")
    assert not only(Announce, driver.ready("w1"))  # w2 is starting: worth a moment
    spec = plan_in(driver.ready("w2"))
    assert members_of(spec) == ["w1", "w2"]
    assert (spec.generation, spec.void_below, spec.reason) == (1, 1, "test")
    assert driver.machine.world_size == 0
    assert not kinds(driver.switched(1, "w2"))
    (note,) = only(Note, driver.switched(1, "w1"))
    assert note == Note(kind=EventKind.STARTED, from_workers=0, to_workers=2, reason="test", generation=1)
    assert driver.machine.world_size == driver.machine.target_workers == 2
    assert driver.machine.in_flight is None


def test_the_first_start_waits_for_min_workers_however_long() -> None:
    driver = Driver(dataclasses.replace(CONFIG, min_workers=3))
    driver.target(n1=4)
    driver.join("w1", "w2")
    assert not only(Announce, driver.tick(after_s=50.0))
    assert members_of(plan_in(driver.join("w3"))) == ["w1", "w2", "w3"]


def test_the_first_generation_has_no_more_workers_than_samples() -> None:
    driver = Driver(dataclasses.replace(CONFIG, min_workers=3), first_most=2)
    driver.target(n1=4)
    driver.reserved("w1", "w2", "w3", "w4")
    assert not only(Announce, driver.ready("w1"))
    assert members_of(plan_in(driver.ready("w2"))) == ["w1", "w2"]
    driver.ready("w3", "w4")
    driver.switched(1, "w1", "w2")
    assert members_of(driver.ledger.specs[-1]) == ["w1", "w2", "w3", "w4"]


def test_a_job_from_an_automatic_checkpoint_starts_as_new() -> None:
    gang = Driver(dataclasses.replace(CONFIG, min_workers=3))
    gang.target(n1=4)
    gang.reserved("w1", "w2", "w3", "w4")
    gang.ready("w1", "w2", loaded=40)
    assert not only(Announce, gang.tick(after_s=CONFIG.patience_s * 3)), "its minimum is 3 workers"
    assert members_of(plan_in(gang.ready("w3", loaded=40))) == ["w1", "w2", "w3"]
    patient = Driver()
    patient.target(n1=2)
    patient.reserved("w1", "w2")
    assert not only(Announce, patient.ready("w1", loaded=40)), "w2 is starting: worth a moment"
    assert members_of(plan_in(patient.ready("w2", loaded=40))) == ["w1", "w2"]


def test_who_has_loaded_an_automatic_checkpoint_can_be_spared() -> None:
    """Its state is in storage: neither its loss nor a smaller target ends the job's start."""
    driver = Driver(dataclasses.replace(CONFIG, min_workers=2))
    driver.target(n1=3)
    driver.reserved("w1", "w2", "w3")
    driver.ready("w1", loaded=40)
    assert not ended(driver.lost("w1"))
    driver.ready("w2", loaded=40)
    assert {r.worker for r in only(Release, driver.target(n2=2))} == {"w2", "w3"}
    driver.tick(after_s=CONFIG.backoff_s)
    driver.reserved("w4", "w5")
    driver.ready("w4", loaded=40)
    assert members_of(plan_in(driver.ready("w5", loaded=40))) == ["w4", "w5"]


def test_worker_that_could_not_load_does_not_begin_anew() -> None:
    alone = Driver()
    alone.target(n1=2)
    alone.reserved("w1", "w2")
    alone.ready("w1", loaded=40)
    assert members_of(plan_in(alone.ready("w2"))) == ["w1", "w2"], "it takes over what w1 has"
    out = alone.lost("w1") + alone.tick(after_s=CONFIG.backoff_s)
    assert not only(Announce, out) and [(r.worker, r.kill) for r in only(Release, out)] == [("w1", True), ("w2", True)]
    assert [r.worker for r in only(Reserve, out + alone.tick())] == ["w3", "w4"]
    alone.reserved("w3", "w4")
    alone.ready("w3")
    assert members_of(plan_in(alone.ready("w4"))) == ["w3", "w4"], "nobody can load it any more: they begin"


def test_who_joins_after_a_loss_is_said_to_replace() -> None:
    driver = running(2)
    driver.lost("w2")
    driver.switched(2, "w1")
    driver.reserved("w3")
    assert plan_in(driver.ready("w3")).reason == "in place of lost workers; test"
    driver.switched(3, "w1", "w3")
    driver.target(n1=3)
    driver.reserved("w4")
    assert plan_in(driver.ready("w4")).reason == "test"


def test_patience_is_bounded_and_for_starting_workers_only() -> None:
    driver = Driver()
    driver.target(n1=2)
    driver.reserved("w1", "w2")
    driver.ready("w1")
    assert not only(Announce, driver.tick(after_s=CONFIG.patience_s - 0.5))
    assert members_of(plan_in(driver.tick(after_s=1.0))) == ["w1"]
    unreserved = Driver()
    unreserved.target(n1=2)
    assert members_of(plan_in(unreserved.join("w1"))) == ["w1"]  # w2's resources may take for ever


def test_the_first_generation_is_retried_when_not_entered() -> None:
    """Nobody reports a first generation that breaks in the exchange: no rank has a state to lose yet."""
    driver = Driver()
    driver.target(n1=2)
    driver.reserved("w1", "w2")
    driver.ready("w1", "w2")
    out = driver.tick(after_s=CONFIG.switch_timeout_s + 0.1)
    assert [w.to for w in only(Withdraw, out)] == [("w1", "w2")]
    assert members_of(plan_in(driver.tick(after_s=CONFIG.notice_s))) == ["w1", "w2"]
    out = driver.tick(after_s=CONFIG.switch_timeout_s + 0.1)  # and whoever fails again is replaced
    assert {r.worker for r in only(Release, out)} == {"w1", "w2"}


def test_groups_have_allowed_sizes_joiners_beyond_one_wait() -> None:
    driver = Driver(dataclasses.replace(CONFIG, min_workers=2, sizes=AllowedSizes(sizes=(2, 4))))
    driver.target(n1=4)
    driver.reserved("w1", "w2", "w3", "w4")
    driver.ready("w1", "w2", "w3")
    assert members_of(plan_in(driver.tick(after_s=CONFIG.patience_s * 2))) == ["w1", "w2"]
    assert not only(Announce, driver.switched(1, "w1", "w2")), "three are not allowed, and w4 is on its way"
    assert members_of(plan_in(driver.ready("w4"))) == ["w1", "w2", "w3", "w4"]


def test_after_a_loss_any_number_goes_on() -> None:
    driver = running(4, config=dataclasses.replace(CONFIG, min_workers=2, sizes=AllowedSizes(sizes=(2, 4))))
    assert members_of(plan_in(driver.lost("w4"))) == ["w1", "w2", "w3"]


def test_who_joins_after_the_replacement_replaces_nobody() -> None:
    driver = running(2)
    driver.target(n1=3)
    driver.reserved("w3")
    driver.lost("w2")
    driver.switched(2, "w1")
    spec = plan_in(driver.join("w4") + driver.tick(after_s=CONFIG.patience_s))
    assert (members_of(spec), spec.reason) == (["w1", "w4"], "in place of lost workers; test")
    driver.switched(spec.generation, "w1", "w4")
    spec = plan_in(driver.ready("w3"))
    assert (members_of(spec), spec.reason) == (["w1", "w4", "w3"], "test")
