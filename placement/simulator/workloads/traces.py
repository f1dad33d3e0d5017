"""Traces: jobs' arrival times, the resources that their users requested, and actual and declared lengths."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from placement.checks import check_number
from placement.cluster.sizes import ANY_SIZE, AllowedSizes
from placement.errors import InputError
from placement.simulator.workloads.profiles import Application, read_rows

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
"""Columns that a trace file must have; others are ignored."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """Job in a trace: its submission, its application, and the resources that its user requested."""

    name: str  # unique within the trace
    time_s: float  # submission [s from the start of the trace], 0 or more
    application: str  # name of the profile
    num_replicas: int  # GPUs that the user asked for; only rigid schedulers use it
    batch_size: int  # global batch that the user asked for [samples]; only rigid schedulers use it
    # numbers of workers that it can train with; with any, those of the simulation. Not for rigid schedulers.
    sizes: AllowedSizes = ANY_SIZE
    # (part of its progress from which on, global batch): a batch that its user has declared; empty where it adapts
    ramp: tuple[tuple[float, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("name must be a non-empty string, but got ''")
        check_number(f"time of job {self.name!r}", self.time_s, least=0, unit="seconds", finite=True, error=InputError)
        for field in ("num_replicas", "batch_size"):
            check_number(f"{field} of job {self.name!r}", getattr(self, field), least=1, error=InputError)
        begins = [begin for begin, _ in self.ramp]
        if self.ramp and not (begins[0] == 0 and begins == sorted(set(begins)) and begins[-1] < 1):
            raise InputError(f"ramp of job {self.name!r} must rise from part 0 to below 1, but got {self.ramp}")
        for _, batch in self.ramp:
            check_number(f"a batch in the ramp of job {self.name!r}", batch, least=1, error=InputError)


def read_trace(path: str | Path, applications: Collection[str]) -> tuple[TraceJob, ...]:
    """Return the jobs of a CSV file in order of submission; simultaneous jobs keep their order in the file."""
    jobs = [_job(row, f"{path}, line {line}") for line, row in read_rows(path, COLUMNS, "trace")]
    return in_order(jobs, applications, str(path))


def _job(row: dict[str, str | None], where: str) -> TraceJob:
    """Return the job in a row."""
    try:
        return TraceJob(
            name=(row["name"] or "").strip(),
            time_s=float(row["time"] or ""),
            application=(row["application"] or "").strip(),
            num_replicas=int(row["num_replicas"] or ""),
            batch_size=int(row["batch_size"] or ""),
        )
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error


def in_order(jobs: Sequence[TraceJob], applications: Collection[str], where: str) -> tuple[TraceJob, ...]:
    """Return the jobs in order of submission."""
    if not jobs:
        raise InputError(f"trace {where} must hold one job or more, but is empty")
    seen: set[str] = set()
    for job in jobs:
        if job.name in seen:
            raise InputError(f"{where}: every name must occur once, but {job.name!r} occurs more than once")
        seen.add(job.name)
        if job.application not in applications:
            known = ", ".join(sorted(applications)) or "none"
            raise InputError(
                f"{where}: application of job {job.name!r} must have a profile ({known}), but got {job.application!r}"
            )
    return tuple(sorted(jobs, key=lambda job: job.time_s))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Actual and declared job lengths for a trace; by default, all jobs of an application have the same length."""

    # whether jobs declare how many epochs they run. (The oracle of jobs that run as requested, which Optimus was
    # published with, is not touched.)
    declared: bool = True
    error: float = 0.0  # standard deviation of the logarithm of declared over true epochs, drawn once a job
    spread: float = 0.0  # standard deviation of the logarithm of true over profiled epochs, drawn once a job
    # true epochs by job, where they are known; ``spread`` does not touch these
    epochs: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in ("error", "spread"):
            check_number(f"{field} of lengths", getattr(self, field), least=0, finite=True, error=InputError)
        for job, epochs in self.epochs.items():
            check_number(f"epochs of job {job!r}", epochs, least=1, error=InputError)

    def application(self, application: Application, job: str, seed: int) -> Application:
        """Return the job's application with the job's actual number of epochs."""
        if job in self.epochs:
            return application.stretched(self.epochs[job])
        if not self.spread:
            return application
        factor = math.exp(random.Random(f"{seed}/length/{job}").gauss(0.0, self.spread))
        return application.stretched(max(1, round(application.epochs * factor)))

    def declaration(self, epochs: int, job: str, seed: int) -> float | None:
        """Return the declared number of epochs: ``epochs``, with a random error if set; None if jobs declare none."""
        if not self.declared:
            return None
        if not self.error:
            return float(epochs)
        return epochs * math.exp(random.Random(f"{seed}/declared/{job}").gauss(0.0, self.error))
