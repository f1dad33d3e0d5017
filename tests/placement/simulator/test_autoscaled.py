"""A simulated cluster whose size follows the jobs: what is rented, spot markets with notice, and the fallback."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from placement.autoscaling.autoscaler import AutoscalerConfig
from placement.autoscaling.objectives.cost_per_progress import CostPerProgress
from placement.cluster.price_table import PriceTable
from placement.simulator import InputError, SimulationReport, simulate
from placement.simulator.cli import main
from placement.simulator.nodes.clusters import parse_cluster
from placement.simulator.nodes.disturbances import Disturbances, SpotTrace
from placement.simulator.nodes.provider import AutoscaledCluster, Provider
from placement.simulator.workloads.traces import TraceJob
from tests.placement.simulator.worlds import profiles, trace

JOBS = tuple(
    TraceJob(name=f"j{i}", time_s=600.0 * i, application="toy", num_replicas=1, batch_size=32) for i in range(3)
)
FAST = AutoscaledCluster(
    objective=CostPerProgress(value_usd_per_h=20.0),
    startup_s=30.0,
    config=AutoscalerConfig(linger_s=30.0, launch_timeout_s=60.0, retry_s=600.0),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profiles(tmp_path_factory.mktemp("profiles"))


def play(folder: Path, jobs: Sequence[TraceJob] = JOBS, **more: Any) -> SimulationReport:
    return simulate(jobs, folder, "t4:4x4", rules="live", **{"autoscale": FAST, **more})


def market(*spans: tuple[float, float], places: int = 4) -> Disturbances:
    return Disturbances(spot={"": SpotTrace(source="made up", length_s=86400.0, places=(spans,) * places)})


def test_nodes_are_rented_as_long_as_they_are_needed(folder: Path) -> None:
    scaled, static = play(folder), play(folder, autoscale=None)
    assert len(scaled.jobs) == len(JOBS) and all(job.start_s >= job.arrival_s + 30.0 for job in scaled.jobs[:1])
    assert scaled.cost <= scaled.rented.usd < static.rented.usd
    assert static.rented.usd == pytest.approx(16 * 0.98 * static.makespan_s / 3600.0)
    assert scaled.rented.node_hours["t4-on-demand"] == pytest.approx(scaled.rented.usd / (4 * 0.98))
    assert scaled.log == play(folder).log  # the same again


def test_spot_is_used_where_available_and_left_in_time(folder: Path) -> None:
    gone_s = 170.0
    report = play(folder, JOBS[:1], disturbances=market((0.0, gone_s), (80000.0, 86400.0)))
    places = [(placed.time_s, set(placed.nodes)) for placed in report.placed]
    assert any("spot" in node for time_s, nodes in places if time_s < gone_s - 30.0 for node in nodes)
    assert not any("spot" in node for time_s, nodes in places if time_s >= gone_s - 30.0 for node in nodes)
    assert any("on-demand" in node for _, nodes in places for node in nodes), "no fallback"
    assert report.rented.node_hours["t4-spot"] > 0 < report.rented.node_hours["t4-on-demand"]


def test_jobs_that_avoid_spot_never_see_it(folder: Path) -> None:
    report = play(folder, disturbances=market((0.0, 86400.0)), spot_use="avoid")
    assert report.rented.node_hours["t4-spot"] == 0.0


def test_without_spot_everything_runs_on_demand_after_waiting(folder: Path) -> None:
    report = play(folder, disturbances=market((86000.0, 86400.0)))
    assert report.rented.node_hours["t4-spot"] == 0.0
    assert report.jobs[0].start_s == pytest.approx(30.0 + 60.0 + 30.0, abs=31.0)


def test_a_provider_gives_back_what_still_starts_first() -> None:
    types = FAST.types(parse_cluster("t4:4x4"), prices=PriceTable(), spot={})
    provider = Provider(types, {}, 0.0, seed=0)
    first = provider.want({"t4-on-demand": 1}, 0.0)
    assert [m.ready_s for m in first] == [30.0]
    assert len(provider.want({"t4-on-demand": 3}, 60.0)) == 2
    assert provider.want({"t4-on-demand": 0}, 70.0) == []  # only what still starts; the rest is released by name
    assert list(provider.machines) == [first[0].node.node_id]
    provider.close(3600.0)
    assert provider.rented_h["t4-on-demand"] == pytest.approx(1.0 + 2 * 10.0 / 3600.0)


def test_jobs_without_statistical_efficiency_choose_the_largest_batch(folder: Path) -> None:
    blind, aware = (play(folder, JOBS[:1], statistical=known) for known in (False, True))
    assert blind.jobs[0].jct_s != aware.jobs[0].jct_s


def test_what_does_not_go_together_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="rules must be 'live' for autoscale, but got 'pollux'"):
        simulate(JOBS, folder, "t4:4x4", rules="pollux", autoscale=FAST)
    with pytest.raises(InputError, match="failing or slow nodes"):
        play(folder, disturbances=Disturbances(node_mtbf_h=1.0))
    with pytest.raises(InputError, match="startup_s must be 0 seconds or more"):
        AutoscaledCluster(startup_s=-1.0)
    file = trace(tmp_path / "t.csv", [("a", 0.0, "toy", 1, 32)])
    words = ["--trace", str(file), "--profiles", str(folder), "--cluster", "t4:2x4", "--rules", "live", "--quiet"]
    assert main([*words, "--value", "3"]) == 2
    assert "value goes with --autoscale cost_per_progress" in capsys.readouterr().err
    out = tmp_path / "out.json"
    assert main([*words, "--autoscale", "cost_per_progress", "--value", "3", "--json", str(out)]) == 0
    assert json.loads(out.read_text())[0]["rented_usd"] > 0
    assert "rent USD" in capsys.readouterr().out
