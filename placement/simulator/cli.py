"""Command line for the simulator, which prints a table and can write a JSON file and a picture."""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import dataclasses
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from placement.allocator.snapshot import Trigger
from placement.autoscaling.objectives import OBJECTIVES, make_objective
from placement.autoscaling.objectives.cost_per_progress import CostPerProgress
from placement.checks import check_number
from placement.cluster.jobs import SPOT_USES
from placement.cluster.price_table import PriceTable, read_prices
from placement.errors import InputError
from placement.policies import POLICIES
from placement.policies.baselines.boa import BoaPolicy
from placement.simulator.engine import Task
from placement.simulator.nodes.disturbances import Disturbances, SpotTrace, read_spot
from placement.simulator.nodes.provider import AutoscaledCluster
from placement.simulator.results.report import SimulationReport
from placement.simulator.workloads.traces import Lengths
from placement.simulator.world.rules import RULES
from placement.text import plain_table

CLUSTER = "t4:2x4"

_PLACES = ("1", "2", "3", "4", "11", "22", "33", "44")  # workers on each node
_BATCHES = (8, 16, 32, 64)
# Seconds a sample, samples of an epoch, gradient variance over its squared norm: what an application gains by workers.
_APPLICATIONS = {"image": (0.002, 64_000, 4.0), "text": (0.008, 32_000, 16.0)}
_EPOCHS = 6


def write_demo(folder: Path) -> tuple[Path, Path]:
    """Write a demo trace and its job profiles to an empty folder; return the paths of the trace and the profiles."""
    profiles = folder / "profiles"
    for name, (sample_s, samples, variance) in _APPLICATIONS.items():
        placed = [(p, m, *_step_s(len(p), sum(map(int, p)), m, sample_s)) for p in _PLACES for m in _BATCHES]
        _write(profiles / name / "placements-t4.csv", "placement,local_bsz,step_time,sync_time", placed)
        sizes = [(n, r) for n in (3, 4) for r in (n, 4 * n)]
        larger = [(n, r, m, *_step_s(n, r, m, sample_s)) for n, r in sizes for m in _BATCHES]
        _write(profiles / name / "scalability-t4.csv", "num_nodes,num_replicas,local_bsz,step_time,sync_time", larger)
        for batch in (32, 128, 512):
            epochs = [(1000.0 * e, samples // batch * e, 0.1 * e, 1.0 / e, variance) for e in range(1, _EPOCHS + 1)]
            _write(profiles / name / f"validation-{batch}.csv", "progress,iteration,metric,grad_sqr,grad_var", epochs)
    kinds = [("image", "text")[i % 3 == 2] for i in range(16)]
    jobs = [(f"{kind}-{i}", 180 * i, kind, 1 + i % 2, 128) for i, kind in enumerate(kinds)]
    _write(folder / "demo.csv", "name,time,application,num_replicas,batch_size", jobs)
    return folder / "demo.csv", profiles


def _step_s(nodes: int, workers: int, batch: int, sample_s: float) -> tuple[float, float]:
    """Return the time for a step, and for its synchronisation: 10 ms if workers > 1, 20 ms more if nodes > 1 [s]."""
    sync_s = 0.01 * (workers > 1) + 0.02 * (nodes > 1)
    return 0.02 + sample_s * batch + sync_s, sync_s


def _write(path: Path, header: str, rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header.split(","), *rows])


_PROG = "python -m placement.simulator"
_POLICY_HELP = f"comma-separated, of {', '.join(sorted(POLICIES))}; or your own, module:name or path/to/file.py:name"
_TYPED = re.compile(r"(?P<gpu>[A-Za-z][\w-]*)=(?P<file>.+)")
_DISTURBANCES = {
    "node_mtbf_h": ("--mtbf", "HOURS", "mean time between failures of one node"),
    "repair_s": ("--repair", "SECONDS", "until a failed node is back"),
    "slow_every_h": ("--slow-every", "HOURS", "mean time between slow spells of one node"),
    "slow_for_s": ("--slow-for", "SECONDS", "length of a slow spell"),
    "slow_factor": ("--slow-factor", "X", "how many times longer a step takes there"),
    "interference": ("--interference", "PART", "of its speed lost by a job of several nodes that shares one, 0 to 1"),
    "noise": ("--noise", "SIGMA", "of the logarithm of measured step times; with all rules"),
    "spot_offset_h": ("--spot-offset", "HOURS", "where in the spot traces the simulation starts"),
}
"""Option, unit and meaning by field of ``Disturbances``; the defaults are the fields' own."""
_AUTOSCALED = {
    "startup_s": ("--node-startup", "SECONDS", "until a node that was asked for can be used"),
    "notice_s": ("--spot-notice", "SECONDS", "between a spot node's notice and its end"),
}
APART = {"never": False, "measured": None, "always": True}
"""``AllocatorConfig.one_multi_node_job_per_node`` by what ``--apart`` says."""


def parser(prog: str = _PROG) -> argparse.ArgumentParser:
    """Return the argument parser of ``python -m placement.simulator``."""
    made = argparse.ArgumentParser(prog=prog, description=__doc__)
    made.add_argument("--trace", nargs="+", metavar="FILE", help="CSV files of jobs")
    made.add_argument("--profiles", metavar="DIR", help="folder with one folder per application")
    made.add_argument("--cluster", help="such as aws:16x4 or aws:6x4,rtx:3x8,dgx-ext:2x8")
    made.add_argument("--demo", action="store_true", help="a small made-up trace, with profiles and a cluster")
    made.add_argument("--rules", default="pollux", choices=sorted(RULES), help="whose rules of time and cost")
    made.add_argument("--policy", default="goodput", help=_POLICY_HELP)
    made.add_argument("--seed", type=int, default=0, help="of everything random")
    made.add_argument("--json", metavar="OUT", help="write one record per trace and policy")
    made.add_argument("--plot", metavar="OUT.png", help="draw the allocation over time of every trace and policy")
    made.add_argument("--prices", metavar="FILE", help="CSV or JSON: type, on_demand, spot [USD per GPU-hour]")
    made.add_argument("--processes", type=int, default=None, help="simulations at a time; by default one per core")
    made.add_argument("--quiet", action="store_true", help="no progress")
    _add_facts(made.add_argument_group("what a policy may know"))
    apart = "keep jobs of several nodes off each other's: always, or where links are measured to hold two jobs up"
    seen_to = made.add_argument_group("what the allocator sees to")
    seen_to.add_argument("--apart", choices=sorted(APART), default="never", help=apart)
    _add_autoscaling(made.add_argument_group("a cluster whose size follows the jobs (with --rules live)"))
    _add_disturbances(made.add_argument_group("what goes wrong (all but --noise: with --rules live)"))
    return made


def main(arguments: Sequence[str] | None = None, prog: str = _PROG) -> int:
    """Run the simulator; return 0, or 2 for invalid input after printing a one-line error."""
    made = parser(prog)
    options = made.parse_args(arguments)
    try:
        if options.demo:
            return _run_demo(options)
        if missing := [f"--{name}" for name in ("trace", "profiles", "cluster") if not vars(options)[name]]:
            made.error(f"the following arguments are required: {', '.join(missing)}; or --demo")
        return _run(options)
    except (InputError, ValueError, TypeError) as error:
        print(f"placement.simulator: {error}", file=sys.stderr)
        return 2


def _run_demo(options: argparse.Namespace) -> int:
    if options.trace or options.profiles:
        raise InputError("--demo makes its own trace and profiles: leave out either --trace and --profiles, or --demo")
    with tempfile.TemporaryDirectory() as folder:
        trace, profiles = write_demo(Path(folder) / "demo")
        made = {"trace": [str(trace)], "profiles": str(profiles), "cluster": options.cluster or CLUSTER}
        return _run(argparse.Namespace(**{**vars(options), **made}))


def _run(options: argparse.Namespace) -> int:
    """Simulate each trace under each policy; print, write and draw the results; return exit status 0."""
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
        lengths=Lengths(
            declared=options.declare == "epochs", error=options.length_error, spread=options.random_lengths
        ),
        disturbances=Disturbances(
            **{field: getattr(options, field) for field in _DISTURBANCES}, spot=_spot(options.spot)
        ),
        prices=read_prices(options.prices) if options.prices else PriceTable(),
        autoscale=_autoscaled(options),
        spot_use=options.spot_use,
        apart=APART[options.apart],
    )
    chosen = [BoaPolicy(budget_usd_per_h=options.budget) if name == "boa" else name for name in policies]
    tasks = [dataclasses.replace(common, trace=trace, policy=policy) for trace in options.trace for policy in chosen]
    for target in filter(None, (options.json, options.plot)):
        if not Path(target).resolve().parent.is_dir():
            raise InputError(f"{target} must be in an existing folder, but {Path(target).parent} is not")
    reports = run_all(tasks, processes=options.processes, progress=not options.quiet)
    print(table([report.record() for report in reports]))
    for report in reports:
        refused = [record.reason.explained for record in report.log if record.trigger is Trigger.REFUSED]
        if refused:
            print(f"{report.trace}: {len(refused)} decisions were refused, the first: {refused[0]}", file=sys.stderr)
    if options.json:
        write_json(reports, Path(options.json))
    if options.plot:
        from placement.simulator.results.plot import plot

        plot(reports, Path(options.plot))
    return 0


def table(records: Sequence[dict[str, object]]) -> str:
    """Return records (one per trace and policy) as a text table, with each policy's means if there are several."""
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
    rows = []
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
    return plain_table([title for title, _, _ in columns], rows, left=2)


def _add_facts(group: argparse._ArgumentGroup) -> None:
    """Add the options for facts that jobs declare, which every policy sees."""
    whether = "whether jobs declare how many epochs they run"
    group.add_argument("--declare", choices=("none", "epochs"), default="epochs", help=whether)
    _add_number(group, "--length-error", "SIGMA", 0.0, "log-normal, of declared epochs")
    _add_number(group, "--random-lengths", "SIGMA", 0.0, "log-normal, of true epochs")
    shared = "jobs of one application share what they measure"
    group.add_argument("--shared-knowledge", action="store_true", help=shared)


def _add_disturbances(group: argparse._ArgumentGroup) -> None:
    _add_fields(group, Disturbances(), _DISTURBANCES)
    spot = "spot trace (.json counts or .csv events) of all nodes, or of those of one GPU type; may be repeated"
    group.add_argument("--spot", action="append", default=[], metavar="[TYPE=]FILE", help=spot)


def _add_autoscaling(group: argparse._ArgumentGroup) -> None:
    """Add the options for a cluster that is resized to suit the jobs."""
    names = ", ".join(sorted(OBJECTIVES))
    most = f"{names}; --cluster is then the most nodes, --spot offers spot nodes beside them"
    group.add_argument("--autoscale", choices=sorted(OBJECTIVES), metavar="OBJECTIVE", help=most)
    value = CostPerProgress().value_usd_per_h
    worth = f"with cost_per_progress: what an hour less is worth, for each job; {value:g} by default"
    _add_number(group, "--value", "USD", value, worth)
    _add_number(group, "--budget", "USD", None, "with budget or policy boa: average cost of all nodes, an hour")
    _add_fields(group, AutoscaledCluster(), _AUTOSCALED)
    group.add_argument("--spot-use", choices=SPOT_USES, default="prefer", help="how jobs use such spot nodes")


def _add_number(group: argparse._ArgumentGroup, option: str, unit: str, value: float | None, meaning: str) -> None:
    group.add_argument(option, type=float, default=value, metavar=unit, help=meaning)


def _add_fields(group: argparse._ArgumentGroup, defaults: object, fields: Mapping[str, tuple[str, str, str]]) -> None:
    for field, (option, unit, meaning) in fields.items():
        value = getattr(defaults, field)
        said = f"{meaning}; {value:g} by default"
        group.add_argument(option, dest=field, type=float, default=value, metavar=unit, help=said)


def _autoscaled(options: argparse.Namespace) -> AutoscaledCluster | None:
    """Return the autoscaled cluster that the options describe; None without ``--autoscale``."""
    if options.autoscale is None:
        if options.value != CostPerProgress().value_usd_per_h:
            raise InputError("value goes with --autoscale cost_per_progress, but no --autoscale was given")
        if options.budget is not None and "boa" not in options.policy.split(","):
            raise InputError("budget goes with --autoscale budget or --policy boa, but no --autoscale was given")
        return None
    try:
        objective = make_objective(options.autoscale, options.budget)
    except ValueError as error:
        raise InputError(str(error)) from error
    if options.autoscale == "cost_per_progress":
        objective = CostPerProgress(value_usd_per_h=options.value)
    return AutoscaledCluster(objective=objective, startup_s=options.startup_s, notice_s=options.notice_s)


def _spot(values: Sequence[str]) -> dict[str, SpotTrace]:
    """Return spot traces keyed by GPU type ("" for all nodes); raise InputError if a type is given twice."""
    traces: dict[str, SpotTrace] = {}
    for value in values:
        match = _TYPED.fullmatch(value)
        gpu, file = (match["gpu"], match["file"]) if match else ("", value)
        if gpu in traces:
            raise InputError(f"spot must name every GPU type once, but got {gpu or 'all nodes'} twice")
        traces[gpu] = read_spot(file)
    return traces


def run_all(tasks: Sequence[Task], *, processes: int | None = None, progress: bool = False) -> list[SimulationReport]:
    """Check all input, run simulations in parallel, and return their reports in the order of the tasks."""
    if processes is not None:
        check_number("processes", processes, least=1, error=InputError)
    for task in tasks:
        task.check()
    workers = min(processes or os.cpu_count() or 1, len(tasks))
    with _ProgressBar(len(tasks), shown=progress) as bar:
        if workers <= 1:
            return [bar.done(task.run()) for task in tasks]
        # Spawned, not forked: threads of NumPy's linear algebra do not survive a fork.
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            futures = [pool.submit(task.run) for task in tasks]
            for future in concurrent.futures.as_completed(futures):
                bar.done(future.result())
            return [future.result() for future in futures]


class _ProgressBar:
    """Progress bar for finished simulations, on standard error."""

    def __init__(self, total: int, *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
        self._task = self._bar.add_task("simulating", total=total)

    def __enter__(self) -> _ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def done(self, report: SimulationReport) -> SimulationReport:
        """Count a finished simulation on the bar."""
        name = f"{Path(report.trace).stem} {report.policy}: {report.avg_jct_s / 3600:.3f} h on average"
        self._bar.update(self._task, advance=1, description=name)
        return report


def mean_records(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one record per policy with each number's mean over all traces; empty for a single trace."""
    traces = {record["trace"] for record in records}
    if len(traces) < 2:
        return []
    means = []
    for policy in dict.fromkeys(record["policy"] for record in records):
        own = [record for record in records if record["policy"] == policy]
        keys = [key for key, value in own[0].items() if isinstance(value, (int, float))]
        numbers = {key: statistics.fmean(record[key] for record in own) for key in keys}
        means.append({"trace": f"mean of {len(own)}", "policy": policy, **numbers})
    return means


def write_json(reports: Sequence[SimulationReport], path: Path) -> None:
    """Write one record per trace and policy to a file, which is replaced atomically."""
    text = json.dumps([{**report.record(), **report.history()} for report in reports], indent=1)
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise InputError(f"json must be a file that can be written, but {path}: {error}") from error
