"""Spot traces: what is read, who is gone when, and that comings and goings are the same for the same seed."""

from __future__ import annotations

import json
import math
from itertools import takewhile
from pathlib import Path

import pytest

from placement.policies import FixedPolicy
from placement.simulator import InputError, SimulationReport, simulate
from placement.simulator.nodes.clusters import parse_cluster
from placement.simulator.nodes.disturbances import Disturbances, SpotTrace, read_spot
from placement.simulator.results.plot import bars
from tests.placement.simulator.worlds import data, profiles, trace


def counts(path: Path, values: list[object], gap_s: object = 100) -> Path:
    path.write_text(json.dumps({"metadata": {"gap_seconds": gap_s}, "data": values}))
    return path


def events(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_counts_become_places_taken_while_there_are_so_many(tmp_path: Path) -> None:
    spot = read_spot(counts(tmp_path / "a.json", [0, 2, 1, 1, 0, 2]))
    assert spot.length_s == 600.0
    assert spot.places == (((100.0, 400.0), (500.0, 600.0)), ((100.0, 200.0), (500.0, 600.0)))


def test_machines_that_come_take_the_first_empty_place(tmp_path: Path) -> None:
    lines = ["0,add,a", "1000,add,b", "5000,remove,a", "6000,add,c", "9000,remove,b"]
    spot = read_spot(events(tmp_path / "a.csv", *lines))
    assert spot.length_s == 9.0
    assert spot.places == (((0.0, 5.0), (6.0, 9.0)), ((1.0, 9.0),))


def test_trace_is_played_again_and_again_from_its_offset() -> None:
    spot = SpotTrace(source="x", length_s=10.0, places=(((2.0, 4.0), (8.0, 10.0)), ()))
    assert list(spot.gone(0, 0.0, 19.0)) == [(0.0, 2.0), (4.0, 8.0), (10.0, 12.0), (14.0, 18.0)]
    assert list(spot.gone(0, 9.0, 12.0)) == [(1.0, 3.0), (5.0, 9.0), (11.0, 13.0)]
    assert list(spot.gone(0, 19.0, 12.0)) == list(spot.gone(0, 9.0, 12.0))
    assert list(spot.gone(1, 0.0, 10.0)) == [(0.0, math.inf)]


def test_every_node_is_dealt_a_place_by_the_seed() -> None:
    spot = SpotTrace(source="x", length_s=10.0, places=(((0.0, 10.0),),) * 8)
    nodes = [f"n{i}" for i in range(8)]
    assert sorted(spot.deal(nodes, 0).values()) == list(range(8))
    assert spot.deal(nodes, 0) == spot.deal(nodes, 0) != spot.deal(nodes, 1)
    assert sorted(spot.deal([*nodes, "n8"], 0).values()).count(spot.deal(nodes, 0)["n0"]) == 2


def test_only_nodes_of_the_named_type_come_and_go() -> None:
    spot = SpotTrace(source="x", length_s=100.0, places=(((0.0, 50.0),),))
    nodes = parse_cluster("t4:2x4,a100:1x8").nodes
    script = Disturbances(spot={"t4": spot}).script(nodes, 0, 150.0)
    assert {node for _, _, node in script} == {"t4-000", "t4-001"}
    in_time = takewhile(lambda event: event[0] < 150.0, script)
    assert [(time_s, what) for time_s, what, node in in_time if node == "t4-000"] == [(50.0, "down"), (100.0, "up")]
    assert {node for _, _, node in Disturbances(spot={"": spot}).script(nodes, 0, 60.0)} == {n.node_id for n in nodes}


@pytest.fixture
def play(tmp_path: Path) -> object:
    profiles(tmp_path / "profiles", ("toy",), ("t4",))
    jobs = trace(tmp_path / "six.csv", [(f"j{i}", 40.0 * i, "toy", 1, 128) for i in range(6)])

    def run(seed: int = 0, **fields: object) -> SimulationReport:
        wrong = Disturbances(**fields)
        return simulate(
            jobs, tmp_path / "profiles", "t4:3x4", rules="live", policy="goodput", seed=seed, disturbances=wrong
        )

    return run


@pytest.mark.thorough
def test_comings_and_goings_are_same_for_the_same_seed(tmp_path: Path, play) -> None:  # type: ignore[no-untyped-def]
    spot = {"": read_spot(counts(tmp_path / "a.json", [3, 1, 2, 0, 3, 2], gap_s=60))}
    first, again, other = (
        play(seed, spot=spot, node_mtbf_h=1.0, slow_every_h=0.5, noise=0.1, interference=0.2) for seed in (3, 3, 4)
    )
    assert "\n".join(first.log_lines()).encode() == "\n".join(again.log_lines()).encode()
    assert first.log_lines() != other.log_lines()
    assert [job.finish_s for job in first.jobs] == [job.finish_s for job in again.jobs]


def test_nobody_is_on_a_node_that_is_not_there(tmp_path: Path, play) -> None:  # type: ignore[no-untyped-def]
    spot = read_spot(counts(tmp_path / "a.json", [3, 1, 2, 0, 3, 2], gap_s=60))
    report = play(spot={"": spot})
    gone = {
        node: list(spot.gone(place, 0.0, report.makespan_s + 1000))
        for node, place in spot.deal(["t4-000", "t4-001", "t4-002"], 0).items()
    }
    assert any(record.trigger == "nodes" for record in report.log)
    for node, _, start_s, end_s, _ in bars(report):
        assert not any(start_s < back_s and gone_s < end_s for gone_s, back_s in gone[node])
    assert report.makespan_s > play().makespan_s


def test_a_job_losing_all_workers_loses_its_present_epoch(tmp_path: Path) -> None:
    profiles(tmp_path / "profiles", ("toy",), ("t4",))
    jobs = trace(tmp_path / "one.csv", [("a", 0.0, "toy", 1, 32)])
    spot = read_spot(counts(tmp_path / "a.json", [1, 0, *[1] * 100], gap_s=30))
    quiet, loud = (
        simulate(
            jobs,
            tmp_path / "profiles",
            "t4:1x4",
            rules="live",
            policy=FixedPolicy(workers=1),
            requested=True,
            disturbances=Disturbances(spot=market),
        ).jobs[0]
        for market in ({}, {"": spot})
    )
    assert loud.finish_s == pytest.approx(60.0 + quiet.finish_s)  # the node is back after 60 s, and all is lost
    assert loud.gpu_hours["t4"] == pytest.approx(quiet.gpu_hours["t4"] + 30 / 3600)


def test_what_happens_at_once_is_decided_about_once(tmp_path: Path, play) -> None:  # type: ignore[no-untyped-def]
    """Three nodes go in one moment: nobody is first sent to one that goes a moment later."""
    report = play(spot={"": read_spot(counts(tmp_path / "a.json", [3, 0, 3, 3, 3, 3], gap_s=60))})
    assert not [placed for placed in report.placed if placed.time_s == 60.0 and placed.nodes]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "must hold metadata.gap_seconds and data"),
        ("a.json", '{"data": [1]}', "must hold metadata.gap_seconds and data"),
        ("a.json", '{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds of .* above 0 seconds, but got 0"),
        ("a.json", '{"metadata": {"gap_seconds": 1}, "data": []}', "must be a list of counts"),
        ("a.json", '{"metadata": {"gap_seconds": 1}, "data": [1, -2]}', r"data\[1\] .* 0 or more, but got -2"),
        ("a.json", '{"metadata": {"gap_seconds": 1}, "data": [0, 0]}', "never has one"),
        ("a.csv", "0,add\n", "line 1 must be 'milliseconds,add|remove,name', but got '0,add'"),
        ("a.csv", "0,add,a\nsoon,remove,a\n", "line 2 must be 'milliseconds"),
        ("a.csv", "0,add,a\n5,stop,a\n", "line 2 must be 'milliseconds"),
        ("a.csv", "0,add,a\n5,add,a\n", "line 2: 'a' is added, but is already there"),
        ("a.csv", "0,add,a\n5,remove,b\n", "line 2: 'b' is removed, but does not exist"),
        ("a.csv", "9,add,a\n5,add,b\n", "line 2: times must not fall"),
        ("a.csv", "0,add,a\n", "must span some time"),
        ("a.txt", "", "must be a .json file of counts or a .csv file of events"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read_spot(tmp_path / name)


def test_a_missing_trace_or_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_spot(tmp_path / "none.json")
    spot = SpotTrace(source="x", length_s=1.0, places=(((0.0, 1.0),),))
    with pytest.raises(InputError, match="one trace for all nodes, or one a GPU type"):
        Disturbances(spot={"": spot, "t4": spot})


def test_the_recorded_traces_are_read() -> None:
    folder = data() / "spot"
    traces = {path.name: read_spot(path) for path in sorted(folder.iterdir())}
    assert len(traces) == 7
    assert len(traces["bamboo_p3.csv"].places) == 32
    assert {len(t.places) for name, t in traces.items() if "16-node" in name} == {16}
