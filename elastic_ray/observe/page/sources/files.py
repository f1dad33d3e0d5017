"""SHELL: page of runs read from their directories, for which no cluster is needed."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence

import pyarrow.fs

from elastic_ray.checkpoints.run_directory import EVENTS_FILE, RunStorage, resolve
from elastic_ray.events import JobEvent, Report
from elastic_ray.observe.page.source import StoredPage
from elastic_ray.observe.page.stored_runs import StoredRun, stored_page
from placement.errors import InputError
from placement.text import clipped

MOST_RUNS = 1000
MOST_EVENTS, MOST_REPORTS = 5000, 600
_DEPTH = 3  # a sweep's trials lie in directories of their own
_NOT_RUNS = re.compile(r"checkpoint_\d+|automatic|reports|tensorboard|\..*")


class RunFiles(StoredPage):
    """Page of all runs under a path, or of one run if the path is its directory.

    Args:
        path: A URI or a local path, as in ``RunConfig(storage_path)``.
    """

    def __init__(self, path: str) -> None:
        try:
            filesystem, root = resolve(path, None)
            found = run_folders(filesystem, root)
            newest, left_out = sorted(folder for _, folder in found[:MOST_RUNS]), max(0, len(found) - MOST_RUNS)
            runs, unread = _read_all(filesystem, newest, root)
        except (OSError, ValueError) as error:
            raise InputError(f"storage path {path!r} cannot be read: {error}") from error
        if not runs:
            raise InputError(
                f"storage path {path!r} must hold the directory of a run, one with {EVENTS_FILE}, but has none"
            )
        problem = f"{left_out} older runs are left out: give a path further down" if left_out else ""
        problem = "; ".join(filter(None, [problem, unread]))
        super().__init__(*stored_page(path, runs, problem=problem))


def run_folders(filesystem: pyarrow.fs.FileSystem, root: str) -> list[tuple[int, str]]:
    """Return the run directories at and under ``root``, with the time of each run's last event [ns], newest first."""
    found: list[tuple[int, str]] = []
    level = [root]
    for _ in range(_DEPTH + 1):
        below: list[str] = []
        for folder in level:
            try:
                entries = filesystem.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True))
            except PermissionError:
                if folder == root:
                    raise
                continue
            events = [entry for entry in entries if entry.is_file and posixpath.basename(entry.path) == EVENTS_FILE]
            if events:
                found.append((events[0].mtime_ns or 0, folder))
                continue
            below += _subfolders(entries)
        level = below
    return sorted(found, reverse=True)


def _subfolders(entries: Sequence[pyarrow.fs.FileInfo]) -> Iterator[str]:
    for entry in entries:
        if entry.type == pyarrow.fs.FileType.Directory and not _NOT_RUNS.fullmatch(posixpath.basename(entry.path)):
            yield entry.path


def _read_all(filesystem: pyarrow.fs.FileSystem, folders: Sequence[str], root: str) -> tuple[list[StoredRun], str]:
    """Return all readable runs, and a message about the others; raises if runs exist but none is readable."""
    runs: list[StoredRun] = []
    failed: list[Exception] = []
    for folder in folders:
        try:
            runs.append(_read(filesystem, folder, root))
        except (OSError, ValueError, ArithmeticError) as error:  # of another user, or no run's file
            failed.append(error)
    if failed and not runs:
        raise failed[0]
    return runs, f"{len(failed)} runs could not be read ({clipped(str(failed[0]), 200)})" if failed else ""


def _read(filesystem: pyarrow.fs.FileSystem, folder: str, root: str) -> StoredRun:
    storage = RunStorage(folder, filesystem)
    name = posixpath.relpath(folder, root) if folder != root else posixpath.basename(root)
    events: tuple[JobEvent, ...] = storage.read_events(MOST_EVENTS)
    reports: tuple[Report, ...] = storage.last_reports(0, MOST_REPORTS)
    return StoredRun(job=name, where=storage.where, events=events, reports=reports)
