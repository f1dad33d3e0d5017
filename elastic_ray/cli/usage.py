"""``elastic-ray usage``: hours and cost of runs, computed from their files."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence

import click

from elastic_ray.cli.output import json_option, say, show_json, show_table
from elastic_ray.record.usage import DIMENSIONS, UsageRow, total
from elastic_ray.record.usage import usage as usage_of


@click.command(short_help="Show hours and cost by user, tenant, job and week.")
@click.argument("path", required=False, metavar="[STORAGE_PATH]")
@click.option(
    "--by",
    multiple=True,
    type=click.Choice(DIMENSIONS),
    help="Sum over all that agree in these; by default user and tenant, with --json all four.",
)
@json_option
def usage(path: str | None, by: Sequence[str], as_json: bool) -> None:
    """Show GPU-hours and costs for all runs under STORAGE_PATH, both running and ended.

    STORAGE_PATH is the same as in RunConfig(storage_path); the default is Ray's, ~/ray_results. No cluster is needed.
    Costs are known only for jobs whose cluster had prices (AllocatorConfig(autoscaling=Autoscaling(...))).
    """
    by = by or (DIMENSIONS if as_json else ("user", "tenant"))
    rows, unread = _read(path)
    rows = total(rows, by)
    if as_json:
        show_json(rows)
    else:
        columns = (*(name.upper() for name in by), "GPU-HOURS", "CPU-HOURS", "WORKER-HOURS", "USD")
        show_table(columns, [_cells(row, by) for row in rows], empty="no run has had workers")
    for problem in unread:
        say(problem, err=True)


def _cells(row: UsageRow, by: Sequence[str]) -> tuple[str, ...]:
    cost = "" if row.cost_usd is None else f"{row.cost_usd:.2f}"
    hours = (f"{each:.2f}" for each in (row.gpu_hours, row.cpu_hours, row.worker_hours))
    return (*(str(getattr(row, name)) or "-" for name in by), *hours, cost)


def _read(path: str | None) -> tuple[list[UsageRow], list[str]]:
    """Return the usage rows of all runs under a path (None: Ray's own), and messages about runs that cannot be read."""
    import pyarrow.fs

    from elastic_ray.checkpoints.run_directory import RunStorage, resolve
    from elastic_ray.observe.page.sources.files import closed_folders, run_folders

    rows, unread = list[UsageRow](), list[str]()
    default = os.environ.get("RAY_AIR_LOCAL_CACHE_DIR") or os.path.expanduser("~/ray_results")
    where = default if path is None else path
    try:
        filesystem, root = resolve(where, None)
        if path is not None and filesystem.get_file_info(root).type == pyarrow.fs.FileType.NotFound:
            raise FileNotFoundError("it does not exist")
        folders, closed = run_folders(filesystem, root)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"storage path {where!r} cannot be read: {error}") from error
    for _, folder in folders:
        job = posixpath.relpath(folder, root) if folder != root else posixpath.basename(root)
        storage = RunStorage(folder, filesystem)
        try:
            rows += usage_of(job, storage.read_events(), storage.last_written_s())
        except (OSError, ValueError, ArithmeticError) as error:  # of another user, or no run's file
            unread.append(f"{storage.where} cannot be read: {error}")
    unread += [closed_folders(closed)] if closed else []
    return rows, unread
