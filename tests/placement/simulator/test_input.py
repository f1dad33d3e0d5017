"""Bad traces, profiles and cluster strings: errors that say where and what is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.errors import InputError
from placement.simulator.nodes.clusters import gpu_types, parse_cluster
from placement.simulator.workloads.profiles import load_profiles
from placement.simulator.workloads.traces import TraceJob, read_trace
from tests.placement.simulator.worlds import profiles, trace


def test_a_trace_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.csv", [("b", 5.5, "toy", 2, 64), ("a", 0, "toy", 1, 32)])
    first, second = read_trace(path, {"toy"})
    assert first == TraceJob(name="a", time_s=0.0, application="toy", num_replicas=1, batch_size=32)
    assert (second.name, second.time_s) == ("b", 5.5)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([("a", 0, "toy", 1, 32), ("a", 1, "toy", 1, 32)], "'a' occurs more than once"),
        ([("a", -1, "toy", 1, 32)], "time of job 'a' must be 0 seconds or more and finite, but got -1"),
        ([("a", "nan", "toy", 1, 32)], "time of job 'a' must be 0 seconds or more and finite, but got nan"),
        ([("a", 0, "resnet", 1, 32)], r"must have a profile \(toy\), but got 'resnet'"),
        ([("a", 0, "toy", 0, 32)], "num_replicas of job 'a' must be 1 or more, but got 0"),
        ([("a", "soon", "toy", 1, 32)], "line 2: could not convert string to float: 'soon'"),
        ([], "must hold one job or more, but is empty"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, jobs: list[tuple[str, float, str, int, int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_trace(trace(tmp_path / "t.csv", jobs), {"toy"})


def test_trace_without_a_column_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("name,time,application\na,0,toy\n")
    with pytest.raises(InputError, match="num_replicas, batch_size is missing"):
        read_trace(tmp_path / "t.csv", {"toy"})
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "none.csv", {"toy"})


def test_a_profile_without_a_column_is_refused(tmp_path: Path) -> None:
    folder = profiles(tmp_path / "p")
    file = folder / "toy" / "placements-t4.csv"
    file.write_text(file.read_text().replace("sync_time", "sync"))
    with pytest.raises(InputError, match=r"placements-t4.csv must have the columns .*, but sync_time is missing"):
        load_profiles(folder, ("t4",))


def test_profiles_of_an_unknown_gpu_or_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder does"):
        load_profiles(profiles(tmp_path / "p"), ("h100",))
    with pytest.raises(InputError, match="must be a folder"):
        load_profiles(tmp_path / "nowhere", ("t4",))


def test_columns_may_come_in_any_order(tmp_path: Path) -> None:
    folder = profiles(tmp_path / "p")
    before = load_profiles(folder, ("t4",))["toy"].step_times["t4"].times((2,), 8)
    file = folder / "toy" / "placements-t4.csv"
    rows = [line.split(",") for line in file.read_text().splitlines()]
    file.write_text("\n".join(",".join(reversed(row)) for row in rows) + "\n")
    twin = tmp_path / "twin"
    folder.rename(twin)  # another path: profiles are cached by theirs
    assert load_profiles(twin, ("t4",))["toy"].step_times["t4"].times((2,), 8) == before


def test_cluster_strings() -> None:
    nodes = parse_cluster("aws:2x4,rtx:1x8")
    assert [(node.node_id, node.total["GPU"], node.gpu_type) for node in nodes.nodes] == [
        ("aws-000", 4, "aws"),
        ("aws-001", 4, "aws"),
        ("rtx-000", 8, "rtx"),
    ]
    assert gpu_types(nodes) == ("aws", "rtx")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "aws",
        "aws:4",
        "aws:0x4",
        "aws:2x0",
        "aws:2x4,aws:1x4",
        "aws:-1x4",
        "aws:2x4;",
        "aws:9999999x1",
        "aws:1x9999999",
        "a:9999x1,b:2x1",
        "aws:" + 5000 * "9" + "x1",
    ],
)
def test_cluster_strings_that_make_no_sense(text: str) -> None:
    with pytest.raises(InputError, match="cluster must"):
        parse_cluster(text)
