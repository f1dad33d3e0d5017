"""Page of a simulator report (``simulate --json``), pure except for reading the file."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_ray.observe.page.history import History
from elastic_ray.observe.page.model import (
    JobDetail,
    PageDecision,
    PageJob,
    PageNode,
    PageSnapshot,
    PageSource,
    SlotCount,
    Strip,
)
from elastic_ray.observe.page.source import StoredPage
from placement.errors import InputError
from placement.palette import as_hex, rgb, shade_of
from placement.simulator.nodes.clusters import parse_cluster
from placement.simulator.results.plot import hue_of
from placement.text import count

_MOST_DECISIONS = 2000


class SimulatedCluster(StoredPage):
    """Page of one simulated trace under one policy.

    Args:
        path: Path of the report; ``out.json#2`` selects the second record in ``out.json``.
    """

    def __init__(self, path: str) -> None:
        file, _, number = path.rpartition("#") if "#" in path else (path, "", "1")
        record = _record(file, number)
        try:
            super().__init__(*_page(record))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
            raise InputError(
                f"simulation {file} is no report of the simulator: {type(error).__name__}: {error}"
            ) from error


def _record(file: str, number: str) -> Mapping[str, Any]:
    """Return the record with this number, counted from 1."""
    try:
        records = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"simulation {file} cannot be read: {error}") from error
    if not isinstance(records, list) or not records or not all(isinstance(each, dict) for each in records):
        raise InputError(f"simulation {file} must hold a list of records, as `simulate --json` writes it")
    if not (number.isascii() and number.isdigit() and len(number) < 10) or not 1 <= int(number) <= len(records):
        raise InputError(f"simulation {file} has records #1 to #{len(records)}, but got #{number}")
    record: Mapping[str, Any] = records[int(number) - 1]
    if "placed" not in record:
        raise InputError(f"simulation {file} lacks the placements: write it again with `simulate --json`")
    return record


def _page(record: Mapping[str, Any]) -> tuple[PageSnapshot, dict[str, JobDetail]]:
    """Return the page of a record, and the details of each job."""
    history, held = History(), dict[str, int]()
    arrivals = sorted(float(job["arrival_s"]) for job in record["per_job"])
    ends = sorted(float(job["finish_s"]) for job in record["per_job"])
    numbers: dict[tuple[float, str], int] = {}
    decisions = []
    for number, (time_s, trigger, job, before, after, reason) in enumerate(record["decisions"], start=1):
        numbers[float(time_s), str(job)] = number
        told = PageDecision(
            number=number, time_s=float(time_s), trigger=trigger, job=job, before=before, after=after, reason=reason
        )
        decisions.append(told)
    for time_s, job, nodes in record["placed"]:
        history.place(time_s, job, nodes, numbers.get((float(time_s), job), 0))
        held.pop(job, None)
        if nodes:
            held[job] = sum(nodes.values())
        waiting = max(bisect.bisect_right(arrivals, time_s) - bisect.bisect_right(ends, time_s) - len(held), 0)
        history.measure(time_s, sum(held.values()), waiting, None)
    cluster = parse_cluster(str(record["cluster"]))
    end_s = max(ends, default=0.0)
    jobs, counts = _jobs(record), dict[str, int]()
    for node in cluster.nodes:
        counts[node.gpu_type] = counts.get(node.gpu_type, 0) + int(node.total["GPU"])
    about = f"{count(len(jobs), 'job')}, {float(record['avg_jct_s']) / 3600:.2f} h on average"
    snapshot = PageSnapshot(
        time_s=end_s,
        source=PageSource(kind="simulation", name=f"{Path(record['trace']).name}, {record['rules']} rules: {about}"),
        strip=Strip(
            slots=tuple(SlotCount(type=kind, idle=count) for kind, count in sorted(counts.items())),
            policy=str(record["policy"]),
        ),
        jobs=jobs,
        nodes=tuple(
            PageNode(node=node.node_id, label=node.node_id, type=node.gpu_type, slots=int(node.total["GPU"]))
            for node in cluster.nodes
        ),
        decisions=tuple(decisions[-_MOST_DECISIONS:]),
        bars=history.bars,
        marks=history.marks,
        use=history.use,
    )
    by_job: dict[str, list[Any]] = {}
    for decision in record["decisions"]:
        by_job.setdefault(decision[2], []).append(decision)
    own = {str(each["job"]): each for each in record["per_job"]}
    return snapshot, {job.job: _detail(job, own[job.job], by_job.get(job.job, ())) for job in jobs}


def _jobs(record: Mapping[str, Any]) -> tuple[PageJob, ...]:
    """Return a row for each job, in the colours of the simulator's plot."""
    seen: dict[str, int] = {}
    rows = []
    for job in record["per_job"]:
        application = str(job["application"])
        rank = seen[application] = seen.get(application, -1) + 1
        hours = sum(float(each) for each in job["gpu_hours"].values())
        rows.append(
            PageJob(
                job=str(job["job"]),
                phase="finished",
                progress=1.0,
                resizes=int(job["resizes"]),
                submitted_s=float(job["arrival_s"]),
                ended_s=float(job["finish_s"]),
                cost_usd=sum(float(h) * float(record["prices_usd"].get(g, 0)) for g, h in job["gpu_hours"].items()),
                why=f"{application}: done in {float(job['jct_s']) / 3600:.2f} h, {hours:.2f} GPU-hours, "
                f"fairness {float(job['rho']):.2f}",
                colour=as_hex(rgb(hue_of(application), shade_of(rank))),
            )
        )
    return tuple(rows)


def _detail(job: PageJob, own: Mapping[str, Any], events: Sequence[Sequence[Any]]) -> JobDetail:
    """Return the details of a job: its decisions as events, and how its time was spent."""
    waited, paused = float(own["start_s"]) - float(own["arrival_s"]), float(own["paused_s"])
    return JobDetail(
        job=job.job,
        shares={"training": max(float(own["jct_s"]) - waited - paused, 0.0), "waiting": waited, "pausing": paused},
        events=tuple((float(t), str(trigger), int(a), int(b), str(why)) for t, trigger, _, a, b, why in events),
    )
