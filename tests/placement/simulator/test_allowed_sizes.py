"""Simulated jobs that cannot train with every number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.cluster.sizes import AllowedSizes, MemoryNeed
from placement.simulator import simulate
from tests.placement.simulator.worlds import profiles, trace


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("policy", ["goodput", "pollux", "sia", "fair_share"])
def test_they_have_allowed_sizes_only_and_all_end(tmp_path: Path, policy: str) -> None:
    profiles(tmp_path / "profiles", ("toy", "other"), ("t4",), epochs=20)
    trace(tmp_path / "six.csv", [(f"j{i}", 40.0 * i, "toy" if i % 2 else "other", 1, 512) for i in range(6)])
    only = AllowedSizes(sizes=(2, 4, 8))
    report = simulate(tmp_path / "six.csv", tmp_path / "profiles", "t4:3x4", rules="live", policy=policy, sizes=only)
    assert len(report.jobs) == 6
    assert {sum(dict(each.nodes).values()) for each in report.placed} <= {0, 2, 4, 8}


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("policy", ["goodput", "pollux", "fair_share"])
def test_jobs_fitting_from_three_workers_never_have_fewer(tmp_path: Path, policy: str) -> None:
    profiles(tmp_path / "profiles", ("toy", "other"), ("t4",), epochs=20)
    trace(tmp_path / "six.csv", [(f"j{i}", 40.0 * i, "toy" if i % 2 else "other", 1, 512) for i in range(6)])
    only = AllowedSizes(memory=MemoryNeed(available_bytes=40, sharded_bytes=60))
    report = simulate(tmp_path / "six.csv", tmp_path / "profiles", "t4:3x4", rules="live", policy=policy, sizes=only)
    assert len(report.jobs) == 6
    assert not {sum(dict(each.nodes).values()) for each in report.placed} & {1, 2}
