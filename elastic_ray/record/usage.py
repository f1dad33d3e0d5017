"""Usage of runs (hours and cost by user, tenant, job and week), computed from their events (pure)."""

from __future__ import annotations

import dataclasses
import datetime
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from elastic_ray.events import EventKind, JobEvent

DIMENSIONS = ("user", "tenant", "job", "week")
_WEEK_S = 7 * 86_400.0
_MONDAY_S = 4 * 86_400.0  # 1970-01-05, from which weeks are counted
_HOUR_S = 3600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Row of a usage report, with the same fields as the output of ``elastic-ray usage --json``."""

    user: str | None = None  # owner of the jobs; None where the row stands for several, as in the next three
    tenant: str | None = None
    job: str | None = None  # name of its directory
    week: str | None = None  # ISO week of UTC, such as ``2026-W48``
    gpu_hours: float = 0.0  # GPUs times hours that workers trained or stood ready
    cpu_hours: float = 0.0  # likewise of CPUs
    worker_hours: float = 0.0  # workers times hours
    cost_usd: float | None = None  # None where no prices were known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Period with a constant number of workers, within one week and one run."""

    user: str
    tenant: str
    week: str
    worker_s: float
    gpus: float
    cpus: float
    run: int


def week_of(time_s: float) -> str:
    """Return the ISO week, in UTC, of a time [s since the epoch].

    >>> week_of(0.0)
    '1970-W01'
    """
    year, week, _ = datetime.datetime.fromtimestamp(time_s, datetime.timezone.utc).isocalendar()
    return f"{year}-W{week:02d}"


def usage(job: str, events: Sequence[JobEvent], seen_s: float) -> list[UsageRow]:
    """Return the usage of one job, with a row for each user, tenant (such as a team) and week."""
    spans = list(_spans(events, seen_s))
    worker_s: dict[int, float] = defaultdict(float)
    for span in spans:
        worker_s[span.run] += span.worker_s
    costs = _costs(events)
    rows = []
    for span in spans:
        cost, hours = costs.get(span.run), span.worker_s / _HOUR_S
        rows.append(
            UsageRow(
                user=span.user,
                tenant=span.tenant,
                job=job,
                week=span.week,
                gpu_hours=hours * span.gpus,
                cpu_hours=hours * span.cpus,
                worker_hours=hours,
                cost_usd=None if cost is None else cost * span.worker_s / worker_s[span.run],
            )
        )
    return total(rows, DIMENSIONS)


def total(rows: Iterable[UsageRow], by: Sequence[str]) -> list[UsageRow]:
    """Return the sums of rows that agree in the dimensions ``by`` (of ``DIMENSIONS``), sorted by these dimensions."""
    sums: dict[tuple[str, ...], UsageRow] = {}
    for row in rows:
        key = tuple(str(getattr(row, name)) for name in by)
        named: dict[str, Any] = dict(zip(by, key, strict=True))
        before = sums.get(key) or UsageRow(**named)
        costs = [each for each in (before.cost_usd, row.cost_usd) if each is not None]
        sums[key] = dataclasses.replace(
            before,
            gpu_hours=before.gpu_hours + row.gpu_hours,
            cpu_hours=before.cpu_hours + row.cpu_hours,
            worker_hours=before.worker_hours + row.worker_hours,
            cost_usd=sum(costs) if costs else None,
        )
    return [sums[key] for key in sorted(sums)]


def _spans(events: Sequence[JobEvent], seen_s: float) -> Iterator[_Span]:
    """Yield periods with workers, divided at the start of each week."""
    user = tenant = ""
    gpus = cpus = 0.0
    run = 0
    for number, event in enumerate(events):
        owner = event.detail.get("owner")
        if isinstance(owner, dict):
            user, tenant = str(owner.get("user", "")), str(owner.get("tenant", ""))
            gpus, cpus = (_amount(owner.get("bundle"), name) for name in ("GPU", "CPU"))
        run += event.kind is EventKind.FINISHED
        last = number + 1 == len(events)
        until_s = max(seen_s, event.time_s) if last else events[number + 1].time_s
        since_s = event.time_s
        while event.to_workers and since_s < until_s:
            next_s = _MONDAY_S + ((since_s - _MONDAY_S) // _WEEK_S + 1) * _WEEK_S
            lasted_s = min(next_s, until_s) - since_s
            told: dict[str, Any] = {"user": user, "tenant": tenant, "gpus": gpus, "cpus": cpus, "run": run}
            yield _Span(week=week_of(since_s), worker_s=lasted_s * event.to_workers, **told)
            since_s += lasted_s


def _costs(events: Sequence[JobEvent]) -> dict[int, float]:
    """Return each run's last known cost [USD], keyed by run number from 0."""
    costs: dict[int, float] = {}
    run = 0
    for event in events:
        if "cost_usd" in event.detail:
            costs[run] = _amount(event.detail, "cost_usd")
        run += event.kind is EventKind.FINISHED
    return costs


def _amount(told: object, name: str) -> float:
    """Return a number of 0 or more from an untrusted file; 0 for any other value."""
    value = told.get(name, 0.0) if isinstance(told, dict) else 0.0
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else 0.0
