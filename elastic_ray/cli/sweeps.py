"""Listings of a sweep, built from its trials' rows (pure)."""

from __future__ import annotations

import dataclasses
import math
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic_ray.cli.listings import JobRow
from elastic_ray.events import JobPhase
from placement.text import ago, count

TRIAL_COLUMNS = ("TRIAL", "METRIC", "REPORTS", "PHASE", "WORKERS", "ETA", "JOB")

_ENDED = frozenset(phase.value for phase in JobPhase if phase.ended)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """Status of a sweep, computed from trials that are running or ended within the last hour."""

    sweep: str
    running: int  # trials that have not ended; ``done`` were trained to their end, ``cut`` were stopped before
    done: int
    cut: int
    failed: int
    metric: str  # what trials are compared by; empty where that is not known
    best: float | None  # the best value that a trial reported last; None where none has
    best_trial: str  # the job that did; empty where none has
    parameters: Mapping[str, Any]
    eta_s: float | None  # until the trials that run have ended [s]; None where unknown


def sweeps_of(rows: Iterable[JobRow]) -> dict[str, list[JobRow]]:
    """Return the trials keyed by the name of their sweep, of the latest of one name; other jobs are left out."""
    found: dict[str, dict[str, list[JobRow]]] = {}
    for row in rows:
        if row.trial is not None:
            folder = posixpath.dirname(posixpath.dirname(row.storage_path))
            found.setdefault(row.trial.sweep, {}).setdefault(folder, []).append(row)

    def begun_s(trials: list[JobRow]) -> float:
        return max(row.submitted_s or 0.0 for row in trials)

    return {sweep: max(folders.values(), key=begun_s) for sweep, folders in found.items()}


def sweep_status(sweep: str, trials: Sequence[JobRow]) -> SweepStatus:
    """Return the status of a sweep, computed from the rows of its trials (at least one)."""
    ranked = best_first(trials)
    best = ranked[0] if ranked[0].score is not None else None
    live = [row for row in trials if not _has_ended(row)]
    done = [row for row in trials if _is_done(row)]
    etas = [row.eta_s for row in live if row.eta_s is not None and math.isfinite(row.eta_s)]
    return SweepStatus(
        sweep=sweep,
        running=len(live),
        done=len(done),
        cut=sum(row.phase == JobPhase.STOPPED for row in trials) - sum(row.phase == JobPhase.STOPPED for row in done),
        failed=sum(row.failed for row in trials),
        metric=next((row.trial.metric for row in ranked if row.trial is not None and row.trial.metric), ""),
        best=best.score if best is not None else None,
        best_trial=best.job if best is not None else "",
        parameters=best.trial.parameters if best is not None and best.trial is not None else {},
        eta_s=max(etas) if etas else None,
    )


def _has_ended(row: JobRow) -> bool:
    """True if a trial has ended, even if its controller still answers."""
    return row.ended_s is not None or row.phase in _ENDED


def _is_done(row: JobRow) -> bool:
    """True if a trial was trained to completion, even if the sweep then stopped it."""
    rungs = row.trial.rungs if row.trial is not None else ()
    whole = row.phase == JobPhase.STOPPED and bool(rungs) and row.reports >= rungs[-1]
    return row.phase == JobPhase.FINISHED or whole


def best_first(trials: Sequence[JobRow]) -> list[JobRow]:
    """Return the trials sorted by latest reported score, best first; trials without a score are last."""

    def key(row: JobRow) -> tuple[bool, float, str]:
        least = row.trial is not None and row.trial.mode == "min"
        return row.score is None, (row.score or 0.0) * (1 if least else -1), row.job

    return sorted(trials, key=key)


def called(trials: Sequence[JobRow]) -> dict[str, str]:
    """Return a display name for each trial, keyed by job, that lists the parameters that differ between trials."""
    said = {row.job: row.trial.parameters for row in trials if row.trial is not None}
    names = dict.fromkeys(name for each in said.values() for name in each)
    differ = [name for name in names if len({repr(each.get(name)) for each in said.values()}) > 1]
    return {job: parameters_text({name: each.get(name) for name in differ}) for job, each in said.items()}


def parameters_text(parameters: Mapping[str, Any]) -> str:
    """Return parameters as text such as ``lr=0.0003 width=128``; only the last part of a nested name is shown."""
    return " ".join(
        f"{name.rpartition('/')[2]}={f'{value:.3g}' if isinstance(value, float) else value}"
        for name, value in parameters.items()
    )


def sweep_line(status: SweepStatus, best: str) -> str:
    """Return a one-line summary of a sweep; ``best`` is the best trial's display name, or empty."""
    parts = [f"{status.running} running", f"{status.done} done", f"{status.cut} cut"]
    parts += [f"{status.failed} failed"] if status.failed else []
    if status.best is not None:
        parts.append(f"best {status.metric} {status.best:.4g}" + (f" at {best}" if best else ""))
    if status.eta_s is not None:
        parts.append(f"those that run end in {ago(status.eta_s)}")
    trials = status.running + status.done + status.cut + status.failed
    return f"{count(trials, 'trial')}: {', '.join(parts)}"


def grouped(rows: Sequence[JobRow], *, ended: bool = True) -> tuple[JobRow, ...]:
    """Return the rows with a summary row for each sweep, placed before the sweep's running trials.

    Trials that have ended are left out, as the summary row counts them.

    Args:
        ended: True to keep jobs that have ended and are not trials.
    """
    sweeps = sweeps_of(rows)
    shown: list[JobRow] = []
    for row in rows:
        trials = sweeps.pop(row.trial.sweep, []) if row.trial is not None else []
        if trials:
            shown.append(_sweep_row(trials))
        if not _has_ended(row) or (row.trial is None and (ended or row.ended_s is None)):
            shown.append(row)
    return tuple(shown)


def _sweep_row(trials: Sequence[JobRow]) -> JobRow:
    """Return one row that summarises all of a sweep's trials."""
    assert trials[0].trial is not None, "only trials are grouped"
    status = sweep_status(trials[0].trial.sweep, trials)
    begun = [row.submitted_s for row in trials if row.submitted_s is not None]
    over = [row.ended_s for row in trials if row.ended_s is not None]
    return JobRow(
        job=status.sweep,
        phase="sweep",
        workers=sum(row.workers for row in trials),
        target_workers=sum(row.target_workers for row in trials),
        eta_s=status.eta_s,
        message=sweep_line(status, called(trials).get(status.best_trial, "")),
        tenant=trials[0].tenant,
        user=trials[0].user,
        submitted_s=min(begun, default=None),
        ended_s=max(over, default=None) if not status.running else None,
        submission=trials[0].submission,
    )


def trial_cells(row: JobRow, name: str) -> tuple[str, ...]:
    """Return the texts of a trial's table row, in the order of ``TRIAL_COLUMNS``."""
    score = "" if row.score is None else f"{row.score:.4g}"
    eta = ago(row.eta_s) if row.eta_s is not None and not _has_ended(row) else ""
    workers = str(row.workers) if row.workers else ""
    return (name or row.job, score, str(row.reports), row.phase, workers, eta, row.job)
