"""SHELL: page of runs, read from their directories without a cluster."""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Iterator, Sequence

import pyarrow.fs

from elastic_ray.checkpoints.run_directory import EVENTS_FILE, RunStorage, resolve
from elastic_ray.events import EventKind, JobEvent, Report, TrialFacts, number_in, numbers_in
from elastic_ray.observe.page.history import History
from elastic_ray.observe.page.job_memory import MARKS, pauses, shares_of_time
from elastic_ray.observe.page.model import JobDetail, PageDecision, PageJob, PageNode, PageSnapshot, PageSource, Strip
from elastic_ray.observe.page.rows import trial_cells
from elastic_ray.observe.page.source import StoredPage
from placement.errors import InputError
from placement.palette import colour
from placement.text import clipped, count

_MOST_DECISIONS = 2000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """Contents of one run's directory, which the page summarises."""

    job: str  # name of its directory, from the path that was given on
    where: str
    events: tuple[JobEvent, ...]
    reports: tuple[Report, ...]  # the last ones, oldest first


def stored_page(
    name: str, runs: Sequence[StoredRun], *, problem: str = ""
) -> tuple[PageSnapshot, dict[str, JobDetail]]:
    """Return a page called ``name`` that shows all runs, and the details of each run keyed by job name."""
    history = History()
    ordered = sorted(runs, key=lambda run: (run.events[0].time_s if run.events else 0.0, run.job))
    jobs = tuple(_row(run, colour(number)) for number, run in enumerate(ordered))
    happened = sorted(((e.time_s, run.job, e) for run in runs for e in run.events), key=lambda each: each[:2])
    decisions = []
    for number, (time_s, job, event) in enumerate(happened, start=1):
        if event.kind in MARKS:
            history.mark(time_s, job, MARKS[event.kind], clipped(event.reason))
        if event.from_workers != event.to_workers or event.kind is EventKind.FINISHED:
            history.place(time_s, job, {job: event.to_workers} if event.to_workers else {}, number)
            history.measure(time_s, history.slots, None, None)
            decisions.append(_decision(number, job, event))
    nodes = tuple(
        PageNode(node=run.job, label=run.job, slots=max([1, *(e.to_workers for e in run.events)])) for run in ordered
    )
    last_s = happened[-1][0] if happened else 0.0
    for run in runs:
        if (
            run.events and run.events[-1].kind is not EventKind.FINISHED
        ):  # its files end here, and so does what is known
            history.place(run.events[-1].time_s, run.job, {}, 0)
    snapshot = PageSnapshot(
        time_s=last_s,
        source=PageSource(kind="files", name=name, problem=problem),
        strip=Strip(),
        jobs=jobs,
        nodes=nodes,
        decisions=tuple(decisions[-_MOST_DECISIONS:]),
        bars=history.bars,
        marks=history.marks,
        use=history.use,
    )
    return snapshot, {run.job: _detail(run, last_s) for run in runs}


def _decision(number: int, job: str, event: JobEvent) -> PageDecision:
    """Return an event that changed a job's size as a line for the decision log."""
    return PageDecision(
        number=number,
        time_s=event.time_s,
        trigger=event.kind.value,
        job=job,
        before=event.from_workers,
        after=event.to_workers,
        reason=clipped(event.reason),
    )


def _row(run: StoredRun, ink: str) -> PageJob:
    """Return the row of a run, as of its last event and report."""
    last = run.events[-1] if run.events else None
    end = next((event for event in reversed(run.events) if event.kind is EventKind.FINISHED), None)
    ended = end is not None and last is end
    workers = last.to_workers if last is not None else 0
    batches = [e.detail for e in run.events if e.kind is EventKind.BATCH]
    batch = batches[-1] if batches else {}
    told = (TrialFacts.read(event.detail.get("trial")) for event in reversed(run.events))
    trial = next((each for each in told if each is not None), None)
    metrics = run.reports[-1].metrics if run.reports else {}
    return PageJob(
        job=run.job,
        phase=_phase(end) if ended else "unfinished",
        workers=0 if ended else workers,
        target=0 if ended else workers,
        batch=batch["to_batch_size"] if isinstance(batch.get("to_batch_size"), int) else 0,
        efficiency=number_in(batch, "efficiency"),
        epoch=run.reports[-1].epochs_done if run.reports else 0,
        metrics=numbers_in(metrics),
        resizes=sum(1 for event in run.events if event.kind is EventKind.RESIZE),
        submitted_s=run.events[0].time_s if run.events else None,
        ended_s=last.time_s if last is not None else None,
        why=clipped(last.reason) if last is not None else "",
        reports=run.reports[-1].index if run.reports else 0,
        score=number_in(metrics, trial.metric) if trial is not None and trial.metric else None,
        **{"sweep": run.job.partition("/")[0] if "/" in run.job else "", **trial_cells(trial, _metric(run))},
        storage=run.where,
        colour=ink,
    )


def _metric(run: StoredRun) -> str:
    """Return the metric that the job declared when it last started; empty if none."""
    told = [event.detail.get("metric") for event in run.events if event.kind is EventKind.STARTED]
    return told[-1] if told and isinstance(told[-1], str) else ""


def _phase(end: JobEvent | None) -> str:
    """Return how a run ended, as read from the reason in its final event."""
    reason = end.reason if end is not None else ""
    return next((word for word in ("finished", "stopped") if reason.endswith(f"the job has {word}")), "failed")


def _detail(run: StoredRun, last_s: float) -> JobDetail:
    """Return the details of a run; its series has one point per report, without timestamps."""
    begun_s = run.events[0].time_s if run.events else last_s
    series = tuple(
        (None, float(report.index), None, None, float(report.workers), None, None, numbers_in(report.metrics))
        for report in run.reports
    )
    return JobDetail(
        job=run.job,
        series=series,
        pauses=pauses(run.events),
        shares=shares_of_time(run.events, None, begun_s, run.events[-1].time_s if run.events else last_s),
        events=tuple((e.time_s, e.kind.value, e.from_workers, e.to_workers, clipped(e.reason)) for e in run.events),
        logs=run.where,
    )


MOST_RUNS = 1000
MOST_EVENTS, MOST_REPORTS = 5000, 600
_DEPTH = 3  # a sweep's trials lie in directories of their own
_NOT_RUNS = re.compile(r"checkpoint_\d+|automatic|reports|tensorboard|\..*")


class RunFiles(StoredPage):
    """Page for all runs under a path, or for one run if the path is its directory.

    Args:
        path: A URI or a local path, as in ``RunConfig(storage_path)``.
    """

    def __init__(self, path: str) -> None:
        try:
            filesystem, root = resolve(path, None)
            found, closed = run_folders(filesystem, root)
            newest, left_out = sorted(folder for _, folder in found[:MOST_RUNS]), max(0, len(found) - MOST_RUNS)
            runs, unread = _read_all(filesystem, newest, root)
        except (OSError, ValueError) as error:
            raise InputError(f"storage path {path!r} cannot be read: {error}") from error
        if not runs:
            also = f"; {closed_folders(closed)}" if closed else ""
            raise InputError(
                f"storage path {path!r} must hold the directory of a run, one with {EVENTS_FILE}, but has none{also}"
            )
        problem = f"{count(left_out, 'older run')} left out: give a path further down" if left_out else ""
        problem = "; ".join(filter(None, [problem, unread, closed_folders(closed)]))
        super().__init__(*stored_page(path, runs, problem=problem))


def run_folders(filesystem: pyarrow.fs.FileSystem, root: str) -> tuple[list[tuple[int, str]], list[str]]:
    """Return the run directories at and under ``root``, and the directories that this user may not look into.

    Runs come with the time of their last event [ns], newest first.
    """
    found: list[tuple[int, str]] = []
    closed: list[str] = []
    level = [root]
    for _ in range(_DEPTH + 1):
        below: list[str] = []
        for folder in level:
            try:
                entries = filesystem.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True))
            except PermissionError:
                if folder == root:
                    raise
                closed.append(folder)
                continue
            events = [entry for entry in entries if entry.is_file and posixpath.basename(entry.path) == EVENTS_FILE]
            if events:
                found.append((events[0].mtime_ns or 0, folder))
                continue
            below += _subfolders(entries)
        level = below
    return sorted(found, reverse=True), closed


def closed_folders(closed: Sequence[str]) -> str:
    """Return a message about directories that cannot be looked into; empty if there are none."""
    if not closed:
        return ""
    return f"without the runs in {count(len(closed), 'folder')} that this user may not read, such as {closed[0]}"


def _subfolders(entries: Sequence[pyarrow.fs.FileInfo]) -> Iterator[str]:
    for entry in entries:
        if entry.type == pyarrow.fs.FileType.Directory and not _NOT_RUNS.fullmatch(posixpath.basename(entry.path)):
            yield entry.path


def _read_all(filesystem: pyarrow.fs.FileSystem, folders: Sequence[str], root: str) -> tuple[list[StoredRun], str]:
    """Return all readable runs, and a message about the others; raise an error if runs exist but none is readable."""
    runs: list[StoredRun] = []
    failed: list[Exception] = []
    for folder in folders:
        try:
            runs.append(_read(filesystem, folder, root))
        except (OSError, ValueError, ArithmeticError) as error:  # of another user, or no run's file
            failed.append(error)
    if failed and not runs:
        raise failed[0]
    return runs, f"{count(len(failed), 'run')} could not be read ({clipped(str(failed[0]), 200)})" if failed else ""


def _read(filesystem: pyarrow.fs.FileSystem, folder: str, root: str) -> StoredRun:
    storage = RunStorage(folder, filesystem)
    name = posixpath.relpath(folder, root) if folder != root else posixpath.basename(root)
    events: tuple[JobEvent, ...] = storage.read_events(MOST_EVENTS)
    reports: tuple[Report, ...] = storage.last_reports(0, MOST_REPORTS)
    return StoredRun(job=name, where=storage.where, events=events, reports=reports)
