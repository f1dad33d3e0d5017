"""Page of a running cluster, which collects poll results and builds the snapshot from them (pure)."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from elastic_ray.events import WorkerInfo
from elastic_ray.observe.page.history import History
from elastic_ray.observe.page.job_memory import MARKS, JobMemory, noise_scale, pauses, shares_of_time
from elastic_ray.observe.page.model import JobDetail, PageDecision, PageNode, PageSnapshot, PageSource, Strip
from elastic_ray.observe.page.overview import strip, tenant_shares, wanted_nodes
from elastic_ray.observe.page.rows import finite, job_row, node_row, slots_at, slots_of
from elastic_ray.observe.page.source import ClusterLook, JobAnswer, JobLook
from placement.allocator.explaining import Explanation
from placement.allocator.slot_use import slots_in
from placement.allocator.snapshot import AllocatorLook, DecisionRecord, Trigger
from placement.cluster.cluster import Cluster, by_node
from placement.cluster.jobs import JobView, goodputs
from placement.cluster.packing import FreeResources
from placement.palette import colour
from placement.text import clipped

logger = logging.getLogger("elastic_ray.observe")
MOST_DECISIONS, MOST_ENDED, MOST_GONE = 2000, 300, 50
MOST_SIZES = 128


class ClusterPage:
    """Data of a running cluster's web page, updated by each poll."""

    def __init__(self, name: str, *, actions: bool = False) -> None:
        self._name, self._actions = name, actions
        self._history = History()
        self._decisions: collections.deque[PageDecision] = collections.deque(maxlen=MOST_DECISIONS)
        self._jobs: dict[str, JobMemory] = {}
        self._colours = 0
        self._nodes: dict[str, PageNode] = {}
        self._totals: dict[str, Mapping[str, float]] = {}
        self._since: dict[str, float] = {}
        self._life, self._known = "", 0
        self.allocator: AllocatorLook | None = None  # as of the last successful poll
        self._started_s: float | None = None

    @property
    def known(self) -> tuple[str, int]:
        """Id of the allocator that answered last, and the number of its latest decision on this page."""
        return self._life, self._known

    def take(self, look: ClusterLook) -> None:
        """Update the page with ``look``, the result of a poll."""
        self._started_s = look.now_s if self._started_s is None else self._started_s
        self._update_nodes(look)
        if look.allocator is not None:
            self._read_decisions(look.allocator, look.now_s)
        for each in look.jobs:
            try:
                self._receive(each, look.now_s)
            except Exception:  # one job's answer, whatever is in it, costs the others nothing
                logger.warning("job %s: its answer could not be shown", each.job, exc_info=True)
        self._read_ends(look)
        self._measure(look)

    def _receive(self, look: JobLook, now_s: float) -> None:
        """Store one job's answer and mark its events and checkpoints."""
        memory = self._memory(look.job, now_s)
        for event in memory.receive(look, now_s):
            self._history.mark(event.time_s, look.job, MARKS[event.kind], clipped(event.reason))
        for time_s, path in memory.new_checkpoints():
            self._history.mark(time_s, look.job, "checkpoint", clipped(f"stored as {path}"))

    def _memory(self, job: str, now_s: float) -> JobMemory:
        """Return the memory of a job, created if the job is new."""
        if job not in self._jobs:
            self._jobs[job] = JobMemory(job, colour(self._colours), now_s)
            self._colours += 1
        return self._jobs[job]

    def _update_nodes(self, look: ClusterLook) -> None:
        """Update the nodes; mark nodes that have started to drain or are gone."""
        if not look.nodes:
            return
        seen = look.allocator.core.cluster.by_id() if look.allocator is not None else {}
        used = _used(look.allocator, {each.node: each.total for each in look.nodes})
        told = look.allocator.core.node_failures if look.allocator is not None else ()
        failed = {each.node: each for each in told}
        for each in look.nodes:
            self._totals[each.node] = each.total
            if not slots_of(each.total) and each.node not in self._nodes:  # a head that only decides has no lane
                continue
            row = node_row(each, seen.get(each.node), used.get(each.node, 0.0), failed.get(each.node))
            before = self._nodes.get(each.node)
            if row.draining and before is not None and not before.draining:
                kind = "spot notice" if row.spot else "drain"
                self._history.mark(look.now_s, "", kind, f"node {row.label} is about to go")
            came_s = None if self._started_s == look.now_s else look.now_s
            since_s = before.since_s if before is not None and before.gone_s is None else came_s
            self._nodes[each.node] = dataclasses.replace(row, since_s=since_s)
        there = {each.node for each in look.nodes}
        for node, row in self._nodes.items():
            if node not in there and row.gone_s is None:
                self._nodes[node] = dataclasses.replace(row, gone_s=look.now_s, used=0, draining=False, failures="")
                self._history.mark(look.now_s, "", "gone", f"node {row.label} is gone")
        gone = [node for node, row in self._nodes.items() if row.gone_s is not None]
        for node in gone[: max(len(gone) - MOST_GONE, 0)]:
            del self._nodes[node], self._totals[node]

    def _read_decisions(self, look: AllocatorLook, now_s: float) -> None:
        """Turn new log records into bars, then set each job's bars to the allocator's current targets."""
        if look.life != self._life:
            self._life, self._known = look.life, 0
        first = look.recorded - len(look.core.log) + 1
        for number, record in enumerate(look.core.log, start=first):
            if number > self._known:
                self._read_decision(number, record, look)
        self._known = look.recorded
        for job, state in look.core.jobs.items():
            self._memory(job, now_s).decided(state)
            self._history.place(now_s, job, slots_at(state, self._totals), 0)
        self._history.end(now_s, self._history.jobs - look.core.jobs.keys())
        self.allocator = look

    def _read_decision(self, number: int, record: DecisionRecord, look: AllocatorLook) -> None:
        """Add one record to the decision log and to the bars."""
        self._decisions.append(
            PageDecision(
                number=number,
                time_s=record.time_s,
                trigger=str(record.trigger),
                job=record.job,
                before=record.from_workers,
                after=record.to_workers,
                reason=clipped(str(record.reason)),
            )
        )
        if record.job:
            memory = self._memory(record.job, record.time_s)
            state = look.core.jobs.get(record.job) or memory.state
            bundle = state.view.bundle if state is not None else {}
            slots = {
                node: max(1, round(workers * (slots_in(bundle, self._totals.get(node, {})) or 1)))
                for node, workers in by_node(record.nodes).items()
            }
            if not self._known:
                self._make_room(record, slots, look)
            self._history.place(record.time_s, record.job, slots, number)
        if not self._known:  # of before the page began
            self._history.measure(record.time_s, self._history.slots, None, None)

    def _make_room(self, record: DecisionRecord, slots: Mapping[str, int], look: AllocatorLook) -> None:
        """End the bars of jobs that ended before the page started: no record says when, but others got their slots."""
        gone = self._history.jobs - look.core.jobs.keys() - {record.job}
        if record.trigger is Trigger.END:
            self._history.end(record.time_s, gone)
        for node, wanted in slots.items():
            there = self._history.on(node)
            others = sum(count for job, count in there.items() if job != record.job)
            if others + wanted > slots_of(self._totals.get(node, {})):
                self._history.end(record.time_s, gone & there.keys())

    def _read_ends(self, look: ClusterLook) -> None:
        """End jobs that neither the allocator nor a controller knows; only the most recent jobs are kept."""
        known = look.allocator.core.jobs.keys() if look.allocator is not None else frozenset()
        for job, memory in self._jobs.items():
            told = memory.status is not None and memory.status.phase.ended
            if not look.problem and job not in known and (told or job not in look.alive):
                memory.ended(look.now_s)
        ended = sorted((m.ended_s, job) for job, m in self._jobs.items() if m.ended_s is not None)
        for _, job in ended[: max(len(ended) - MOST_ENDED, 0)]:
            del self._jobs[job]

    def _measure(self, look: ClusterLook) -> None:
        """Record the current slot use, and since when nodes of each type have been missing."""
        present = [row for row in self._nodes.values() if row.gone_s is None]
        states = look.allocator.core.jobs.values() if look.allocator is not None else ()
        waiting = sum(1 for state in states if not state.target and not state.view.paused)
        scaling = look.allocator.scaling if look.allocator is not None else None
        self._history.measure(
            look.now_s, sum(row.used for row in present), waiting, scaling.usd_per_h if scaling is not None else None
        )
        for kind, missing in (scaling.add if scaling is not None else {}).items():
            if missing:
                self._since.setdefault(kind, look.now_s)
        short = scaling.add if scaling is not None else {}
        self._since = {kind: since_s for kind, since_s in self._since.items() if short.get(kind)}

    def snapshot(self, now_s: float, problem: str = "") -> PageSnapshot:
        """Return the page at ``now_s``, without job details; ``problem`` is a message on what could not be polled."""
        jobs = tuple(map(job_row, self._jobs.values()))
        nodes = tuple(sorted(self._nodes.values(), key=lambda row: (row.gone_s is not None, row.label, row.node)))
        look = self.allocator
        there = [row for row in nodes if row.gone_s is None]
        return PageSnapshot(
            time_s=now_s,
            source=PageSource(kind="live", name=self._name, actions=self._actions, problem=problem),
            strip=strip(look, [job for job in jobs if job.ended_s is None], there) if look is not None else Strip(),
            jobs=jobs,
            nodes=nodes,
            decisions=tuple(self._decisions),
            tenants=tenant_shares(look) if look is not None else (),
            wanted=wanted_nodes(look, self._since) if look is not None else (),
            bars=self._history.bars,
            marks=self._history.marks,
            use=self._history.use,
        )

    def detail(self, job: str, answer: JobAnswer, now_s: float) -> JobDetail | None:
        """Return the details of a job, given the ``answer`` about it; None if the job is unknown or ended long ago."""
        memory = self._jobs.get(job)
        cluster = self.allocator.core.cluster if self.allocator is not None else Cluster()
        return job_detail(memory, cluster, answer, now_s) if memory is not None else None


def _used(look: AllocatorLook | None, totals: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the slots granted to elastic jobs, keyed by node id."""
    used: dict[str, float] = {}
    for state in look.core.jobs.values() if look is not None else ():
        for node, workers in by_node(state.target).items():
            amount = workers * slots_in(state.view.bundle, totals.get(node, {}))
            used[node] = used.get(node, 0.0) + amount
    return used


def job_detail(memory: JobMemory, cluster: Cluster, answer: JobAnswer, now_s: float) -> JobDetail:
    """Return the details of one job."""
    view = memory.state.view if memory.state is not None else None
    curve = _curve(view, cluster)
    workers = sum(memory.state.target.values()) if memory.state is not None else 0
    begun_s = view.submitted_s if view is not None else memory.first_s
    slow = view.slow_nodes if view is not None else {}
    events = tuple(memory.events)
    return JobDetail(
        job=memory.job,
        curve=curve,
        measured=_measured(view),
        gain=_gain(answer.explanation, dict(curve).get(workers)),
        explanation="" if answer.explanation is None else clipped(str(answer.explanation), 4000),
        noise_scale=noise_scale(memory.state),
        series=memory.series,
        pauses=pauses(events, memory.status.last_pause if memory.status is not None else None),
        shares=shares_of_time(events, memory.status, begun_s, memory.ended_s or now_s),
        workers=tuple(_worker(each, slow) for each in answer.workers),
        mfu=memory.status.mfu if memory.status is not None else None,
        memory_bound=memory.status.memory_bound if memory.status is not None else None,
        backend=memory.status.backend if memory.status is not None else "",
        events=tuple((e.time_s, e.kind.value, e.from_workers, e.to_workers, clipped(e.reason)) for e in events),
        logs=memory.facts.storage if memory.facts is not None else "",
    )


def _worker(info: WorkerInfo, slow_nodes: Mapping[str, float]) -> tuple[Any, ...]:
    """Return a line for the workers' table; a slowness measured for the worker takes precedence over its node's."""
    slowness = info.slowness if info.slowness is not None else slow_nodes.get(info.node)
    gpu = info.gpu_memory_used_bytes, info.gpu_memory_reserved_bytes
    return info.rank, info.node, info.pid, info.generation, info.silence_s, slowness, *gpu


def _gain(told: Explanation | None, goodput: float | None) -> float | None:
    """Return the goodput that one more worker would add [samples/s] at the allocator's speeds; None if unknown."""
    if told is None or told.speed_with_one_more is None or told.speed <= 0 or goodput is None:
        return None
    return goodput * (told.speed_with_one_more / told.speed - 1.0)


def _curve(view: JobView | None, cluster: Cluster) -> tuple[tuple[int, float], ...]:
    """Return (workers, goodput) from the fitted model, at sizes that fit on the nodes; empty without a model."""
    if view is None or view.goodput is None:
        return ()
    slots = FreeResources(cluster).slots(view).tolist()
    values = finite(goodputs(view, slots))[:MOST_SIZES]
    return tuple((number, value) for number, value in enumerate(values, start=1) if value > 0)


def _measured(view: JobView | None) -> tuple[tuple[int, float], ...]:
    """Return (workers, goodput) from measured steps, with the best batch for each size."""
    if view is None or view.goodput is None:
        return ()
    best: dict[int, float] = {}
    for observations in view.observations.values():
        for seen in observations:
            batch = seen.replicas * seen.atomic_bsz * (seen.accum_steps + 1)
            if batch >= 1:
                value = batch / seen.step_time * float(view.goodput.efficiency(batch))
                best[seen.replicas] = max(best.get(seen.replicas, 0.0), value)
    return tuple(sorted(best.items()))
