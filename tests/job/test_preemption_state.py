"""A preemption under way; no Ray."""

from __future__ import annotations

import math

from elastic_ray.job.preemption import Preemption, save_time
from elastic_ray.membership.signals import Allocated

AWAY = Allocated(nodes={}, reason="others have more use for them")
BACK = Allocated(nodes={"n": 2}, reason="room again")


def test_last_that_was_said_and_the_first_reason_count() -> None:
    preemption = Preemption(timeout_s=60.0)
    assert not preemption.active and preemption.end() is None
    preemption.start(AWAY, 10.0)
    preemption.adapt(BACK)
    assert preemption.active and preemption.reason == AWAY.reason
    assert preemption.lasted_s(12.5) == 2.5 and preemption.end() == BACK
    assert not preemption.active


def test_workers_are_told_at_once_and_again_every_second() -> None:
    preemption = Preemption(timeout_s=60.0)
    assert not preemption.remind(5.0)
    preemption.start(AWAY, 10.0)
    assert [preemption.remind(10.0 + 0.25 * tick) for tick in range(9)] == [tick % 4 == 0 for tick in range(9)]


def test_it_fails_without_a_worker_to_save_or_time() -> None:
    preemption = Preemption(timeout_s=60.0)
    assert preemption.failed(1e9, ()) == "", "there is none"
    preemption.start(AWAY, 10.0)
    assert preemption.failed(70.0, {"w1"}) == ""
    assert "lost" in preemption.failed(11.0, ())
    assert "within join_timeout_s=60" in preemption.failed(70.1, {"w1"})


def test_job_on_nodes_that_go_is_saved_in_time() -> None:
    goes = Allocated(nodes={}, reason="n drains", draining={"n": 100.0, "m": 50.0}, nodes_may_come=True)
    assert save_time(goes, ["n"], write_s=3.0) == 94.0
    assert save_time(goes, ["m", "n"], write_s=3.0) == 44.0
    for places, write_s in (((), 3.0), (["n"], None), (["n", "other"], 3.0)):
        assert save_time(goes, places, write_s=write_s) == -math.inf
    assert save_time(AWAY, ["n"], write_s=3.0) == -math.inf
    never = Allocated(nodes={}, reason="n drains", draining=goes.draining)
    assert save_time(never, ["n"], write_s=3.0) == -math.inf
