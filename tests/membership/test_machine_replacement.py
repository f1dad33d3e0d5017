"""Members that are replaced: another boots while they train, then one planned change, and never a smaller group."""

from __future__ import annotations

from elastic_ray.membership.instructions import Announce, Release, Reserve
from elastic_ray.membership.signals import Lost
from tests.membership.driver import CONFIG, members_of, only, plan_in, running


def test_a_member_leaves_in_one_change_with_its_replacement() -> None:
    driver = running(3)
    assert [(r.worker, r.node) for r in only(Reserve, driver.replace("w1"))] == [("w4", "n1")]
    assert not only(Reserve, driver.replace("w1")), "what is said again is no news"
    driver.reserved("w4")
    assert not only(Announce, driver.tick(after_s=60.0)), "it trains for as long as the other boots"
    spec = plan_in(driver.ready("w4"))
    assert members_of(spec) == ["w2", "w3", "w4"] and spec.reason == "slow"
    driver.switched(2, "w2", "w3", "w4")
    driver.left("w1")
    assert driver.asked == {"w2", "w3", "w4"}
    assert not driver.tick(after_s=1.0)


def test_one_that_keeps_up_again_stays() -> None:
    driver = running(2)
    driver.replace("w2")
    out = driver.replace()
    assert [r.worker for r in only(Release, out)] == ["w3"] and driver.names == ["w1", "w2"]


def test_without_a_replacement_it_stays_and_rests_a_while() -> None:
    driver = running(2)
    driver.replace("w2")
    driver.tick(after_s=CONFIG.reserve_timeout_s + 1.0)
    assert driver.asked == {"w1", "w2"}
    assert not only(Reserve, driver.replace("w2", after_s=CONFIG.backoff_s + 1.0))
    assert only(Reserve, driver.replace("w2", after_s=CONFIG.replace_again_s))


def test_the_replacement_comes_to_where_the_allocator_wants_it() -> None:
    driver = running(2)
    driver.replace("w2")
    out = driver.target(n1=1, n2=1)
    assert [r.worker for r in only(Release, out)] == ["w3"] and [r.node for r in only(Reserve, out)] == ["n2"]
    driver.reserved("w4")
    assert not only(Announce, driver.tick(after_s=60.0))
    assert members_of(plan_in(driver.ready("w4"))) == ["w1", "w4"]


def test_a_newcomer_that_is_lost_is_asked_for_again() -> None:
    driver = running(2)
    driver.replace("w2")
    driver.reserved("w3")
    driver.notify(Lost(worker="w3", cause="killed"))
    assert [r.worker for r in only(Reserve, driver.tick(after_s=CONFIG.backoff_s + 1.0))] == ["w4"]
    assert driver.names == ["w1", "w2"]


def test_one_that_dies_meanwhile_is_replaced_all_the_same() -> None:
    driver = running(2)
    driver.replace("w2")
    driver.reserved("w3")
    driver.notify(Lost(worker="w2", cause="killed"))
    driver.switched(2, "w1")
    assert members_of(plan_in(driver.ready("w3"))) == ["w1", "w3"]
    assert driver.asked == {"w1", "w3"}


def test_one_to_be_replaced_goes_first_when_shrinking() -> None:
    driver = running(2)
    driver.replace("w1")
    out = driver.target(n1=1)
    assert [r.worker for r in only(Release, out)] == ["w3"], "no other is wanted any more"
    assert members_of(plan_in(out)) == ["w2"]
    driver.switched(2, "w2")
    driver.left("w1")
    assert driver.asked == {"w2"}
