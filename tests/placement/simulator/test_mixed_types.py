"""Simulated jobs on GPUs of two types: what they take, give back, and win by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.simulator import SimulationReport, simulate
from placement.simulator.world.rules import LiveRules
from tests.placement.simulator.worlds import profiles, trace

CLUSTER = "t4:1x4,a100:1x4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed")
    profiles(path / "profiles", ("toy", "other"), ("t4", "a100"), epochs=40, link=0.1)
    trace(path / "one.csv", [("a", 10.0, "toy", 1, 512)])
    trace(path / "two.csv", [("a", 10.0, "toy", 1, 512), ("b", 200.0, "other", 1, 512)])
    rows = [(f"j{i}", 150.0 * i, "toy" if i % 2 else "other", 1, 512) for i in range(8)]
    trace(path / "eight.csv", rows)
    return path


def play(folder: Path, name: str, *, mixed: bool) -> SimulationReport:
    return simulate(
        folder / f"{name}.csv",
        folder / "profiles",
        CLUSTER,
        rules=LiveRules(),
        policy="goodput",
        mixed_gpu_types=mixed,
    )


def types(nodes: dict[str, int]) -> set[str]:
    return {node.split("-")[0] for node in nodes}


def test_a_job_takes_both_types_of_an_idle_cluster(folder: Path) -> None:
    (plain,), (mixed,) = (play(folder, "one", mixed=flag).jobs for flag in (False, True))
    assert len(plain.gpu_hours) == 1
    assert set(mixed.gpu_hours) == {"t4", "a100"}
    assert mixed.jct_s < 0.95 * plain.jct_s


def test_it_gives_other_type_back_when_another_job_comes(folder: Path) -> None:
    placed = play(folder, "two", mixed=True).placed
    starts_s = next(each.time_s for each in placed if each.job == "b")
    before = [types(dict(each.nodes)) for each in placed if each.job == "a" and each.time_s < starts_s]
    after = [types(dict(each.nodes)) for each in placed if each.job == "a" and each.nodes and each.time_s >= starts_s]
    assert before[-1] == {"t4", "a100"}
    assert after[-1] == {"a100"}, "b has grown into the other type"
    assert [types(dict(each.nodes)) for each in placed if each.job == "b" and each.nodes][-1] == {"t4", "a100"}


@pytest.mark.thorough
def test_a_small_trace_is_done_no_later_than_without(folder: Path) -> None:
    plain, mixed = (play(folder, "eight", mixed=flag) for flag in (False, True))
    assert mixed.avg_jct_s < plain.avg_jct_s
    assert not [record for record in mixed.log if record.trigger == "refused"]
