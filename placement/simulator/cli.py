"""The command line: arguments in, a table, a JSON file and a picture out."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from placement.allocator.snapshot import Trigger
from placement.cluster.price_table import PriceTable, read_prices
from placement.errors import InputError
from placement.policies import POLICIES
from placement.simulator.batch import Task, mean_records, run_all, write_json
from placement.simulator.options import (
    APART,
    add_apart,
    add_autoscaling,
    add_disturbances,
    add_facts,
    autoscaling,
    disturbances,
    lengths,
)
from placement.simulator.world.rules import RULES

_PROG = "python -m placement.simulator"
_POLICY_HELP = f"comma-separated, of {', '.join(sorted(POLICIES))}; or your own, module:name or path/to/file.py:name"


def parser(prog: str = _PROG) -> argparse.ArgumentParser:
    """The arguments of ``python -m placement.simulator``."""
    made = argparse.ArgumentParser(prog=prog, description=__doc__)
    made.add_argument("--trace", nargs="+", required=True, metavar="FILE", help="CSV files of jobs")
    made.add_argument("--profiles", required=True, metavar="DIR", help="folder with one folder per application")
    made.add_argument("--cluster", required=True, help="such as aws:16x4 or aws:6x4,rtx:3x8,dgx-ext:2x8")
    made.add_argument("--rules", default="pollux", choices=sorted(RULES), help="whose rules of time and cost")
    made.add_argument("--policy", default="goodput", help=_POLICY_HELP)
    made.add_argument("--seed", type=int, default=0, help="of everything random")
    made.add_argument("--json", metavar="OUT", help="write one record per trace and policy")
    made.add_argument("--plot", metavar="OUT.png", help="draw the allocation over time of every trace and policy")
    made.add_argument("--prices", metavar="FILE", help="CSV or JSON: type, on_demand, spot [USD per GPU-hour]")
    made.add_argument("--processes", type=int, default=None, help="simulations at a time; by default one per core")
    made.add_argument("--quiet", action="store_true", help="no progress")
    add_facts(made.add_argument_group("what a policy may know"))
    add_apart(made.add_argument_group("what the allocator sees to"))
    add_autoscaling(made.add_argument_group("a cluster whose size follows the jobs (with --rules live)"))
    add_disturbances(made.add_argument_group("what goes wrong (all but --noise: with --rules live)"))
    return made


def main(arguments: Sequence[str] | None = None, prog: str = _PROG) -> int:
    """Run; returns the exit status: 0, or 2 for bad input, with one line that says what is wrong."""
    options = parser(prog).parse_args(arguments)
    try:
        return _run(options)
    except (InputError, ValueError, TypeError) as error:
        print(f"placement.simulator: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    """Exit status 0, after each trace was simulated under each policy, and printed, written and drawn as asked."""
    policies = [name.strip() for name in options.policy.split(",") if name.strip()]
    if not policies:
        raise InputError("policy must name one policy or more, but got none")
    if options.plot:
        from placement.simulator.results.plot import check_picture

        check_picture(Path(options.plot))  # before hours of simulation, not after
    common = Task(
        trace="",
        policy="",
        profiles=options.profiles,
        cluster=options.cluster,
        rules=options.rules,
        seed=options.seed,
        knowledge=options.shared_knowledge,
        lengths=lengths(options),
        disturbances=disturbances(options),
        prices=read_prices(options.prices) if options.prices else PriceTable(),
        autoscale=autoscaling(options),
        spot_use=options.spot_use,
        apart=APART[options.apart],
    )
    tasks = [dataclasses.replace(common, trace=trace, policy=policy) for trace in options.trace for policy in policies]
    for target in filter(None, (options.json, options.plot)):
        if not Path(target).resolve().parent.is_dir():
            raise InputError(f"{target} must be in a folder that is there, but {Path(target).parent} is not")
    reports = run_all(tasks, processes=options.processes, progress=not options.quiet)
    print(table([report.record() for report in reports]))
    for report in reports:
        refused = [record.reason for record in report.log if record.trigger is Trigger.REFUSED]
        if refused:
            print(f"{report.trace}: {len(refused)} decisions were refused, the first: {refused[0]}", file=sys.stderr)
    if options.json:
        write_json(reports, Path(options.json))
    if options.plot:
        from placement.simulator.results.plot import plot

        plot(reports, Path(options.plot))
    return 0


def table(records: Sequence[dict[str, object]]) -> str:
    """Records side by side, and the mean of each policy over several traces."""
    columns = [
        ("trace", "trace", "{}"),
        ("policy", "policy", "{}"),
        ("avg h", "avg_jct_s", "{:.3f}"),
        ("median h", "median_jct_s", "{:.3f}"),
        ("p99 h", "p99_jct_s", "{:.2f}"),
        ("makespan h", "makespan_s", "{:.2f}"),
        ("GPU-h", "gpu_hours", "{:.0f}"),
        ("use %", "utilisation", "{:.0%}"),
        ("changes/job", "restarts_per_job", "{:.2f}"),
        ("rho>2", "rho_above_2", "{:.1%}"),
        ("USD", "cost_usd", "{:.0f}"),
        ("rent USD", "rented_usd", "{:.0f}"),
        ("decision ms", "decision_ms_mean", "{:.1f}"),
        ("max", "decision_ms_max", "{:.1f}"),
    ]
    shown = [*records, *mean_records(records)]
    rows = [[title for title, _, _ in columns]]
    for record in shown:
        row = []
        for title, key, form in columns:
            value = record[key]
            if key == "trace":
                value = "/".join(Path(str(value)).parts[-2:])
            elif title.endswith(" h"):
                value = float(str(value)) / 3600.0
            row.append(form.format(value))
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    aligned = [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in aligned)
