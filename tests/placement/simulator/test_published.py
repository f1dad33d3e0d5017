"""The published figures, reproduced; traces and profiles are data beside the repository."""

from __future__ import annotations

import json

import pytest

from placement.simulator import simulate
from tests.placement.simulator.worlds import data


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["tiresias", "optimus"])
@pytest.mark.parametrize(
    "number", [6, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))], ids=lambda n: f"workload-{n}"
)
def test_rigid_schedulers_meet_their_published_averages_to_the_second(policy: str, number: int) -> None:
    folder = data()
    trace = folder / "workloads" / "pollux" / f"workload-{number}.csv"
    report = simulate(trace, folder / "profiles", "aws:16x4", rules="pollux", policy=policy)
    published = json.loads((folder / "published" / f"{policy}-1.0.json").read_text())["avgs"]
    assert report.avg_jct_s == pytest.approx(published[f"workload-{number}"], abs=1.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("load", "number"),
    [*(("1.0", n) for n in (1, 2, 3, 6)), *((load, n) for load in ("0.5", "1.5", "2.0") for n in (1, 6))],
)
def test_pollux_is_within_five_per_cent_of_published_averages(load: str, number: int) -> None:
    folder = data()
    published = json.loads((folder / "published" / f"pollux-{load}.json").read_text())["avgs"]
    trace = folder / "workloads" / ("pollux" if load == "1.0" else f"pollux-{load}") / f"workload-{number}.csv"
    report = simulate(trace, folder / "profiles", "aws:16x4", rules="pollux", policy="pollux")
    assert report.avg_jct_s < 1.05 * published[f"workload-{number}"]
