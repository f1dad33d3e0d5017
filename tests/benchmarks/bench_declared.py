"""What wrong declarations bring who makes them, and cost the others, in the simulator.

A third of each application's jobs are one user's, the others another's. That user declares a third of the truth
("third"), or that each epoch is the last ("epoch"); "sigma" has log-normal errors of sigma 1.0 in all declarations.
"placebo" declares the truth, and every job arrives up to five seconds later: what a trace differs by for nothing.
Sia's rules, 16 x 4 T4, shared knowledge. Each scenario is compared with the same trace when all declare the truth.

``--records FILE`` keeps what was run, so that a long run can be cut into pieces; figures are of all records.

Bars: who declares a third gains at most 2 %, the others lose at most 3 %; errors of sigma 1.0 cost at most 6 %.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_allocation import DATA
from common import bar, finish, side_parser

from placement.cluster.jobs import TraceJobView
from placement.simulator import engine as simulation
from placement.simulator import simulate
from placement.simulator.workloads.lengths import Lengths
from placement.simulator.world.job import SimulatedJob

CLUSTER = "aws:16x4"
SCENARIOS = ("truth", "third", "epoch", "sigma", "placebo")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Declared(Lengths):
    """Lengths of which some jobs declare a part."""

    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by job; 0 for an epoch more than are done

    def declaration(self, epochs: int, job: str, seed: int) -> float | None:
        """Return epochs that the job declares."""
        told = Lengths.declaration(self, epochs, job, seed)
        return None if told is None else max(told * self.parts.get(job, 1.0), 1e-3)


class OwnedJob(SimulatedJob):
    """A simulated job with a user."""

    liars: frozenset[str] = frozenset()
    endless = False

    def view(self) -> TraceJobView:
        """Return the view, with the user, and one epoch more than it has done where it says so each time."""
        view = super().view()
        liar = self.name in self.liars
        if liar and self.endless and view.progress is not None:
            done = len(view.progress.epoch_ends) + 1.0
            view = dataclasses.replace(view, progress=dataclasses.replace(view.progress, epochs=done))
        return dataclasses.replace(view, user="liar" if liar else "honest")


def main() -> None:
    """Run the scenarios on the traces, one line each, then print figures and bars of all records."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--traces", nargs="*", default=["sia-philly/workload-3", "sia-saturn/workload-3"])
    parser.add_argument("--scenarios", nargs="*", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--records", type=Path, help="JSON lines: what an earlier run found is read, new is added")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.records and options.records.exists():
        rows = [json.loads(line) for line in options.records.read_text().splitlines()]
    for row in _run(options.traces[: 1 if options.quick else None], options.scenarios):
        rows.append(row)
        print({**row, "jct_s": len(row["jct_s"])}, flush=True)
        if options.records:
            with options.records.open("a") as file:
                file.write(json.dumps(row) + "\n")
    table = list(_compared(rows))
    finish("declared lengths", rows=table, bars=_bars(table))


def _run(traces: Sequence[str], scenarios: Sequence[str]) -> Iterator[dict[str, Any]]:
    for trace in traces:
        path = DATA / "workloads" / f"{trace}.csv"
        liars = _third(path)
        for scenario in scenarios:
            OwnedJob.liars, OwnedJob.endless = liars, scenario == "epoch"
            setattr(simulation, "SimulatedJob", OwnedJob)  # noqa: B010  # its jobs have no users
            lengths = Declared(
                parts=dict.fromkeys(liars, 1 / 3) if scenario == "third" else {},
                error=1.0 if scenario == "sigma" else 0.0,
            )
            jobs = _jittered(path) if scenario == "placebo" else path
            report = simulate(jobs, DATA / "profiles", CLUSTER, rules="sia", knowledge=True, lengths=lengths)
            yield {
                "trace": trace,
                "scenario": scenario,
                "liars": sorted(liars),
                "average [h]": report.avg_jct_s / 3600,
                "jct_s": {job.job: round(job.jct_s) for job in report.jobs},
            }


def _third(path: Path) -> frozenset[str]:
    """Return each third job of each application."""
    seen: collections.Counter[str] = collections.Counter()
    found = []
    for line in path.read_text().splitlines()[1:]:
        name, _, application, *_ = line.split(",")
        seen[application] += 1
        if seen[application] % 3 == 0:
            found.append(name)
    return frozenset(found)


def _jittered(path: Path) -> Path:
    header, *lines = path.read_text().splitlines()
    random.seed(0)
    moved = []
    for line in lines:
        name, time_s, *rest = line.split(",")
        moved.append(",".join([name, str(int(float(time_s)) + random.randint(0, 5)), *rest]))
    moved.sort(key=lambda line: int(line.split(",")[1]))
    (target := Path("/tmp") / f"jittered-{path.parent.name}-{path.name}").write_text("\n".join([header, *moved]) + "\n")
    return target


def _compared(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield for each scenario and trace, and for all traces, what changed for whom: sums, and medians of the jobs."""
    truth = {row["trace"]: row["jct_s"] for row in rows if row["scenario"] == "truth"}
    for scenario in SCENARIOS[1:]:
        changes: dict[str, list[dict[str, float]]] = {"liar": [], "honest": []}
        for row in (row for row in rows if row["scenario"] == scenario and row["trace"] in truth):
            found = {}
            for who in changes:
                jobs = [job for job in row["jct_s"] if (job in row["liars"]) == (who == "liar")]
                before, after = ([jct[job] for job in jobs] for jct in (truth[row["trace"]], row["jct_s"]))
                each = statistics.median(b / a for a, b in zip(before, after, strict=True))
                changes[who].append({"sum": sum(after) / sum(before), "job": each})
                found |= {f"{who}s": changes[who][-1]["sum"], f"a {who}, median": each}
            yield {"scenario": scenario, "trace": row["trace"], **found}
        if changes["liar"]:
            mean = {
                title: statistics.mean(each[part] for each in changes[who])
                for who in changes
                for title, part in ((f"{who}s", "sum"), (f"a {who}, median", "job"))
            }
            yield {"scenario": scenario, "trace": "mean", **mean}


def _bars(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    means = {row["scenario"]: row for row in table if row["trace"] == "mean"}
    found = []
    if "third" in means:
        found.append(bar("a third is declared: who does", value=means["third"]["liars"], limit=0.98, at_least=True))
        found.append(bar("the others", value=means["third"]["honests"], limit=1.03, at_least=False))
    if "sigma" in means:
        both = (means["sigma"]["liars"] + 2 * means["sigma"]["honests"]) / 3
        found.append(bar("errors of sigma 1.0", value=both, limit=1.06, at_least=False))
    return found


if __name__ == "__main__":
    main()
