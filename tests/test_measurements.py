"""The page of measurements is its kept lines, misses are marked, and what a benchmark prints can be taken over."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest

from docs import measurements

ROOT = Path(__file__).parents[1]
ROWS = measurements.read()


def row(value: float, bar: str, **others: Any) -> dict[str, Any]:
    """Return a figure with this value and bar."""
    given = {"section": "Steps", "claim": "c", "value": value, "unit": "x", "bar": bar, "date": "", "machine": ""}
    return {**given, "command": "bench_kill.py", **others}


def test_the_page_is_what_the_script_writes() -> None:
    assert measurements.PAGE.read_text() == measurements.page(ROWS), "run python docs/measurements.py"


def test_a_claim_has_one_row() -> None:
    claims = [each["claim"] for each in ROWS]
    assert sorted({claim for claim in claims if claims.count(claim) > 1}) == []


def test_rows_name_scripts_days_and_bars_that_exist() -> None:
    for each in ROWS:
        script = ROOT / "tests" / "benchmarks" / each["command"].split()[0]
        assert each["command"] == "by hand" or script.is_file(), each
        datetime.date.fromisoformat(each["date"])
        assert re.fullmatch(r"((>=|<=) [\d.]+)?", each["bar"]), each


@pytest.mark.parametrize(
    ("value", "bar", "told"),
    [
        (47, ">= 20", ""),
        (20, ">= 20", ""),
        (15, ">= 20", "**missed** by 25 %"),
        (1.032, "<= 1.03", "**missed** by 0.2 %"),
        (1, "<= 0", "**missed**"),
        (0, "<= 0", ""),
        (3, "", ""),
    ],
)
def test_a_miss_is_marked_with_its_size(value: float, bar: str, told: str) -> None:
    assert measurements.missed(row(value, bar)) == told


def test_a_benchmarks_line_replaces_its_own_claim() -> None:
    log = (
        'some text\n{"benchmark": "kill", "rows": [], "bars": [{"claim": "c [s]", "reached": 31.26, "must be": ">= 20",'
        ' "met": true}, {"claim": "not run", "reached": null, "must be": "<= 1", "met": null}, {"claim": "new", '
        '"reached": 2.0, "must be": "<= 1", "met": false}], "machine": {"cpus": 4, "time_s": 1795000000}}\n'
    )
    before = [row(1, ">= 20"), row(1, "", claim="c", command="bench_hang.py")]
    quick = log.replace('"rows"', '"arguments": ["--quick"], "rows"')
    assert measurements.printed(quick, "bench_kill.log") == []
    with pytest.raises(ValueError, match=r"named like its benchmark, such as bench_resize.log, but got kill.log"):
        measurements.printed(log, "kill.log")
    after = measurements.merged(before, measurements.printed(log, "build/release/bench_kill.log"))
    assert [(each["claim"], each["value"], each["unit"], each["machine"]) for each in after] == [
        ("c", 31.3, "s", "4 CPUs"),
        ("new", 2.0, "", "4 CPUs"),
        ("c", 1, "x", ""),
    ]
    assert tuple(after[1]) == measurements.FIELDS and after[1]["section"] == "Steps"
    assert after[0]["date"] == datetime.date.fromtimestamp(1795000000).isoformat()
