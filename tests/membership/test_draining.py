"""Members on a node that goes train on until others are ready in their place, or until its time is nearly up."""

from __future__ import annotations

from elastic_ray.job.preemption import leave_times
from elastic_ray.membership.instructions import Announce
from elastic_ray.membership.signals import Allocated
from tests.membership.driver import CONFIG, Driver, members_of, only, plan_in, running

LEFT_S = 100.0  # until members must leave


def two_nodes() -> Driver:
    """A job that trains with w1 on n1 and w2 on n2."""
    driver = Driver(CONFIG)
    driver.target(n1=1, n2=1)
    driver.join("w1", "w2")
    driver.switched(1, "w1", "w2")
    assert driver.names == ["w1", "w2"]
    return driver


def drain(driver: Driver, left_s: float = LEFT_S, *, more: bool = False, **nodes: int) -> list[str] | None:
    """Node n1 goes: the job is to have these instead; the next group, if it is announced at once."""
    leave_s = {"n1": driver.now_s + left_s}
    out = driver.notify(Allocated(nodes=nodes, reason="n1 goes", draining=leave_s, nodes_may_come=more))
    return members_of(plan_in(out)) if only(Announce, out) else None


def test_replacements_start_first_and_one_change_swaps() -> None:
    driver = two_nodes()
    assert drain(driver, n2=1, n3=1) is None
    assert not only(Announce, driver.reserved("w3"))
    assert not only(Announce, driver.tick(after_s=LEFT_S - 1.0)), "w3 is on its way"
    assert members_of(plan_in(driver.ready("w3"))) == ["w2", "w3"]
    driver.switched(2, "w2", "w3")
    driver.left("w1")
    assert driver.asked == {"w2", "w3"}


def test_whole_group_waits_for_all_replacements() -> None:
    driver = running(2)
    assert drain(driver, n2=2) is None
    driver.reserved("w3", "w4")
    assert not only(Announce, driver.ready("w3"))
    assert not only(Announce, driver.tick(after_s=2 * CONFIG.patience_s))
    assert members_of(plan_in(driver.ready("w4"))) == ["w1", "w3", "w4"], "w1 brings the state along"
    assert members_of(plan_in(driver.switched(2, "w1", "w3", "w4"))) == ["w3", "w4"]


def test_members_leave_in_time_without_replacements() -> None:
    driver = two_nodes()
    assert drain(driver, n2=1, n3=1) is None
    driver.reserved("w3")
    assert not only(Announce, driver.tick(after_s=LEFT_S - 0.1))
    assert members_of(plan_in(driver.tick(after_s=0.1))) == ["w2"]


def test_deadline_near_or_unknown_makes_members_leave() -> None:
    for left_s in (0.0, -10.0):
        assert drain(two_nodes(), left_s, n2=1, n3=1) == ["w2"]


def test_nobody_stays_if_no_replacement_can_come() -> None:
    assert drain(two_nodes(), n2=1) == ["w2"]


def test_members_train_on_while_nodes_may_come() -> None:
    driver = two_nodes()
    assert drain(driver, n2=1, more=True) is None
    assert not only(Announce, driver.tick(after_s=60.0))
    assert drain(driver, LEFT_S - 60.0, n2=1, n3=1, more=True) is None, "the node has come"
    assert members_of(plan_in(driver.join("w3"))) == ["w2", "w3"]

    driver = two_nodes()
    assert drain(driver, n2=1, more=True) is None
    assert members_of(plan_in(driver.tick(after_s=LEFT_S))) == ["w2"], "no node has come"


def test_joiner_takes_a_place_while_nodes_may_come() -> None:
    driver = Driver(CONFIG)
    driver.target(n1=2, n2=1)
    driver.join("w1", "w2", "w3")
    driver.switched(1, "w1", "w2", "w3")
    assert drain(driver, n2=1, n3=1, more=True) is None
    assert members_of(plan_in(driver.join("w4"))) == ["w1", "w3", "w4"]
    driver.switched(2, "w1", "w3", "w4")
    assert not only(Announce, driver.tick(after_s=60.0)), "a node may come for w1 as well"
    assert members_of(plan_in(driver.tick(after_s=40.0))) == ["w3", "w4"]


def test_moved_group_does_not_wait_for_more_nodes() -> None:
    driver = running(2)
    assert drain(driver, n2=2, more=True) is None
    driver.join("w3", "w4")
    assert members_of(plan_in(driver.switched(2, "w1", "w3", "w4"))) == ["w3", "w4"]


def test_others_slots_are_not_held_for_long() -> None:
    driver = two_nodes()
    assert drain(driver, n3=2) is None, "n2 is for another job"
    driver.reserved("w3", "w4")
    driver.ready("w3")
    assert members_of(plan_in(driver.tick(after_s=CONFIG.patience_s))) == ["w1", "w3"]


def test_node_that_goes_early_is_an_ordinary_loss() -> None:
    driver = two_nodes()
    assert drain(driver, n2=1, n3=1) is None
    driver.reserved("w3")
    assert members_of(plan_in(driver.lost("w1"))) == ["w2"]
    driver.switched(2, "w2")
    assert members_of(plan_in(driver.ready("w3"))) == ["w2", "w3"]


def test_times_to_leave_keep_a_margin() -> None:
    left_s = {"n1": 120.0, "n2": 0.0}
    assert leave_times(left_s, 1000.0, change_s=0.0, step_s=0.1) == {"n1": 1110.0, "n2": 990.0}
    assert leave_times(left_s, 1000.0, change_s=15.0, step_s=0.1)["n1"] == 1090.0
    assert leave_times(left_s, 1000.0, change_s=0.0, step_s=20.0)["n1"] == 1040.0


def test_longest_planned_change_is_measured() -> None:
    driver = running(1)
    assert driver.machine.change_s == 0.0, "the start is no change"
    driver.target(n1=2)
    driver.join("w2")
    driver.tick(after_s=3.0)
    driver.switched(2, "w1")
    driver.tick(after_s=1.0)
    driver.switched(2, "w2")
    assert driver.machine.change_s == 4.0
