"""Options: prices, what jobs declare, what is random; each wrong value is one line and exit status 2."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.cluster.price_table import PriceTable, read_prices
from placement.policies import GoodputPolicy, Target, registry
from placement.simulator import InputError, SimulationReport, simulate
from placement.simulator.cli import main
from placement.simulator.engine import Task
from placement.simulator.workloads.profiles import load_profiles
from placement.simulator.workloads.traces import Lengths, TraceJob
from tests.placement.simulator.worlds import profiles, trace

JOBS = [(f"j{i}", 40.0 * i, "toy" if i % 2 else "other", 1 + i % 3, 128) for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("options")
    profiles(path / "profiles", ("toy", "other"), ("t4",))
    trace(path / "six.csv", JOBS)
    (path / "spot.json").write_text('{"metadata": {"gap_seconds": 60}, "data": [2, 1, 2, 2]}')
    return path


def play(folder: Path, **options: object) -> SimulationReport:
    return simulate(folder / "six.csv", folder / "profiles", "t4:2x4", rules="live", **options)


# Lengths
# ----------------------------------------------------------------------------------------------------------------------


def test_a_stretched_training_goes_through_the_same_phases(folder: Path) -> None:
    app = load_profiles(folder / "profiles", ("t4",))["toy"]
    assert app.stretched(4) is app
    long = app.stretched(8)
    assert (long.epochs, app.epochs) == (8, 4)
    assert [long.progress_at(e) for e in (0, 1, 8)] == [0.0, 1000.0, 8000.0]
    assert [long.noise(128, e).sqr for e in range(8)] == [app.noise(128, e // 2).sqr for e in range(8)]
    assert long.iterations_at(128, 7) == 2 * app.iterations_at(128, 3)
    assert app.stretched(1).progress_at(1) == 1000.0


def test_random_lengths_differ_by_job_and_seed_declared_truly(folder: Path) -> None:
    first, again, other = (play(folder, lengths=Lengths(spread=0.8), seed=seed) for seed in (1, 1, 2))
    assert [job.finish_s for job in first.jobs] == [job.finish_s for job in again.jobs]
    assert [job.finish_s for job in first.jobs] != [job.finish_s for job in other.jobs]
    app = load_profiles(folder / "profiles", ("t4",))["toy"]
    lengths = Lengths(spread=0.8)
    epochs = [lengths.application(app, f"j{i}", 1).epochs for i in range(20)]
    assert len(set(epochs)) > 3
    assert lengths.declaration(epochs[0], "j0", 1) == epochs[0]


def test_what_is_declared_may_be_wrong_or_nothing() -> None:
    said = [Lengths(error=0.5).declaration(100, f"j{i}", 0) for i in range(200)]
    assert said[0] == Lengths(error=0.5).declaration(100, "j0", 0)
    assert sum(each < 100 for each in said if each) == pytest.approx(100, abs=30)
    assert Lengths(declared=False).declaration(100, "j0", 0) is None


def test_what_jobs_declare_changes_view_and_not_the_policy(folder: Path) -> None:
    epochs, none = play(folder), play(folder, lengths=Lengths(declared=False))
    assert epochs.log_lines() != none.log_lines()
    assert none.log_lines() == play(folder, policy=GoodputPolicy(lengths=False)).log_lines()
    assert play(folder, lengths=Lengths(error=1.0)).log_lines() != epochs.log_lines()
    fixed = [play(folder, policy="fixed", lengths=Lengths(declared=said)).log_lines() for said in (True, False)]
    assert fixed[0] == fixed[1]


# Prices
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.csv", "type,on_demand,spot\nt4,2.0,0.5\n"),
        ("p.json", '[{"type": "t4", "on_demand": 2.0, "spot": 0.5}]'),
    ],
)
def test_prices_are_read_and_paid(folder: Path, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    table = read_prices(tmp_path / name)
    assert table.rates(["t4"]) == {"t4": 2.0}
    assert table.rates(["t4"], spot=["t4"]) == {"t4": 0.5}
    report = play(folder, prices=table)
    assert report.cost == pytest.approx(2.0 * report.gpu_hours)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.csv", "", "must hold rows with type, on_demand, spot"),
        ("p.csv", "type,on_demand\nt4,1\n", "row 1 must have .* but spot is missing"),
        ("p.csv", "type,on_demand,spot\nt4,cheap,1\n", "row 1: could not convert"),
        ("p.csv", "type,on_demand,spot\nt4,-1,1\n", "on_demand must be 0 USD per hour or more and finite, but got -1"),
        ("p.csv", "type,on_demand,spot\nt4,1,1\nt4,2,1\n", "row 2: .* 't4' occurs more than once"),
        ("p.json", "{", "cannot be read"),
        ("p.json", '{"t4": 1}', "must hold rows"),
    ],
)
def test_bad_prices_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read_prices(tmp_path / name)


def test_type_without_price_is_error_that_names_the_table(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the default table lacks h100; it has a100"):
        PriceTable().rates(["t4", "h100"])
    (tmp_path / "p.csv").write_text("type,on_demand,spot\nt4,1,1\n")
    with pytest.raises(InputError, match=r"p\.csv lacks a100"):
        read_prices(tmp_path / "p.csv").rates(["a100"])


# The command line
# ----------------------------------------------------------------------------------------------------------------------


def common(folder: Path) -> list[str]:
    return ["--trace", str(folder / "six.csv"), "--profiles", str(folder / "profiles"), "--processes", "1", "--quiet"]


def test_every_option_reaches_the_record(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    asked = "--rules live --policy utility_cost --mtbf 2 --repair 30 --slow-every 1 --slow-for 60 --slow-factor 3"
    more = "--interference 0.1 --noise 0.05 --declare none --length-error 0.2 --random-lengths 0.3 --shared-knowledge"
    spot = ["--spot", f"t4={folder / 'spot.json'}", "--spot-offset", "0.01", "--seed", "5"]
    (tmp_path / "prices.csv").write_text("type,on_demand,spot\nt4,2.0,0.5\n")
    prices = ["--prices", str(tmp_path / "prices.csv"), "--cluster", "t4:2x4", "--json", str(out)]
    assert main([*common(folder), *asked.split(), *more.split(), *spot, *prices]) == 0
    (record,) = json.loads(out.read_text())
    assert record["settings"]["disturbances"] == {
        "node_mtbf_h": 2.0,
        "repair_s": 30.0,
        "slow_every_h": 1.0,
        "slow_for_s": 60.0,
        "slow_factor": 3.0,
        "interference": 0.1,
        "noise": 0.05,
        "spot_offset_h": 0.01,
        "spot": {"t4": str(folder / "spot.json")},
    }
    assert record["settings"]["lengths"] == {"declared": False, "error": 0.2, "spread": 0.3, "epochs": {}}
    assert record["settings"]["shared_knowledge"] is True
    assert record["prices_usd"] == {"t4": 0.5}
    assert record["cost_usd"] == pytest.approx(0.5 * record["gpu_hours"])


def test_sia_gets_no_shared_knowledge(folder: Path, tmp_path: Path) -> None:
    """Its published jobs know only what they have measured themselves."""
    out = tmp_path / "out.json"
    asked = [
        "--policy",
        "sia,goodput",
        "--cluster",
        "t4:2x4",
        "--rules",
        "sia",
        "--shared-knowledge",
        "--json",
        str(out),
    ]
    assert main([*common(folder), *asked]) == 0
    told = {record["policy"]: record["settings"]["shared_knowledge"] for record in json.loads(out.read_text())}
    assert told == {"sia": False, "goodput": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cluster t4:2", "cluster must look like"),
        ("--policy polux", "policy must be one of"),
        ("--policy ,", "policy must name one policy or more"),
        ("--mtbf 2", "rules must be 'live' for node_mtbf_h, but got 'pollux'"),
        ("--mtbf -1 --rules live", "node_mtbf_h must be 0 or more and finite, but got -1"),
        ("--mtbf nan --rules live", "node_mtbf_h must be 0 or more and finite, but got nan"),
        ("--interference 1 --rules live", "interference must be 0 or more and below 1"),
        ("--slow-factor 0.5 --rules live", "slow_factor must be 1 or more"),
        ("--spot {spot}", "rules must be 'live' for spot"),
        ("--spot h100={spot} --rules live", r"spot must name GPU types of the cluster \(t4\), but got h100"),
        ("--spot {spot} --spot {spot} --rules live", "but got all nodes twice"),
        ("--spot nowhere.json --rules live", "spot trace nowhere.json cannot be read"),
        ("--length-error -1", "error of lengths must be 0 or more"),
        ("--random-lengths inf", "spread of lengths must be 0 or more"),
        ("--prices nowhere.csv", "prices nowhere.csv cannot be read"),
        ("--processes 0", "processes must be 1 or more"),
        ("--profiles nowhere", "profiles must be a folder"),
        ("--trace nowhere.csv", "trace nowhere.csv cannot be read"),
        ("--plot out.doc", "plot must be a file of kind .*png.*, but got out.doc"),
        ("--json nowhere/out.json", "nowhere/out.json must be in an existing folder"),
    ],
)
def test_a_bad_option_is_one_line_and_leaves_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    if "--plot" in options:
        pytest.importorskip("matplotlib")
    out = tmp_path / "out.json"
    given = options.format(spot=folder / "spot.json").split()
    assert main([*common(folder), "--cluster", "t4:2x4", "--policy", "fixed", "--json", str(out), *given]) == 2
    said = capsys.readouterr()
    assert re.search(message, said.err)
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not out.exists()


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([("a", 0, "resnet", 1, 32)], r"application of job 'a' must have a profile \(other, toy\), but got 'resnet'"),
        ([("a", -5, "toy", 1, 32)], "line 2: time of job 'a' must be 0 seconds or more and finite, but got -5"),
        ([("a", 0, "toy", 1, 32), ("a", 1, "toy", 1, 32)], "every name must occur once, but 'a' occurs more than once"),
        ([], "must hold one job or more"),
    ],
)
def test_one_bad_trace_stops_all(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    jobs: list[tuple[str, float, str, int, int]],
    message: str,
) -> None:
    monkeypatch.setattr(Task, "run", lambda task: pytest.fail(f"{task.trace} was simulated"))
    out, bad = tmp_path / "out.json", trace(tmp_path / "bad.csv", jobs)
    # The good trace comes first: it must not be simulated either.
    files = ["--trace", str(folder / "six.csv"), str(bad), "--profiles", str(folder / "profiles")]
    assert (
        main([*files, "--cluster", "t4:2x4", "--policy", "fixed", "--json", str(out), "--quiet", "--processes", "1"])
        == 2
    )
    said = capsys.readouterr()
    assert re.search(message, said.err)
    assert said.out == ""
    assert not out.exists()


def test_a_profile_without_a_column_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = profiles(tmp_path / "profiles")
    file = bad / "toy" / "validation-32.csv"
    file.write_text(file.read_text().replace("grad_var", "variance"))
    jobs = trace(tmp_path / "t.csv", [("a", 0, "toy", 1, 32)])
    assert main(["--trace", str(jobs), "--profiles", str(bad), "--cluster", "t4:1x4", "--quiet"]) == 2
    assert "validation-32.csv must have the columns" in capsys.readouterr().err


def test_jobs_from_python_are_checked_too(folder: Path) -> None:
    job = TraceJob(name="a", time_s=0.0, application="toy", num_replicas=1, batch_size=32)
    with pytest.raises(InputError, match="'a' occurs more than once"):
        simulate([job, job], folder / "profiles", "t4:1x4")
    with pytest.raises(InputError, match="must have a profile"):
        simulate([dataclasses.replace(job, application="x")], folder / "profiles", "t4:1x4")
    with pytest.raises(InputError, match="must hold one job or more"):
        simulate([], folder / "profiles", "t4:1x4")


def test_refused_decisions_are_told(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    class Greedy:
        name = "greedy"

        def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
            workers = 8 if now_s < 300 or len(jobs) == 1 else 1
            return {view.job: Target(workers=workers, reason="greedy: more") for view in jobs}

    monkeypatch.setattr(registry, "POLICIES", {**registry.POLICIES, "greedy": Greedy})
    assert main([*common(folder), "--cluster", "t4:2x4", "--policy", "greedy"]) == 0
    assert "decisions were refused, the first: policy 'greedy' broke rule 'capacity'" in capsys.readouterr().err


# The picture
# ----------------------------------------------------------------------------------------------------------------------


def test_the_picture_shows_every_stay_once_and_nothing_twice(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from placement.simulator.results import plot

    report = play(folder, policy="goodput")
    drawn: dict[tuple[str, int], list[tuple[float, float]]] = {}
    held_s = 0.0
    for (node, _, start_s, end_s, workers), lanes in plot._lanes(report, {"t4-000": 4, "t4-001": 4}):
        assert sum(width for _, width in lanes) == workers
        held_s += workers * (end_s - start_s)
        for first, width in lanes:
            assert 0 <= first < first + width <= 4
            for lane in range(first, first + width):
                for since_s, until_s in drawn.setdefault((node, lane), []):
                    assert end_s <= since_s or start_s >= until_s
                drawn[node, lane].append((start_s, end_s))
    assert held_s == pytest.approx(3600 * report.gpu_hours, rel=1e-3)  # an end may be heard of a moment later
    plot.plot([report], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_needs_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    assert main(["--demo", "--policy", "tiresias,goodput", "--rules", "live", "--quiet", "--json", str(written)]) == 0
    assert "demo/demo.csv  goodput" in capsys.readouterr().out
    tiresias, goodput = json.loads(written.read_text())
    assert goodput["jobs"] == 16 and goodput["avg_jct_s"] < 0.7 * tiresias["avg_jct_s"]
    assert main(["--demo", "--trace", "jobs.csv"]) == 2
    assert "leave out either --trace and --profiles" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--cluster", "t4:1x4"])
    assert "required: --trace, --profiles; or --demo" in capsys.readouterr().err
