"""Record of worker failures by node, which determines how long a node is avoided (pure).

A node that was lost entirely has no record, since it would return under a different id.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from placement.text import count

if TYPE_CHECKING:
    from placement.cluster.jobs import JobView

WINDOW_S = 600.0
"""Two failures of a job within this time, or in training of two programs' jobs, make a node one to avoid [s]."""

REST_S = 600.0
"""A node is avoided for so long after the last failure, and twice as long each time that it fails again [s]."""

MOST_REST_S = 6 * 3600.0
"""Longest time for which a node is avoided [s]."""

FORGET_S = 24 * 3600.0
"""A failure is forgotten after this [s]."""

_MOST_FAILURES = 64  # of a node; the last ones
_MOST_TOLD = 32  # by a job at once; the last ones
_LONGEST_CAUSE = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """Failure of a worker on a node, as reported by the job's controller in each heartbeat."""

    node: str
    worker: str  # id of the worker, which no other of the job has
    cause: str  # what happened, a few words
    age_s: float  # time since [s]
    starting: bool = False  # it had trained nothing: the job avoids the node at once
    of_device: bool = False  # the error names a disk or a GPU of the node


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """Summary of a node's failures, for display."""

    node: str
    failures: int  # how many are remembered
    jobs: tuple[str, ...]  # jobs that had them
    cause: str  # of the last one
    age_s: float  # time since the last one [s]
    avoided_by: tuple[str, ...]  # jobs that avoid it now
    by_all: bool
    rests_s: float  # for how long yet [s]; 0 where nobody avoids it

    def __str__(self) -> str:
        return f"node {self.node[:8]}: {self.short}, {self.age_s:.0f} s ago"

    @property
    def short(self) -> str:
        """Summary text without the parts that change every second."""
        whom = "all jobs" if self.by_all else ", ".join(self.avoided_by)
        workers = count(self.failures)
        avoided = f", avoided by {whom} for {math.ceil(self.rests_s / 60)} min" if whom else ""
        return f"{workers} of {', '.join(self.jobs)} failed{avoided}; the last: {self.cause}"


JobKey = tuple[str, float]
"""Name and time of submission: a job that is submitted again is another one."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Noted:
    at_s: float
    job: JobKey
    worker: str
    cause: str
    starting: bool
    of_device: bool
    program: tuple[str, str | None]  # tenant and fingerprint: trials of a sweep fail alike on any node


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AvoidedNodes:
    """Nodes that are currently avoided, each with the reason.

    Attributes:
        broken: Nodes where a disk or GPU made a job's workers fail, keyed by job.
    """

    by_job: Mapping[JobKey, Mapping[str, str]]
    by_all: Mapping[str, str]
    broken: Mapping[JobKey, Collection[str]] = dataclasses.field(default_factory=dict)

    def of(self, view: JobView) -> dict[str, str]:
        """Return the nodes that this job avoids, keyed by node id, with the reason for each."""
        return {**self.by_all, **self.by_job.get((view.job, view.submitted_s), {})}


class NodeRecord:
    """Record of worker failures on each node. If it is lost, running jobs report their failures again."""

    def __init__(self) -> None:
        self._nodes: dict[str, list[_Noted]] = {}
        self._forgiven_s: dict[str, float] = {}

    def receive(self, view: JobView, now_s: float) -> None:
        """Record the failures that a job reports; ``now_s`` is from a monotonic clock [s]."""
        key = view.job, view.submitted_s
        for told in view.node_failures[-_MOST_TOLD:]:
            at_s = now_s - max(0.0, told.age_s)
            known = self._nodes.get(told.node, [])
            if at_s <= self._forgiven_s.get(told.node, -math.inf) or now_s - at_s > FORGET_S:
                continue
            if any((each.job, each.worker) == (key, told.worker) for each in known):
                continue
            program = view.tenant, view.fingerprint
            cause = told.cause[:_LONGEST_CAUSE]
            noted = _Noted(at_s, key, told.worker, cause, told.starting, told.of_device, program)
            self._nodes[told.node] = sorted([*known, noted], key=lambda each: each.at_s)[-_MOST_FAILURES:]

    def ended(self, view: JobView) -> None:
        """Discard a finished job's failures that its last report omits, since its own program caused them."""
        key, kept = (view.job, view.submitted_s), {(each.node, each.worker) for each in view.node_failures}
        for node, noted in list(self._nodes.items()):
            self._keep(node, [each for each in noted if each.job != key or (node, each.worker) in kept])

    def forgive(self, node: str, now_s: float) -> bool:
        """Clear a node's failures up to ``now_s`` [s, monotonic]; return True if there were any."""
        self._forgiven_s[node] = now_s
        return self._nodes.pop(node, None) is not None

    def discard(self, now_s: float, nodes: Collection[str]) -> None:
        """Discard failures that are too old to count, and those on nodes that are not in ``nodes`` (ids)."""
        for node, noted in list(self._nodes.items()):
            self._keep(node, [each for each in noted if node in nodes and now_s - each.at_s <= FORGET_S])
        self._forgiven_s = {node: at_s for node, at_s in self._forgiven_s.items() if now_s - at_s <= FORGET_S}

    def _keep(self, node: str, noted: list[_Noted]) -> None:
        if noted:
            self._nodes[node] = noted
        else:
            self._nodes.pop(node, None)

    def avoided(self, now_s: float) -> AvoidedNodes:
        """Return the nodes to avoid at ``now_s`` [s, monotonic], with the jobs that should avoid each of them."""
        by_job: dict[JobKey, dict[str, str]] = {}
        by_all: dict[str, str] = {}
        broken: dict[JobKey, set[str]] = {}
        for node, noted in self._nodes.items():
            for key in {each.job for each in noted}:
                own = [each for each in noted if each.job == key]
                if _rests_until(own, of_jobs=False) > now_s:
                    by_job.setdefault(key, {})[node] = _reason(node, own, "its workers")
                    if any(each.of_device for each in own):
                        broken.setdefault(key, set()).add(node)
            if _rests_until(noted, of_jobs=True) > now_s:
                trained = [each for each in noted if not each.starting]
                by_all[node] = _reason(node, trained, f"workers of {count(len({each.job for each in trained}), 'job')}")
        return AvoidedNodes(by_job=by_job, by_all=by_all, broken=broken)

    def rows(self, now_s: float) -> tuple[NodeHistory, ...]:
        """Return a summary for each node with failures, sorted by id."""
        avoided, rows = self.avoided(now_s), []
        for node, noted in sorted(self._nodes.items()):
            keys = {each.job for each in noted}
            by = {key: [each for each in noted if each.job == key] for key in keys}
            ends = [_rests_until(noted, of_jobs=True), *(_rests_until(own, of_jobs=False) for own in by.values())]
            rows.append(
                NodeHistory(
                    node=node,
                    failures=len(noted),
                    jobs=tuple(sorted({name for name, _ in keys})),
                    cause=noted[-1].cause,
                    age_s=now_s - noted[-1].at_s,
                    avoided_by=tuple(sorted({key[0] for key in keys if node in avoided.by_job.get(key, {})})),
                    by_all=node in avoided.by_all,
                    rests_s=max(0.0, max(ends) - now_s),
                )
            )
        return tuple(rows)


def _reason(node: str, noted: Sequence[_Noted], whose: str) -> str:
    return f"node {node[:8]} is avoided, {len(noted)} of {whose} failed there, the last with {noted[-1].cause}"


def _rests_until(noted: Sequence[_Noted], *, of_jobs: bool) -> float:
    """Return when a node will no longer be avoided for these failures [s, monotonic]; minus infinity for never.

    Args:
        of_jobs: True to require that jobs running two different programs failed in training within the window; False to
            require two failed workers, or one that failed while starting.
    """
    until_s, rest_s = -math.inf, 0.0
    if of_jobs:
        noted = [each for each in noted if not each.starting]
    for index, failure in enumerate(noted):
        recent = [each for each in noted[: index + 1] if failure.at_s - each.at_s <= WINDOW_S]
        programs = {each.job: each.program for each in recent}  # a job's last: its fingerprint comes later
        enough = len(set(programs.values())) > 1 if of_jobs else len(recent) > 1 or failure.starting
        if failure.at_s > until_s and (enough or until_s > -math.inf):  # it has failed, or failed again after a rest
            rest_s = min(2 * rest_s or REST_S, MOST_REST_S)
        if rest_s:
            until_s = max(until_s, failure.at_s + rest_s)
    return until_s
