"""SHELL: runs as their directories tell of them, the cluster gone or not."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence

import pyarrow.fs

from elastic_ray.checkpoints.run_directory import EVENTS_FILE, RunStorage, resolve
from elastic_ray.events import JobEvent, Report
from elastic_ray.observe.page.sources.stored import StoredPage
from elastic_ray.observe.page.stored_runs import StoredRun, stored_page
from placement.errors import InputError

MOST_RUNS = 1000
MOST_EVENTS, MOST_REPORTS = 5000, 600
_DEPTH = 3  # a sweep's trials lie in directories of their own
_NOT_RUNS = re.compile(r"checkpoint_\d+|automatic|reports|tensorboard|\..*")


class RunFiles(StoredPage):
    """All runs under a path, or the one that it is the directory of.

    Args:
        path: a URI or a local path, as ``RunConfig(storage_path)`` has it.

    Raises:
        InputError: it cannot be read, or there is no run.
    """

    def __init__(self, path: str) -> None:
        try:
            filesystem, root = resolve(path, None)
            runs = [_read(filesystem, each, root) for each in _directories(filesystem, root, _DEPTH)]
        except (OSError, ValueError) as error:
            raise InputError(f"storage path {path!r} cannot be read: {error}") from error
        if not runs:
            raise InputError(
                f"storage path {path!r} must hold the directory of a run, one with {EVENTS_FILE}, but has none"
            )
        super().__init__(*stored_page(path, runs))


def _directories(filesystem: pyarrow.fs.FileSystem, root: str, depth: int) -> list[str]:
    """Directories of runs from here on, at most so deep and so many."""
    found: list[str] = []
    level = [root]
    for _ in range(depth + 1):
        below: list[str] = []
        for folder in level:
            entries = filesystem.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True))
            if any(posixpath.basename(entry.path) == EVENTS_FILE for entry in entries):
                found.append(folder)
                continue
            below += _subfolders(entries)
        level = below
    return sorted(found)[:MOST_RUNS]


def _subfolders(entries: Sequence[pyarrow.fs.FileInfo]) -> Iterator[str]:
    for entry in entries:
        if entry.type == pyarrow.fs.FileType.Directory and not _NOT_RUNS.fullmatch(posixpath.basename(entry.path)):
            yield entry.path


def _read(filesystem: pyarrow.fs.FileSystem, folder: str, root: str) -> StoredRun:
    storage = RunStorage(folder, filesystem)
    name = posixpath.relpath(folder, root) if folder != root else posixpath.basename(root)
    events: tuple[JobEvent, ...] = storage.read_events()[-MOST_EVENTS:]
    reports: tuple[Report, ...] = storage.last_reports(0, MOST_REPORTS)
    return StoredRun(job=name, where=storage.where, events=events, reports=reports)
