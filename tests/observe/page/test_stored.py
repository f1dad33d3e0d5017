"""Runs from their files, and reports of the simulator."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
from click.testing import CliRunner

from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.cli.app import cli
from elastic_ray.events import EventKind, JobEvent, Report
from elastic_ray.observe.page.feed import tables, to_json
from elastic_ray.observe.page.sources.files import RunFiles, closed_folders, run_folders
from elastic_ray.observe.page.sources.simulation import SimulatedCluster
from placement.errors import InputError


def write(folder: Path, end: str = "the job has finished") -> None:
    """A run's directory as its controller leaves it."""
    folder.mkdir(parents=True)
    storage = RunStorage(str(folder))
    steps = [(EventKind.STARTED, 0, 2, "starts"), (EventKind.RESIZE, 2, 3, "grows"), (EventKind.FINISHED, 3, 0, end)]
    storage.events.append(
        [
            JobEvent(kind=kind, time_s=100.0 * n, from_workers=a, to_workers=b, reason=why, pause_s=0.1).to_json()
            for n, (kind, a, b, why) in enumerate(steps, start=1)
        ]
    )
    storage.reports.append([Report(index=n, metrics={"loss": 1 / n}, workers=2).to_json() for n in range(1, 4)])


def test_runs_below_a_path_are_shown_with_sizes(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "sweep" / "trial-1", end="it lost all workers")
    write(tmp_path / "one" / "checkpoint_000001" / "not-a-run")
    page = RunFiles(str(tmp_path))
    seen = page.poll(0.0)
    assert {(job.job, job.phase, job.sweep) for job in seen.jobs} == {
        *(("one", "finished", ""), ("sweep/trial-1", "failed", "sweep")),
    }
    bars = [(bar[2], bar[3], bar[4], bar[5]) for bar in seen.bars if bar[2] == "one"]
    assert bars == [("one", 100.0, 200.0, 2), ("one", 200.0, 300.0, 3)]
    assert [use[1] for use in seen.use] == [4, 6, 0] and seen.source.kind == "files"
    detail = page.detail("one")
    assert detail is not None and [point[7]["loss"] for point in detail.series] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert detail.shares["training"] == pytest.approx(199.8) and to_json(tables(seen))
    assert [job.job for job in RunFiles(str(tmp_path / "one")).poll(0.0).jobs] == ["one"]


def test_files_tell_parameters_and_rungs(tmp_path: Path) -> None:
    facts = {"sweep": "s", "parameters": {"lr": 0.1}, "metric": "eval/loss", "mode": "min", "rungs": [1, 3]}
    for name, told in {"one": facts, "two": {**facts, "rungs": "many"}}.items():
        storage = RunStorage(str(tmp_path / "sweep" / name))
        (tmp_path / "sweep" / name).mkdir(parents=True)
        started = JobEvent(
            kind=EventKind.STARTED, time_s=1.0, from_workers=0, to_workers=1, reason="", detail={"trial": told}
        )
        batch = {"to_batch_size": 96, "efficiency": 0.75}
        changed = JobEvent(kind=EventKind.BATCH, time_s=2.0, from_workers=1, to_workers=1, reason="", detail=batch)
        storage.events.append([started.to_json(), changed.to_json()])
        storage.reports.append([Report(index=3, metrics={"eval": {"loss": 0.5}}, workers=1).to_json()])
    one, two = RunFiles(str(tmp_path)).poll(0.0).jobs
    assert (one.sweep, one.parameters, one.metric, one.mode, one.rungs) == (
        "s",
        {"lr": 0.1},
        "eval/loss",
        "min",
        (1, 3),
    )
    assert (one.score, one.reports, one.batch, one.efficiency) == (0.5, 3, 96, 0.75)
    assert (two.sweep, two.parameters) == ("sweep", {}), "what cannot be read is left out"


def test_a_run_that_died_ends_with_its_last_event(tmp_path: Path) -> None:
    write(tmp_path / "run")
    events = tmp_path / "run" / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:2]))
    page = RunFiles(str(tmp_path)).poll(0.0)
    (job,) = page.jobs
    assert (job.phase, job.workers, job.ended_s) == ("unfinished", 3, 200.0)
    assert [bar[4] for bar in page.bars] == [200.0] and page.strip.running == 0


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "resize", "time_s": "soon", "from_workers": 1, "to_workers": 2, "reason": "x"}',
        '{"kind": "resize", "time_s": 1.0, "from_workers": 1, "to_workers": 2, "reason": null}',
        '{"kind": "resize", "time_s": 1e300, "from_workers": 1, "to_workers": 2, "reason": "x"}',
        '{"kind": "resize", "time_s": 1.0, "from_workers": 1, "to_workers": 1e999, "reason": "x"}',
        '{"kind": "resize", "time_s": 1.0, "from_workers": 1, "to_workers": 2, "reason": "x", "detail": [1]}',
        "[" * 100_000,
        '{"kind": "' + "9" * 400 + '"}',
    ],
)
def test_a_line_that_is_no_event_is_left_out(tmp_path: Path, line: str) -> None:
    write(tmp_path / "run")
    for file in ("events.jsonl", "reports.jsonl"):
        with (tmp_path / "run" / file).open("a") as open_file:
            open_file.write(line + "\n")
    page = RunFiles(str(tmp_path))
    (job,) = page.poll(0.0).jobs
    assert job.phase == "finished" and page.detail("run") is not None


def test_reports_of_numbers_without_bounds_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "run")
    with (tmp_path / "run" / "reports.jsonl").open("a") as file:
        file.write('{"index": 4, "metrics": {"loss": ' + "9" * 400 + '}, "workers": 1}\n')
        file.write('{"index": 5, "metrics": {}, "workers": 1e999}\n')
    (job,) = RunFiles(str(tmp_path)).poll(0.0).jobs
    assert job.metrics == {}


def test_run_that_cannot_be_read_costs_the_others_nothing(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        write(tmp_path / name)
    (tmp_path / "two" / "reports.jsonl").unlink()
    (tmp_path / "two" / "reports.jsonl").mkdir()  # as root may read whatever belongs to others
    (tmp_path / "three" / "events.jsonl").unlink()
    (tmp_path / "three" / "events.jsonl").mkdir()
    page = RunFiles(str(tmp_path)).poll(0.0)
    assert {job.job for job in page.jobs} == {"one"}
    assert page.source.problem.startswith("1 run could not be read (")


class Guarded:
    """A file system with folders that this user may not look into, which root may."""

    def __init__(self, *closed: Path) -> None:
        self.closed = set(map(str, closed))

    def get_file_info(self, selector: pyarrow.fs.FileSelector) -> list[pyarrow.fs.FileInfo]:
        """As of the local file system."""
        if selector.base_dir in self.closed:
            raise PermissionError(selector.base_dir)
        return list(pyarrow.fs.LocalFileSystem().get_file_info(selector))


def test_folders_that_are_closed_are_told(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name)
    guarded: Any = Guarded(tmp_path / "two")
    found, closed = run_folders(guarded, str(tmp_path))
    assert [folder for _, folder in found] == [str(tmp_path / "one")] and closed == [str(tmp_path / "two")]
    assert closed_folders(closed).startswith("without the runs in 1 folder that") and not closed_folders([])
    guarded.closed.add(str(tmp_path))
    with pytest.raises(PermissionError):
        run_folders(guarded, str(tmp_path))


def test_of_very_many_runs_the_newest_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ray.observe.page.sources.files.MOST_RUNS", 2)
    for age, name in enumerate(("c", "b", "a")):
        write(tmp_path / name)
        os.utime(tmp_path / name / "events.jsonl", (1e9 - age, 1e9 - age))
    page = RunFiles(str(tmp_path)).poll(0.0)
    assert sorted(job.job for job in page.jobs) == ["b", "c"]
    assert page.source.problem == "1 older run left out: give a path further down"


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "run")
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write('{"kind": "resi')
    (job,) = RunFiles(str(tmp_path)).poll(0.0).jobs
    assert job.phase == "finished"


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('[{"placed": [], "decisions": [], "per_job": [], "cluster": "aws:300000x1"}]', "at most 10000 nodes"),
        ('[{"placed": [], "decisions": [], "per_job": [], "cluster": "aws:1x4000000000"}]', "at most 10000 nodes"),
        ("[]", "must hold a list of records"),
        ('[{"trace": "x"}]', "write it again with `simulate --json`"),
        ('[{"placed": [], "decisions": [], "per_job": 3}]', "is no report of the simulator"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "out.json"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        SimulatedCluster(str(file))
    answer = CliRunner().invoke(cli, ["dashboard", "--simulation", str(file)])
    assert answer.exit_code == 1 and message in answer.stderr and "Traceback" not in answer.stderr


def test_wrong_use_is_told(tmp_path: Path) -> None:
    empty = CliRunner().invoke(cli, ["dashboard", "--from", str(tmp_path)])
    assert empty.exit_code == 1 and "must hold the directory of a run" in empty.stderr
    both = CliRunner().invoke(cli, ["dashboard", "--from", "x", "--simulation", "y"])
    assert both.exit_code == 2 and "a page has one source" in both.stderr
    write(tmp_path / "run")
    where = CliRunner().invoke(cli, ["dashboard", "--from", str(tmp_path), "--host", "203.0.113.9", "--port", "1"])
    assert where.exit_code == 1 and "nothing can listen at 203.0.113.9 port 1" in where.stderr
    record = {"placed": [], "decisions": []}
    (tmp_path / "two.json").write_text(json.dumps([record, record]))
    third = CliRunner().invoke(cli, ["dashboard", "--simulation", f"{tmp_path}/two.json#3"])
    assert "has records #1 to #2, but got #3" in third.stderr
