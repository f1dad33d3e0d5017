"""What wrong declarations bring who makes them, and cost the others, in the simulator.

A third of each application's jobs are one user's, the others another's. That user declares a third of the truth
("third"), that each epoch is the last ("epoch"), or honestly the present one of five stages ("staged"); "sigma" has
log-normal errors of sigma 1.0 in all declarations. Each third is that user's once, so that figures are not those of a
single long job. "placebo" declares the truth, and every job arrives up to five seconds later: what a trace differs by
for nothing.
Sia's rules, 16 x 4 T4, shared knowledge. Each scenario is compared with the same trace when all declare the truth.

``--records FILE`` keeps what was run, so that a long run can be cut into pieces; figures are of all records.

Bars: who lies gains at most 2 %, the others lose at most 3 %, and so do loops in stages; errors of sigma 1.0 cost at
most 6 %.
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
from placement.simulator.workloads.traces import Lengths
from placement.simulator.world.job import SimulatedJob

CLUSTER = "aws:16x4"
SCENARIOS = ("truth", "third", "epoch", "staged", "sigma", "placebo")
_TURNED = ("third", "epoch", "staged")
_STAGES = 5


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
    stages: int | None = None  # in which they declare their length, one after the other; 0 for each epoch by itself

    def view(self) -> TraceJobView:
        """Return the view, with the user, and the end of its present stage where it declares these."""
        view = super().view()
        liar = self.name in self.liars
        if liar and self.stages is not None and view.progress is not None:
            stage = max(self.app.epochs / self.stages, 1.0) if self.stages else 1.0
            told = stage * (len(view.progress.epoch_ends) // stage + 1.0)
            view = dataclasses.replace(view, progress=dataclasses.replace(view.progress, epochs=told))
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
        print(row["trace"], row["scenario"], f"{row['average [h]']:.4f} h", flush=True)
        if options.records:
            with options.records.open("a") as file:
                file.write(json.dumps(row) + "\n")
    table = list(_compared(rows))
    finish("declared lengths", rows=table, bars=_bars(table))


def _run(traces: Sequence[str], scenarios: Sequence[str]) -> Iterator[dict[str, Any]]:
    for trace in traces:
        path = DATA / "workloads" / f"{trace}.csv"
        # Who declares is turned round, so that each job is once among those who do not tell the truth.
        for scenario, turn in [(each, turn) for each in scenarios for turn in range(3 if each in _TURNED else 1)]:
            liars = _third(path, turn)
            OwnedJob.liars, OwnedJob.stages = liars, {"epoch": 0, "staged": _STAGES}.get(scenario)
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


def _third(path: Path, turn: int) -> frozenset[str]:
    """Return each third job of each application, from one of the first three on."""
    seen: collections.Counter[str] = collections.Counter()
    found = []
    for line in path.read_text().splitlines()[1:]:
        name, _, application, *_ = line.split(",")
        seen[application] += 1
        if seen[application] % 3 == turn:
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
        found: dict[str, dict[str, list[tuple[float, float]]]] = {}  # by trace and who: (when all is true, here) [s]
        for row in (row for row in rows if row["scenario"] == scenario and row["trace"] in truth):
            pairs = found.setdefault(row["trace"], {"liar": [], "honest": []})
            for job, jct_s in row["jct_s"].items():
                pairs["liar" if job in row["liars"] else "honest"].append((truth[row["trace"]][job], jct_s))
        ratios = {trace: _ratios(pairs) for trace, pairs in found.items()}
        for trace, each in ratios.items():
            yield {"scenario": scenario, "trace": trace, **each}
        if ratios:
            mean = {key: statistics.fmean(each[key] for each in ratios.values()) for key in next(iter(ratios.values()))}
            yield {"scenario": scenario, "trace": "mean", **mean}


def _ratios(pairs: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, float]:
    sums = {f"{who}s": sum(b for _, b in each) / sum(a for a, _ in each) for who, each in pairs.items()}
    medians = {f"a {who}, median": statistics.median(b / a for a, b in each) for who, each in pairs.items()}
    return sums | medians


def _bars(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    means = {row["scenario"]: row for row in table if row["trace"] == "mean"}
    found = []
    for scenario, said in (("third", "a third is declared"), ("epoch", "each epoch is declared the last")):
        if scenario in means:
            found.append(bar(f"{said}: who does", value=means[scenario]["liars"], limit=0.98, at_least=True))
            found.append(bar(f"{said}: the others", value=means[scenario]["honests"], limit=1.03, at_least=False))
    if "staged" in means:
        found.append(bar("declared in stages: who does", value=means["staged"]["liars"], limit=1.03, at_least=False))
    if "sigma" in means:
        both = (means["sigma"]["liars"] + 2 * means["sigma"]["honests"]) / 3
        found.append(bar("errors of sigma 1.0", value=both, limit=1.06, at_least=False))
    return found


if __name__ == "__main__":
    main()
