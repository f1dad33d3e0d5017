"""``elastic-ray status``: shows one job or sweep."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import click

from elastic_ray.cli.jobs import read_rows, read_snapshot, show_events
from elastic_ray.cli.listings import SHORT_ID, JobRow, Submission, comes_from, ended_row, job_rows, outlook_lines
from elastic_ray.cli.output import job_argument, json_option, say, show_json, show_table
from elastic_ray.cli.sweeps import TRIAL_COLUMNS, best_first, called, grouped, sweep_status, sweeps_of, trial_cells
from elastic_ray.driver.display import status_line
from placement.text import ago

if TYPE_CHECKING:
    from placement.allocator.snapshot import CoreSnapshot


@click.command(short_help="Show one job, or a sweep.")
@job_argument
@click.option("--events", "last", default=5, show_default=True, type=click.IntRange(min=0), help="Events to show.")
@json_option
def status(job: str, last: int, as_json: bool) -> None:
    """Show a job, the nodes its workers run on, and the reason for its size. Exit code 1 if the job has failed.

    For a sweep, show the trials that are running or ended within the last hour, best first.
    """
    from elastic_ray.cli import cluster
    from elastic_ray.cli import submission as ray_jobs

    seen, problem = read_snapshot()
    if problem:
        say(f"warning: {problem}", err=True)
    if trials := _trials_of(job, seen):
        _show_sweep(trials, as_json)
        return
    if not cluster.find_jobs(job):
        ended, script = cluster.ended_job(job), ray_jobs.find(job)
        if ended is not None and (script is None or script.ended):  # else its name is in use again
            _show_ended(ended_row(ended), as_json)
            return
        if script is None:
            raise cluster.not_found(job, [each.job for each in cluster.known_jobs()])
        _show_script(script, as_json)
        return
    found = cluster.find_job(job)
    name = found.answers.job
    (row,) = job_rows([found.answers], _only(seen, name))
    members, events, why = found.workers(), found.events(), None if problem else cluster.explain(name)
    if as_json:
        latest = events[len(events) - min(last, len(events)) :]
        show_json({"job": row, "workers": members, "events": latest, "explanation": why})
    else:
        if found.answers.status is not None:
            say(status_line(found.answers.status))
        for line in outlook_lines(row):
            say(f"  {line}")
        for worker in members:
            say(f"  rank {worker.rank}: process {worker.pid} on node {worker.node[:SHORT_ID]}")
        if not problem:
            say(str(why) if why is not None else "the allocator has not heard of it")
        say(f"results: {row.storage_path}")
        show_events(name, events[len(events) - min(last, len(events)) :])
    if row.failed:
        raise click.exceptions.Exit(1)


def _trials_of(name: str, seen: CoreSnapshot | None) -> list[JobRow]:
    """Return the trials of the sweep with this name, or of the only sweep started by the submission ``name``."""
    rows = read_rows(seen)
    if any(row.job == name for row in rows):
        return []
    sweeps = sweeps_of(rows)
    submitted = [rows for rows in sweeps.values() if all(comes_from(row.submission, name) for row in rows)]
    return sweeps.get(name) or (submitted[0] if len(submitted) == 1 else [])


def _show_sweep(trials: list[JobRow], as_json: bool) -> None:
    """Print a sweep and its trials."""
    ranked, names = best_first(trials), called(trials)
    (row,) = (each for each in grouped(trials) if each.phase == "sweep")
    if as_json:
        show_json({"sweep": sweep_status(row.job, trials), "trials": ranked})
        return
    say(f"sweep {row.job}: {row.message}")
    cells = [trial_cells(each, names.get(each.job, "")) for each in ranked]
    show_table(TRIAL_COLUMNS, cells, empty="no trials")


def _show_ended(row: JobRow, as_json: bool) -> None:
    """Print a job that ended within the last hour."""
    if as_json:
        show_json({"job": row, "workers": (), "events": (), "explanation": None})
    else:
        ended_s, begun_s = row.ended_s or 0.0, row.submitted_s or 0.0
        when = f"{row.phase} {ago(time.time() - ended_s)} ago, after {ago(ended_s - begun_s)}"
        say(f"job {row.job}: {when}: {row.message}")
        for name, value in row.metrics.items():
            say(f"  {name}: {value}")
        for line in outlook_lines(row):
            say(f"  {line}")
        say(f"results: {row.storage_path}")
        if row.checkpoint:
            say(f"checkpoint: {row.checkpoint}")
    if row.failed:
        raise click.exceptions.Exit(1)


def _only(snapshot: Any, job: str) -> Any:
    """Return the snapshot reduced to one job; None if there is no snapshot."""
    if snapshot is None:
        return None
    return dataclasses.replace(snapshot, jobs={name: each for name, each in snapshot.jobs.items() if name == job})


def _show_script(script: Submission, as_json: bool) -> None:
    if as_json:
        show_json({"submission": script})
    else:
        say(f"submission {script.submission}: {script.phase}, no job of it runs. {script.message}".rstrip())
        say(f"command: {script.entrypoint}")
    if script.status == "FAILED":
        raise click.exceptions.Exit(1)
