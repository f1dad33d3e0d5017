"""What runs have used, by user, tenant, job and week, and the command that tells it from their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.cli.app import cli
from elastic_ray.events import EventKind, JobEvent
from elastic_ray.record.usage import UsageRow, total, usage, week_of

SUNDAY_S = 1_795_996_800.0 - 3600.0  # an hour before the week 2026-W49 begins (Monday, 2026-11-30, UTC)
HOUR_S = 3600.0
OWNER = {"user": "ann", "tenant": "vision", "bundle": {"GPU": 2.0, "CPU": 4.0}}


def event(kind: EventKind, hour: float, before: int, after: int, **detail: Any) -> JobEvent:
    at_s = SUNDAY_S + hour * HOUR_S
    return JobEvent(kind=kind, time_s=at_s, from_workers=before, to_workers=after, reason="r", detail=detail)


RUN = (
    event(EventKind.STARTED, 0.0, 0, 1, owner=OWNER),
    event(EventKind.RESIZE, 0.5, 1, 3, cost_usd=1.0),
    event(EventKind.PAUSED, 2.0, 3, 0, cost_usd=4.0),
    event(EventKind.STARTED, 5.0, 0, 1, owner=OWNER),
    event(EventKind.FINISHED, 6.0, 1, 0, cost_usd=12.0),
)


def test_weeks() -> None:
    assert [week_of(SUNDAY_S), week_of(SUNDAY_S + HOUR_S)] == ["2026-W48", "2026-W49"]


def test_hours_and_cost_belong_to_the_weeks_with_workers() -> None:
    first, second = usage("bert", RUN, 0.0)
    assert (first.user, first.tenant, first.job, first.week) == ("ann", "vision", "bert", "2026-W48")
    assert (first.worker_hours, second.worker_hours) == (0.5 + 1.5, 3.0 + 1.0)  # a pause costs none
    assert (first.gpu_hours, second.gpu_hours, second.cpu_hours) == (4.0, 8.0, 16.0)
    assert first.cost_usd == pytest.approx(4.0) and second.cost_usd == pytest.approx(8.0)


def test_a_running_run_is_counted_until_last_seen() -> None:
    (row,) = usage("bert", RUN[:1], SUNDAY_S + HOUR_S)
    assert row.worker_hours == 1.0 and row.cost_usd is None
    (row,) = usage("bert", (*RUN[:1], event(EventKind.FINISHED, 0.5, 1, 0)), SUNDAY_S + 9 * HOUR_S)
    assert row.worker_hours == 0.5


def test_second_run_of_a_name_has_its_own_cost() -> None:
    again = event(EventKind.STARTED, 7.0, 0, 1, owner={**OWNER, "user": "bob"})
    rows = usage("bert", (*RUN, again, event(EventKind.FINISHED, 8.0, 1, 0, cost_usd=3.0)), 0.0)
    assert {row.user: row.cost_usd for row in total(rows, ("user",))} == pytest.approx({"ann": 12.0, "bob": 3.0})


def test_a_long_run_has_a_row_for_each_week() -> None:
    run = (event(EventKind.STARTED, 0.0, 0, 2, owner=OWNER), event(EventKind.FINISHED, 400.0, 2, 0, cost_usd=80.0))
    rows = usage("bert", run, 0.0)
    assert [(row.week, row.worker_hours) for row in rows] == [
        ("2026-W48", 2.0),
        ("2026-W49", 2 * 168.0),
        ("2026-W50", 2 * 168.0),
        ("2026-W51", 2 * 63.0),
    ]
    assert [row.cost_usd for row in rows] == pytest.approx([80 * row.worker_hours / 800 for row in rows])


@pytest.mark.parametrize("amount", [-1.0, True, "2", None])
def test_numbers_that_are_none_count_nothing(amount: Any) -> None:
    run = event(EventKind.STARTED, 0.0, 0, 1, owner={"bundle": {"GPU": amount}})
    (row,) = usage("j", (run, event(EventKind.FINISHED, 0.5, 1, 0, cost_usd=amount)), 0.0)
    assert (row.gpu_hours, row.cpu_hours, row.worker_hours, row.cost_usd, row.user) == (0.0, 0.0, 0.5, 0.0, "")


def test_sums_leave_out_unknown_costs() -> None:
    rows = [UsageRow(user="b", cost_usd=None, worker_hours=1.0), UsageRow(user="a", cost_usd=2.0, gpu_hours=3.0)]
    assert total(rows, ("user",)) == [rows[1], rows[0]]
    assert total([*rows, rows[1]], ()) == [UsageRow(cost_usd=4.0, gpu_hours=6.0, worker_hours=1.0)]


def test_the_command_reads_files_and_sums(tmp_path: Path) -> None:
    for job, events in (("a", RUN), ("sweep/trial", RUN[:2])):
        storage = RunStorage(str(tmp_path / job))
        storage.create()
        storage.events.append([each.to_json() for each in events])

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["usage", str(tmp_path), *arguments], env={"NO_COLOR": "1"})
        assert result.exit_code == 0, result.output
        return result.stdout

    rows = json.loads(run("--json"))
    assert {row["job"] for row in rows} == {"a", "sweep/trial"}
    assert {row["week"] for row in rows} >= {"2026-W48"} and rows[0]["user"] == "ann"
    head, line = run("--by", "tenant").splitlines()
    assert head.split() == ["TENANT", "GPU-HOURS", "CPU-HOURS", "WORKER-HOURS", "USD"] and line.split()[0] == "vision"
    assert [row["week"] for row in json.loads(run("--json", "--by", "tenant"))] == [None]
    (tmp_path / "a" / "events.jsonl").write_text("no json\n" * 3)
    assert CliRunner().invoke(cli, ["usage", str(tmp_path)]).exit_code == 0
    missing = CliRunner().invoke(cli, ["usage", str(tmp_path / "none")])
    assert missing.exit_code == 1 and "none" in missing.stderr
