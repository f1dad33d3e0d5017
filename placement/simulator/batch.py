"""Batch of simulations: several processes, a progress line, one JSON file."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from placement.checks import check_number
from placement.errors import InputError
from placement.simulator.engine import Task
from placement.simulator.results.report import SimulationReport


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
            return [bar.done(task.run()) for task in tasks]
        # Spawned, not forked: threads of NumPy's linear algebra do not survive a fork.
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            futures = [pool.submit(task.run) for task in tasks]
            for future in concurrent.futures.as_completed(futures):
                bar.done(future.result())
            return [future.result() for future in futures]


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
