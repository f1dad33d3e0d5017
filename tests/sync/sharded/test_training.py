"""Training with tables whose rows live with owners gives what torch gives, in groups that do not change."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.loop.ranks import Ranks
from tests.sync.sharded.tables import Case, assert_same, by_torch, elastic

CASES = [
    Case(), Case("adagrad"), Case(copies=1), Case("adagrad", "mean", copies=1), Case(mode="sum", padding=3),
    Case(padding=-87),
]  # fmt: skip


def many(*calls: tuple[Any, ...]) -> list[dict[str, Tensor]]:
    """Several trainings in one group, one after the other."""
    return [elastic(*call) for call in calls]


@pytest.mark.parametrize("world", [None, 2, 3])
def test_unequal_shares_and_accumulation(ranks: Ranks, world: int | None) -> None:
    micro, accumulated = {None: (3, 9), 2: (2, 8), 3: (2, 12)}[world]
    calls = [(case, None, 7) for case in CASES] + [(case, micro, accumulated) for case in CASES[:4]]
    results = ranks.run(many, *calls, world=world)
    for (case, _, batch), found in zip(calls, results[0] if world else results, strict=True):
        assert_same(found, by_torch(case, world or 1, batch))
