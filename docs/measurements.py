"""Write docs/measurements.md from docs/measurements.jsonl: a row a claim, one number a cell.

    python docs/measurements.py                        # write the page
    python docs/measurements.py build/release/*.log    # first take over what these benchmarks have printed

A line of the file is one figure. The page says whether it meets its bar, so nobody can leave a miss out. A benchmark's
new figure replaces the one with the same claim.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
LINES = DOCS / "measurements.jsonl"
PAGE = DOCS / "measurements.md"
FIELDS = ("section", "claim", "value", "unit", "bar", "date", "machine", "command")
COLUMNS = "| Claim | Measured | Bar | | Date | Machine | Command |"
SECTIONS = (
    "Changes of the group",
    "Steps",
    "Sharded models and state",
    "Checkpoints",
    "Adaptive batch",
    "Synchronisation strategies",
    "Adaptation policies",
    "Data",
    "Frameworks",
    "Stragglers and monitoring",
    "Sweeps",
    "Allocation",
    "Cost",
    "Scale",
    "The page and metrics",
    "On a GPU",
)
HEAD = """# Measurements

[`measurements.py`](../docs/measurements.py) writes this page from [`measurements.jsonl`](../docs/measurements.jsonl),
which holds what the benchmarks in [`tests/benchmarks/`](../tests/benchmarks) have printed. They run both sides in one
run. Ratios are what counts, for times depend on the machine. `x` is a multiple of the other side. A bar says what a
figure must be; a miss is marked.

{count} figures, {bars} of them with a bar: {missed} are **missed**.

```sh
python tests/benchmarks/bench_resize.py | tee bench_resize.log
python docs/measurements.py bench_resize.log
```

Rows of the simulator need the published traces and profiles; `ELASTIC_RAY_DATA` names their folder. Dates until
2026-11-27 are those on which a figure was written down. `quiet`: nothing else ran; without a word: not recorded.
Conditions, earlier runs and experiments that did not work are in the repository, in `docs/lab`.
"""


def main() -> None:
    """Take over logs, if any; write the page."""
    rows = read()
    for log in sys.argv[1:]:
        rows = merged(rows, printed(Path(log).read_text(), Path(log).name))
    LINES.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    PAGE.write_text(page(rows))


def read() -> list[dict[str, Any]]:
    """Return the kept figures. Raises ValueError: a line lacks a field, or has an unknown section."""
    rows = [json.loads(line) for line in LINES.read_text().splitlines()]
    for row in rows:
        if tuple(row) != FIELDS or row["section"] not in SECTIONS:
            raise ValueError(f"a line must have {', '.join(FIELDS)} and a section of the page, but got {row}")
    return rows


def printed(log: str, name: str) -> list[dict[str, Any]]:
    """Return the figures of the JSON lines in a benchmark's output, without section; none of a run with --quick.

    Raises ValueError: the log is not named like its benchmark.
    """
    script = Path(name).stem + ".py"
    if not (DOCS.parent / "tests" / "benchmarks" / script).is_file():
        raise ValueError(f"a log must be named like its benchmark, such as bench_resize.log, but got {name}")
    found = []
    for line in log.splitlines():
        if not line.startswith('{"benchmark": '):
            continue
        result = json.loads(line)
        if "--quick" in (arguments := result.get("arguments", [])):
            continue
        machine = result.get("machine", {})
        date = datetime.date.fromtimestamp(machine["time_s"]).isoformat() if machine else ""
        for bar in result.get("bars", ()):
            if bar["reached"] is not None:
                claim, unit = re.fullmatch(r"(.*?)(?: \[(\w+)\])?", bar["claim"]).groups("")  # type: ignore[union-attr]
                value = float(f"{bar['reached']:.3g}")
                described = {
                    "date": date,
                    "machine": f"{machine.get('cpus')} CPUs",
                    "command": " ".join([script, *arguments]),
                }
                found.append({"claim": claim, "value": value, "unit": unit, "bar": bar["must be"], **described})
    return found


def merged(rows: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with new figures in the place of those with the same claim, others after their benchmark's."""
    result = [dict(row) for row in rows]
    for each in new:
        same = [n for n, row in enumerate(result) if row["command"].split()[0] == each["command"].split()[0]]
        place = next((n for n in same if result[n]["claim"] == each["claim"]), None)
        if place is None:
            section = result[same[-1]]["section"] if same else "Steps"
            result.insert(same[-1] + 1 if same else len(result), {"section": section, **each})
        else:
            ratio = "x" if result[place]["unit"] == "x" else ""  # which a benchmark does not print
            result[place] |= {**each, "unit": each["unit"] or ratio}
    return result


def missed(row: Mapping[str, Any]) -> str:
    """Return how far a figure misses its bar, or "" if it does not."""
    sign, _, limit = row["bar"].partition(" ")
    if not sign or (row["value"] >= float(limit) if sign == ">=" else row["value"] <= float(limit)):
        return ""
    if not float(limit):
        return "**missed**"
    percent = 100 * abs(row["value"] / float(limit) - 1)
    return f"**missed** by {percent:.0f} %" if percent >= 1 else f"**missed** by {percent:.1g} %"


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page's text."""
    with_bar = [row for row in rows if row["bar"]]
    counts = {"count": len(rows), "bars": len(with_bar), "missed": sum(map(bool, map(missed, with_bar)))}
    parts = [HEAD.format(**counts)]
    for section in SECTIONS:
        parts.append(f"\n## {section}\n\n{COLUMNS}\n{'|---' * 7}|\n")
        for row in (row for row in rows if row["section"] == section):
            state = missed(row) or ("met" if row["bar"] else "")
            unit = f" {row['unit']}" if row["unit"] else ""
            bar = row["bar"].replace(">= ", "≥\u00a0").replace("<= ", "≤\u00a0") + (unit if row["bar"] else "")
            cells = (
                row["claim"],
                f"{row['value']:.10g}{unit}",
                bar,
                state,
                row["date"],
                row["machine"],
                f"`{row['command']}`",
            )
            parts.append(f"| {' | '.join(cells)} |\n".replace("|  |", "| |").replace("|  |", "| |"))
    return "".join(parts)


if __name__ == "__main__":
    main()
