"""Ranks find out from sums in float32 alone whether their policies say the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.adaptation.runner import PolicyBallot, Verdict, flag_and_digest, verdict

SAID = st.none() | st.lists(st.integers(0, 3), max_size=2)


def summed(rows: Sequence[Sequence[float]]) -> list[float]:
    """As a reduction in float32 adds them up."""
    total = np.zeros(len(rows[0]), dtype=np.float32)
    for row in rows:
        total += np.array(row, dtype=np.float32)
    return [float(value) for value in total]


@given(st.lists(SAID, min_size=1, max_size=6))
def test_all_say_the_same_exactly_when_the_sums_do(said: list[Any]) -> None:
    found = verdict(summed([flag_and_digest(each) for each in said]), len(said))
    if all(each is None for each in said):
        assert found is Verdict.NOTHING
    elif all(each == said[0] for each in said):
        assert found is Verdict.AGREED
    else:
        assert found is Verdict.DIFFERENT


@pytest.mark.parametrize("world_size", [1, 2, 64, 4096])
def test_large_groups_are_exact_in_float32(world_size: int) -> None:
    row = np.array(flag_and_digest(["request"]), dtype=np.float32)
    same = row * np.float32(world_size)
    assert verdict([float(value) for value in same], world_size) is Verdict.AGREED
    other = same - row + np.array(flag_and_digest(["another"]), dtype=np.float32)
    expected = Verdict.DIFFERENT if world_size > 1 else Verdict.AGREED
    assert verdict([float(value) for value in other], world_size) is expected


def test_each_policy_has_its_own_verdict_once_per_group() -> None:
    said: list[Any] = [["a"], None, ["b"]]
    ballot = PolicyBallot(lambda: said)
    assert ballot.size(2) == 0 and list(ballot.values(0, 2)) == []
    ballot.have(3)
    own = ballot.values(0, 2)
    assert len(own) == ballot.size(2)
    others = [value for each in (["a"], None, ["c"]) for value in flag_and_digest(each)]
    sums = summed([own, others])
    ballot.conclude(sums, 2)
    assert ballot.take() == (Verdict.AGREED, Verdict.NOTHING, Verdict.DIFFERENT)
    assert ballot.take() == ()
    ballot.conclude(sums, 2)
    ballot.start()
    assert ballot.take() == ()
