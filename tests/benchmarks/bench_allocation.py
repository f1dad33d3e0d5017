"""Average completion time of ``goodput`` on published traces, in four rows of what it may know.

Rows: no length information; none but what earlier jobs of the application tell (shared knowledge, nothing declared);
declared epochs; declared epochs and shared knowledge (jobs of one application share what they measure). Families:
``pollux`` under Pollux's rules against the averages that its artifact publishes; ``philly`` and ``saturn`` under Sia's
rules against ``sia`` and ``pollux`` in the same simulator, homogeneous and heterogeneous; ``live`` the same traces
under our own rules against ``sia`` with its restart charges.

Of the families under Sia's rules, the traces 1 and 2 of each folder are there to choose parameters on; 3 and 4 are
looked at once, at the end. Which of them were chosen on before was not written down.

Claims hold for the mean over all traces of a family in ``$ELASTIC_RAY_DATA`` (the folder with ``workloads`` and
``profiles``); differences under 5 % on one trace mean nothing. A full run takes hours on one core: choose families.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import bar, finish, side_parser

from placement.policies import GoodputPolicy
from placement.simulator import simulate
from placement.simulator.workloads.traces import Lengths

DATA = Path(os.environ.get("ELASTIC_RAY_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
HOMOGENEOUS = "aws:16x4"
HETEROGENEOUS = "aws:6x4,rtx:3x8,dgx-ext:2x8"
ROWS = {
    "no lengths": (False, False, True),
    "earlier jobs": (True, True, False),
    "epochs": (True, False, True),
    "epochs + shared": (True, True, True),
}
"""Name: (lengths are used, measurements are shared, jobs declare their epochs)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Traces that are run alike, and what they are compared with.

    Attributes:
        sets: folders of workloads.
        cluster: cluster string.
        rules: rules for goodput.
        against: (baseline, its rules, the bar as a multiple of it); the baseline ``published`` is read from a file.
    """

    sets: tuple[str, ...]
    cluster: str
    rules: str
    against: tuple[tuple[str, str, float], ...]


SIA_SETS = ("sia-philly", "sia-saturn")
FAMILIES = {
    "pollux": Family(sets=("pollux",), cluster=HOMOGENEOUS, rules="pollux", against=(("published", "pollux", 0.85),)),
    "homogeneous": Family(
        sets=SIA_SETS, cluster=HOMOGENEOUS, rules="sia", against=(("sia", "sia", 0.72), ("pollux", "sia", 0.65))
    ),
    "heterogeneous": Family(sets=SIA_SETS, cluster=HETEROGENEOUS, rules="sia", against=(("sia", "sia", 0.80),)),
    "live": Family(sets=SIA_SETS, cluster=HOMOGENEOUS, rules="live", against=(("sia", "sia", 0.65),)),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulation."""

    family: str
    trace: str
    system: str
    rules: str


def main() -> None:
    """Run what was asked for, one line each on the error stream, then tables and bars."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=sorted(FAMILIES))
    parser.add_argument("--traces", nargs="+", help="only traces whose file has one of these numbers")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--no-baselines", action="store_true", help="only what is ours and what is published")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    runs = [
        run
        for family in options.families
        for run in _runs(family, options.traces, options.rows, baselines=not options.no_baselines)
    ]
    records = _run_all(runs[:1] if options.quick else runs, options.processes)
    rows, bars = [], []
    for family in options.families:
        own = [record for record in records if record["family"] == family]
        rows += _rows(family, own)
        bars += _bars(family, own)
    finish("allocation: every trace", rows=[_short(record) for record in records], bars=[])
    finish("allocation", rows=rows, bars=bars)


def _runs(name: str, numbers: list[str] | None, rows: list[str], *, baselines: bool) -> list[Run]:
    family = FAMILIES[name]
    traces = [str(path) for folder in family.sets for path in sorted((DATA / "workloads" / folder).glob("*.csv"))]
    traces = [trace for trace in traces if numbers is None or Path(trace).stem.split("-")[-1] in numbers]
    systems = [(row, family.rules) for row in rows]
    if baselines:
        systems += [(policy, rules) for policy, rules, _ in family.against if policy != "published"]
    return [Run(family=name, trace=t, system=system, rules=rules) for t in traces for system, rules in systems]


def _run_all(runs: list[Run], processes: int) -> list[dict[str, Any]]:
    if processes <= 1:
        return [_run(run) for run in runs]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        return list(pool.map(_run, runs))


def _run(run: Run) -> dict[str, Any]:
    start = time.process_time()
    lengths, shared, declared = ROWS.get(run.system, (True, False, True))
    policy = GoodputPolicy(lengths=lengths) if run.system in ROWS else run.system
    report = simulate(
        run.trace,
        DATA / "profiles",
        FAMILIES[run.family].cluster,
        rules=run.rules,
        policy=policy,
        knowledge=shared,
        lengths=Lengths(declared=declared),
    )
    record = report.record()
    changes: collections.Counter[str] = collections.Counter()
    for job in record.pop("per_job"):
        changes[job["application"]] += job["resizes"]
    record |= {"family": run.family, "system": run.system, "changes": changes}
    print(
        f"{run.family} {'/'.join(Path(run.trace).parts[-2:])} {run.system}: {record['avg_jct_s']:.0f} s on average, "
        f"{time.process_time() - start:.0f} s CPU",
        file=sys.stderr,
        flush=True,
    )
    return record


def _short(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "family": record["family"],
        "trace": "/".join(Path(record["trace"]).parts[-2:]),
        "system": record["system"],
        "avg [h]": record["avg_jct_s"] / 3600,
        "p99 [h]": record["p99_jct_s"] / 3600,
        "makespan [h]": record["makespan_s"] / 3600,
        "GPU h": record["gpu_hours"],
        "changes": record["restarts_per_job"],
        "rho > 2": record["rho_above_2"],
        "decision [ms]": record["decision_ms_mean"],
        "max": record["decision_ms_max"],
        "refused": record["refused_decisions"],
    }


def _rows(family: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean over the traces of each system, and the spread of the averages."""
    rows = []
    for system in dict.fromkeys(record["system"] for record in records):
        own = [_short(record) for record in records if record["system"] == system]
        averages = [row["avg [h]"] for row in own]
        means = {key: statistics.fmean(row[key] for row in own) for key in own[0] if not isinstance(own[0][key], str)}
        spread = statistics.stdev(averages) if len(averages) > 1 else 0.0
        rows.append({"family": family, "traces": len(own), "system": system, "spread [h]": spread, **means})
    return rows


def _bars(family: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    bars = []
    for row in ROWS:
        ours = {record["trace"]: record for record in records if record["system"] == row}
        if ours:
            unfair = statistics.fmean(record["rho_above_2"] for record in ours.values())
            bars.append(bar(f"{family}: {row}, jobs with rho > 2", value=unfair, limit=0.01, at_least=False))
        for baseline, _, limit in FAMILIES[family].against:
            for claim, key, most in (
                ("", "avg_jct_s", limit),
                (" p99", "p99_jct_s", 0.99),
                (" makespan", "makespan_s", 1.02),
                (" GPU hours", "gpu_hours", 1.02),
                (" changes a job", "restarts_per_job", 1.0),
            ):
                theirs = _baseline(records, baseline, key)
                both = [trace for trace in ours if trace in theirs]
                if both:
                    value = sum(ours[t][key] for t in both) / sum(theirs[t] for t in both)
                    bars.append(bar(f"{family}:{claim} {row} / {baseline}", value=value, limit=most, at_least=False))
            counted = {record["trace"]: record["changes"] for record in records if record["system"] == baseline}
            if both := [trace for trace in ours if trace in counted]:
                sums = [sum((each[t] for t in both), collections.Counter()) for each in (_changes(ours), counted)]
                worst = max(sums[0][application] / max(sums[1][application], 1) for application in sums[0])
                claim = f"{family}: changes a job, the worst application's, {row} / {baseline}"
                bars.append(bar(claim, value=worst, limit=1.2, at_least=False))
    return bars


def _changes(records: dict[str, dict[str, Any]]) -> dict[str, collections.Counter[str]]:
    return {trace: record["changes"] for trace, record in records.items()}


def _baseline(records: list[dict[str, Any]], name: str, key: str) -> dict[str, float]:
    """One number of the baseline by trace [s]; of published runs only the average completion time is known."""
    if name != "published":
        return {record["trace"]: record[key] for record in records if record["system"] == name}
    if key != "avg_jct_s":
        return {}
    averages = json.loads((DATA / "published" / "pollux-1.0.json").read_text())["avgs"]
    return {record["trace"]: averages[Path(record["trace"]).stem] for record in records}


if __name__ == "__main__":
    main()
