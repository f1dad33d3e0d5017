"""The page: CPU and size of a snapshot of 1000 jobs, time to a change and to the first paint in Chromium, and what it
costs the allocator that somebody looks.

The snapshot is of a real ``AllocatorCore`` with 1000 jobs on 256 nodes of 4 GPUs. Its CPU time is that of one look
after the first: the jobs' rows, strip, shares, JSON. The allocator's decisions alternate between rounds in which it is
looked at before each of them, as by an open page twice a second (its answer pickled as Ray does), and rounds in which
it is not; every job's gradient noise changes before each decision. The change is one job's row, over HTTP.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from typing import Any

import cloudpickle
from bench_decision import make_views, train
from common import bar, finish, median, side_parser

from elastic_ray.events import JobPhase, JobStatus
from elastic_ray.observe.page.cluster_page import ClusterPage
from elastic_ray.observe.page.feed import difference, tables, to_json
from elastic_ray.observe.page.model import PageSnapshot
from elastic_ray.observe.page.source import ClusterLook, JobFacts, JobLook, NodeLook, StoredPage
from placement.allocator.config import AllocatorConfig
from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobHeartbeat, NodesChanged, TimePassed
from placement.allocator.snapshot import AllocatorLook
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.policies import GoodputPolicy
from placement.simulator.nodes.clusters import parse_cluster
from placement.simulator.threads import one_thread

JOBS, NODES = 1000, 256
BEGIN_S = 1_000_000_000.0


def main() -> None:
    """All measurements in turn."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--rounds", type=int, default=20, help="pairs of decisions")
    options = parser.parse_args()
    rows, bars = [], []
    with one_thread():
        snapshot, row, own = measure_snapshot(5 if options.quick else 20)
        rows.append(row)
        bars += own
        row, own = measure_decisions(2 if options.quick else options.rounds)
        rows.append(row)
        bars += own
    row, own = measure_browser(snapshot, options)
    finish("dashboard", rows=[*rows, row], bars=[*bars, *own])


def full_core() -> tuple[AllocatorCore, list[JobView]]:
    """An allocator that has decided about all jobs."""
    core = AllocatorCore(GoodputPolicy(), AllocatorConfig(rounds=True, silence_s=1e9))
    core.handle(NodesChanged(cluster=parse_cluster(f"aws:{NODES}x4")), BEGIN_S)
    views = make_views(JOBS, 0)
    for view in views:
        core.handle(JobHeartbeat(view=view), BEGIN_S)
    core.handle(TimePassed(), BEGIN_S)
    return core, views


def look_of(core: AllocatorCore, after: int) -> AllocatorLook:
    """What the allocator answers to a page."""
    return AllocatorLook(core=core.snapshot(after), recorded=core.recorded, life="bench", decided_s=core.decided_s)


def cluster_look(core: AllocatorCore, after: int, now_s: float, step: int) -> ClusterLook:
    """A look in which every controller has answered, which a real one has not more often than every eight seconds."""
    cluster: Cluster = parse_cluster(f"aws:{NODES}x4")
    answers = tuple(
        JobLook(
            job=job,
            status=JobStatus(
                job=job, phase=JobPhase.RUNNING, workers=2, step=step, batch_size=256, metrics={"loss": 0.5}
            ),
            facts=JobFacts(min_workers=1, max_workers=64, storage=f"/mnt/shared/elastic/runs/{job}"),
        )
        for job in core.jobs
    )
    nodes = tuple(
        NodeLook(node=node.node_id, address=node.node_id, total=node.total, labels=node.labels)
        for node in cluster.nodes
    )
    return ClusterLook(
        now_s=now_s, allocator=look_of(core, after), jobs=answers, alive=frozenset(core.jobs), nodes=nodes
    )


def measure_snapshot(repeats: int) -> tuple[PageSnapshot, dict[str, Any], list[dict[str, Any]]]:
    """CPU time of a look, of the snapshot and of its JSON; its size, and that of a change of 64 jobs."""
    core, _ = full_core()
    page, times = ClusterPage("bench"), list[float]()
    looks = [cluster_look(core, 0 if n == 0 else core.recorded, BEGIN_S + n, n) for n in range(repeats + 1)]
    before: dict[str, Any] = {}
    snapshot, body, change = None, b"", b""
    for look in looks:
        begun = time.process_time()
        page.take(look)
        snapshot = page.snapshot(look.now_s)
        after = tables(snapshot)
        body = to_json(after)
        times.append(time.process_time() - begun)
        change, before = to_json(difference(before, after)), after
    assert snapshot is not None
    cpu_s, size = median(times[1:]), len(body) / 1e6
    row = {
        "what": f"snapshot of {JOBS} jobs",
        "CPU [ms]": 1e3 * cpu_s,
        "MB": size,
        "a change of all [MB]": len(change) / 1e6,
    }
    return (
        snapshot,
        row,
        [
            bar(f"CPU of a snapshot of {JOBS} jobs [ms]", value=1e3 * cpu_s, limit=100.0, at_least=False),
            bar(f"a snapshot of {JOBS} jobs [MB]", value=size, limit=2.0, at_least=False),
        ],
    )


def measure_decisions(rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """CPU time of a decision with a page open and without, and of the answer to a look."""
    core, views = full_core()
    spent: dict[bool, list[float]] = {False: [], True: []}
    answers: list[float] = []
    for number in range(2 * rounds):
        watched, now_s = number % 2 == 1, BEGIN_S + 40.0 * (number + 1)
        views = [train(view) for view in views]
        for view in views:
            core.handle(JobHeartbeat(view=view), now_s)
        if watched:
            begun = time.process_time()
            cloudpickle.dumps(look_of(core, core.recorded))
            answers.append(time.process_time() - begun)
        begun = time.process_time()
        core.handle(TimePassed(), now_s)
        spent[watched].append(time.process_time() - begun)
    alone, open_ = median(spent[False]), median(spent[True])
    row = {
        "what": f"decision about {JOBS} jobs",
        "alone [ms]": 1e3 * alone,
        "page open [ms]": 1e3 * open_,
        "answer to a look [ms]": 1e3 * median(answers),
    }
    return row, [bar("a decision with the page open, against without", value=open_ / alone, limit=1.05, at_least=False)]


class Changing(StoredPage):
    """A page one of whose jobs changes when the benchmark says so."""

    def __init__(self, snapshot: PageSnapshot) -> None:
        super().__init__(snapshot, {})
        self._now = snapshot

    @property
    def period_s(self) -> float | None:
        """As of a live cluster."""
        return 0.5

    def change(self, step: int) -> None:
        """From the next look on, the first job is at this step."""
        first = dataclasses.replace(self._now.jobs[0], step=step, progress=None)
        self._now = dataclasses.replace(self._now, jobs=(first, *self._now.jobs[1:]))

    def poll(self, now_s: float) -> PageSnapshot:
        """Everything on the page."""
        return self._now


def measure_browser(snapshot: PageSnapshot, options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """First paint, and the time from a change of the facts until it is seen; None without a browser."""
    from tests.observe.page.pages import chromium, missing, served, tab, until

    names = ("first paint with 1000 jobs [s]", "a change is visible after [s]")
    if missing():
        print(missing())
        return {"what": "browser"}, [bar(name, value=None, limit=1.0, at_least=False) for name in names]
    source, paints, seen = Changing(snapshot), list[float](), list[float]()
    job = snapshot.jobs[0].job
    with served(source) as port, chromium() as started, contextlib.ExitStack() as stack:
        for _ in range(1 if options.quick else 5):
            page, _ = stack.enter_context(tab(started))
            page.goto(f"http://127.0.0.1:{port}/")
            until(page, "document.body.dataset.ready === 'yes'")
            paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            until(page, f"{paint} !== undefined")
            paints.append(page.evaluate(paint) / 1e3)
        for step in range(1, 3 if options.quick else 11):
            source.change(7_000_000 + step)
            begun = time.monotonic()
            text = f"document.querySelector('[data-job=\"{job}\"]').textContent"
            until(page, f"{text}.includes('step {7_000_000 + step}')")
            seen.append(time.monotonic() - begun)
    row = {
        "what": "Chromium",
        "first paint [s]": median(paints),
        "change [s]": median(seen),
        "worst change [s]": max(seen),
    }
    return row, [
        bar(names[0], value=median(paints), limit=1.0, at_least=False),
        bar(names[1], value=max(seen), limit=1.0, at_least=False),
    ]


if __name__ == "__main__":
    main()
