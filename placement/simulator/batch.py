"""Batch of simulations: several processes, a progress line, one JSON file."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from placement.autoscaling.objectives import make_objective
from placement.checks import check_number
from placement.cluster.jobs import SpotUse
from placement.cluster.price_table import PriceTable
from placement.errors import InputError
from placement.policies import Policy, make_policy
from placement.simulator.engine import simulate
from placement.simulator.nodes.clusters import gpu_types, parse_cluster
from placement.simulator.nodes.disturbances import Disturbances
from placement.simulator.nodes.provider import AutoscaledCluster
from placement.simulator.results.report import SimulationReport
from placement.simulator.workloads.lengths import Lengths
from placement.simulator.workloads.profiles import load_profiles
from placement.simulator.workloads.traces import read_trace
from placement.simulator.world.rules import make_rules


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One simulation to run: a trace under one policy, with the arguments of ``simulate``."""

    trace: str
    profiles: str
    cluster: str
    rules: str
    policy: str | Policy
    seed: int = 0
    knowledge: bool = False
    lengths: Lengths = dataclasses.field(default_factory=Lengths)
    disturbances: Disturbances = dataclasses.field(default_factory=Disturbances)
    prices: PriceTable = dataclasses.field(default_factory=PriceTable)
    autoscale: AutoscaledCluster | None = None
    statistical: bool = True
    spot_use: SpotUse = "prefer"
    apart: bool | None = False

    def check(self) -> None:
        """Check all input before anything runs.

        Raises:
            InputError: The input is invalid.
            ValueError: The policy is unknown.
        """
        nodes = parse_cluster(self.cluster)
        types = gpu_types(nodes)
        self.disturbances.check(make_rules(self.rules), nodes)
        self.prices.rates(types)
        if self.autoscale is not None:
            self.autoscale.check(make_rules(self.rules), self.disturbances)
            make_objective(self.autoscale.objective)
        make_policy(self.policy)
        read_trace(self.trace, load_profiles(self.profiles, types))


def run_all(tasks: Sequence[Task], *, processes: int | None = None, progress: bool = False) -> list[SimulationReport]:
    """Run simulations in parallel and return their reports in the order of the tasks.

    All input is checked before anything runs.

    Raises:
        InputError: The input of some task is invalid.
        ValueError: A policy is unknown.
    """
    if processes is not None:
        check_number("processes", processes, least=1, error=InputError)
    for task in tasks:
        task.check()
    workers = min(processes or os.cpu_count() or 1, len(tasks))
    with _ProgressBar(len(tasks), shown=progress) as bar:
        if workers <= 1:
            return [bar.done(run(task)) for task in tasks]
        # Spawned, not forked: threads of NumPy's linear algebra do not survive a fork.
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            futures = [pool.submit(run, task) for task in tasks]
            for future in concurrent.futures.as_completed(futures):
                bar.done(future.result())
            return [future.result() for future in futures]


def run(task: Task) -> SimulationReport:
    """Run one simulation."""
    return simulate(**{field.name: getattr(task, field.name) for field in dataclasses.fields(task)})


class _ProgressBar:
    """Progress bar of finished simulations, on standard error."""

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
    """Return the mean of every number over all traces, one record per policy; empty with a single trace."""
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
    """Write one record per trace and policy. The file is replaced atomically."""
    text = json.dumps([{**report.record(), **report.history()} for report in reports], indent=1)
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise InputError(f"json must be a file that can be written, but {path}: {error}") from error
