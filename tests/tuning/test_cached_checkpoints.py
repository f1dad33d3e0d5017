"""What stays in the cluster's memory of the checkpoints of a sweep's runs."""

from __future__ import annotations

from tuning.trials import CheckpointCache


def test_last_two_of_a_run_are_held_a_while() -> None:
    held = CheckpointCache()
    for number in range(4):
        held.hold("a", f"a/{number}", number)
    held.hold("b", "b/0", "other")
    assert [held.find(f"a/{number}") for number in range(4)] == [None, None, 2, 3]
    assert held.find(None) is None
    held.over("a", 30.0)
    held.expire(29.0)
    assert held.find("a/3") == 3
    held.expire(31.0)
    assert held.find("a/3") is None
    held.over("c", 31.0)  # it has reported none
    held.expire(99.0)
    assert held.find("b/0") == "other"
