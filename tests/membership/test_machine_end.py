"""The end of a job: all members finish, or some do and the rest fail."""

from __future__ import annotations

from elastic_ray.membership.instructions import Complete, Release, Reserve
from elastic_ray.membership.messages import Returned
from elastic_ray.membership.signals import Finished, TimePassed
from tests.membership.driver import Driver, members_of, only, plan_in, running


def test_the_job_is_complete_when_all_members_have_finished() -> None:
    driver = running(2)
    driver.target(n1=3)
    driver.join("w3")  # announced, but training ends first
    assert not driver.finished("w1")
    assert driver.finished("w2") == [Complete()]
    assert not driver.tick(after_s=100.0)


def test_nothing_new_is_begun_while_the_job_ends() -> None:
    driver = running(2)
    driver.finished("w1")
    assert not driver.target(n1=1, n2=3)


def test_some_finish_and_the_rest_fail_its_last_vote() -> None:
    driver = running(3)
    driver.finished("w1")
    assert members_of(plan_in(driver.lost("w3"))) == ["w2"]
    driver.switched(2, "w2")
    assert driver.finished("w2") == [Complete()]


def test_who_goes_on_is_told_where_others_ended() -> None:
    driver = running(3)
    driver.notify(Finished(worker="w2", rank=1, steps=24))
    spec = plan_in(driver.lost("w3"))
    assert members_of(spec) == ["w1"] and spec.returned == (Returned(rank=1, steps=24),)


def test_some_finish_and_the_rest_die() -> None:
    driver = running(3)
    driver.finished("w1")
    driver.lost("w2")
    assert only(Complete, driver.lost("w3"))


def test_an_early_first_finisher_does_not_end_the_job() -> None:
    """Ray may deliver w1's whole life before w2's first word."""
    driver = Driver()
    driver.target(n1=2)
    driver.reserved("w1", "w2")
    driver.ready("w1", "w2")
    driver.switched(1, "w1")
    assert not driver.finished("w1")
    driver.switched(1, "w2")
    assert driver.finished("w2") == [Complete()]


def test_a_finisher_that_dies_is_neither_replaced_nor_forgotten() -> None:
    driver = running(3)
    driver.notify(Finished(worker="w2", rank=1, steps=24))
    assert [type(each) for each in driver.lost("w2")] == [Release], "w1 and w3 train on"
    assert plan_in(driver.lost("w3")).returned == (Returned(rank=1, steps=24),)
    assert only(Complete, driver.lost("w1"))


def test_a_job_that_restarts_is_not_ending() -> None:
    driver = running(2)
    driver.finished("w1")
    driver.machine.reset()
    assert [type(each) for each in driver.machine.handle(TimePassed(), 50.0)] == [Reserve, Reserve]
