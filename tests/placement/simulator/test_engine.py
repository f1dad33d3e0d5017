"""Whole simulations of made-up jobs, by hand where that can be done, and what must hold under every policy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.policies import POLICIES, FixedPolicy, Target, ThroughputEfficiencyPolicy, UtilityCostPolicy
from placement.simulator import InputError, SimulationReport, simulate
from placement.simulator.cli import main
from placement.simulator.nodes.disturbances import Disturbances
from placement.simulator.world.rules import Location, PolluxRules, SiaRules
from tests.placement.simulator.worlds import profiles, step_s, trace

JOBS = [(f"j{i}", 40.0 * i, "toy" if i % 2 else "other", 1 + i % 3, 128) for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sim")
    profiles(path / "profiles", ("toy", "other"), ("t4", "a100"))
    trace(path / "one.csv", [("a", 10.0, "toy", 1, 32)])
    trace(path / "six.csv", JOBS)
    return path


def play(folder: Path, name: str = "six", cluster: str = "t4:2x4", **options: object) -> SimulationReport:
    return simulate(folder / f"{name}.csv", folder / "profiles", cluster, **options)


def test_one_job_by_hand(folder: Path) -> None:
    report = play(folder, "one", rules="pollux", policy="tiresias")
    (job,) = report.jobs
    # It waits for the round at 60 s and restarts for 30 s. Batch 32 on one GPU: 4000 steps at gain 1 of 52 ms, each
    # epoch rounded to whole seconds.
    epoch_s = round(1000 * step_s(1, 1, 32)[0])
    assert job.start_s == 60.0
    assert job.finish_s == 60.0 + 30.0 + 4 * epoch_s
    assert job.jct_s == job.finish_s - 10.0
    assert job.gpu_hours == {"t4": pytest.approx((30.0 + 4 * epoch_s) / 3600)}
    assert (job.resizes, job.paused_s) == (0, 30.0)


def test_sia_divides_progress_and_pauses_longer(folder: Path) -> None:
    (job,) = play(folder, "one", rules="sia", policy="tiresias").jobs
    assert job.paused_s == 60.0  # of an application that its table does not name
    assert job.finish_s == 60.0 + 60.0 + 4 * round(1.2 * 1000 * step_s(1, 1, 32)[0])


def test_live_rules_start_at_once(folder: Path) -> None:
    (job,) = play(folder, "one", rules="live", policy=FixedPolicy(workers=1), requested=True).jobs
    assert job.start_s == 10.0
    assert job.finish_s == pytest.approx(10.0 + 15.0 + 1.2 * 4000 * step_s(1, 1, 32)[0])


@pytest.mark.parametrize("rules", ["pollux", "sia", "live"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_brings_every_job_to_its_end(folder: Path, policy: str, rules: str) -> None:
    report = play(folder, rules=rules, policy=policy)
    assert [job.job for job in report.jobs] == [name for name, *_ in JOBS]
    assert all(job.finish_s > job.start_s >= job.arrival_s for job in report.jobs)
    assert not [record for record in report.log if record.trigger == "refused"]
    check_capacity(report, {"t4-000": 4, "t4-001": 4})
    assert report.gpu_hours * 3600 <= report.gpus * report.makespan_s


@pytest.mark.parametrize("policy", ["goodput", "pollux", "sia", "tiresias"])
def test_several_gpu_types(folder: Path, policy: str) -> None:
    report = play(folder, cluster="t4:1x4,a100:1x2", rules="sia", policy=policy)
    check_capacity(report, {"t4-000": 4, "a100-000": 2})
    assert {gpu for job in report.jobs for gpu in job.gpu_hours} <= {"t4", "a100"}


def check_capacity(report: SimulationReport, slots: Mapping[str, int]) -> None:
    """No GPU is ever granted twice, once all changes of one moment are made."""
    held: dict[str, Mapping[str, int]] = {}
    for i, placed in enumerate(report.placed):
        held[placed.job] = placed.nodes
        last = i + 1 == len(report.placed) or report.placed[i + 1].time_s > placed.time_s
        for node, size in slots.items() if last else ():
            assert sum(nodes.get(node, 0) for nodes in held.values()) <= size


@pytest.mark.parametrize("rules", ["pollux", "live"])
def test_the_same_seed_gives_the_same_log(folder: Path, rules: str) -> None:
    wrong = Disturbances(noise=0.1) if rules == "pollux" else Disturbances(noise=0.1, node_mtbf_h=0.5, slow_every_h=0.5)
    first, again, other = (
        play(folder, rules=rules, policy="pollux", seed=seed, disturbances=wrong) for seed in (3, 3, 4)
    )
    assert "\n".join(first.log_lines()).encode() == "\n".join(again.log_lines()).encode()
    assert dataclasses.replace(first, decision_s=()) == dataclasses.replace(again, decision_s=())
    assert first.jobs != other.jobs


def test_failures_and_slow_nodes_cost_time(folder: Path) -> None:
    quiet = play(folder, rules="live", policy="goodput")
    wrong = Disturbances(node_mtbf_h=0.05, repair_s=60.0, slow_every_h=0.1, slow_for_s=300.0)
    loud = play(folder, rules="live", policy="goodput", disturbances=wrong)
    assert loud.makespan_s > quiet.makespan_s
    assert any(record.trigger == "nodes" for record in loud.log)


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("kind", [ThroughputEfficiencyPolicy, UtilityCostPolicy])
def test_jobs_leave_a_slow_node_and_are_done_sooner(folder: Path, kind: type) -> None:
    wrong = Disturbances(slow_every_h=0.1, slow_for_s=600.0, slow_factor=5.0)
    alert, blind = (
        play(folder, cluster="t4:4x4", rules="live", policy=kind(slow_factor=factor), seed=1, disturbances=wrong)
        for factor in (1.5, 100.0)
    )
    assert any("slow nodes are left" in record.reason.words for record in alert.log)
    assert alert.avg_jct_s < 0.9 * blind.avg_jct_s


def test_disturbances_need_live_rules(folder: Path) -> None:
    with pytest.raises(InputError, match="rules must be 'live'"):
        play(folder, rules="sia", policy="fixed", disturbances=Disturbances(node_mtbf_h=1.0))


class Greedy:
    """A user's policy that promises more than there is."""

    name = "greedy"

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        workers = 8 if now_s < 300 or len(jobs) == 1 else 1
        return {view.job: Target(workers=workers, reason="greedy: more") for view in jobs}


def test_policy_that_promises_too_much_is_refused_and_named(folder: Path) -> None:
    report = play(folder, rules="pollux", policy=Greedy())
    refused = [record for record in report.log if record.trigger == "refused"]
    assert refused
    assert "policy 'greedy' broke rule 'capacity'" in refused[0].reason.words
    check_capacity(report, {"t4-000": 4, "t4-001": 4})


def test_whose_change_costs_what() -> None:
    here, moved = Location(nodes={"a": 2, "b": 1}, gpu="t4"), Location(nodes={"c": 1, "a": 2}, gpu="t4")
    assert PolluxRules().change("bert", here, here, moved).pause_s == 30.0
    assert PolluxRules().change("bert", here, here, here).pause_s == 0.0
    assert SiaRules().change("bert", here, here, moved).pause_s == 0.0
    assert SiaRules().change("bert", here, here, Location(nodes={"a": 3}, gpu="t4")).pause_s == 120.0
    assert SiaRules(factor=0.1).change("bert", None, None, moved).pause_s == pytest.approx(12.0)


def test_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    files = [str(folder / "one.csv"), str(folder / "six.csv")]
    common = ["--profiles", str(folder / "profiles"), "--cluster", "t4:2x4", "--processes", "1", "--quiet"]
    status = main(["--trace", *files, *common, "--rules", "pollux", "--policy", "fifo,pollux", "--json", str(out)])
    assert status == 0
    records = json.loads(out.read_text())
    assert [(Path(r["trace"]).stem, r["policy"]) for r in records] == [
        ("one", "fifo"),
        ("one", "pollux"),
        ("six", "fifo"),
        ("six", "pollux"),
    ]
    assert {"avg_jct_s", "p99_jct_s", "makespan_s", "decision_ms_max", "rho_above_2", "cost_usd"} <= records[0].keys()
    assert "mean of 2" in capsys.readouterr().out


def test_bad_options_leave_nothing_behind(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    common = ["--trace", str(folder / "one.csv"), "--profiles", str(folder / "profiles"), "--json", str(out)]
    assert main([*common, "--cluster", "t4:2", "--policy", "fifo"]) == 2
    assert "cluster must look like" in capsys.readouterr().err
    assert main([*common, "--cluster", "t4:2x4", "--policy", "polux"]) == 2
    assert "policy must be one of" in capsys.readouterr().err
    assert not out.exists()
