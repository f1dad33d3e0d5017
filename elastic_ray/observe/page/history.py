"""History of the allocation (bars, marks and slot use), built from decisions and events (pure)."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping

from elastic_ray.observe.page.model import Bar, Mark, Use

MOST_BARS, MOST_MARKS, MOST_USES = 6000, 2000, 2000


class History:
    """History of the slots that each job has held, bounded in size; the oldest entries are dropped first."""

    def __init__(self, most_bars: int = MOST_BARS) -> None:
        self._numbers = 0
        self._open: dict[str, dict[str, Bar]] = {}  # by job and node
        self._ended: collections.deque[Bar] = collections.deque(maxlen=most_bars)
        self._marks: collections.deque[Mark] = collections.deque(maxlen=MOST_MARKS)
        self._uses: collections.deque[Use] = collections.deque(maxlen=MOST_USES)

    @property
    def bars(self) -> tuple[Bar, ...]:
        """Bars of the timeline, ended ones first. Each bar shows one job's slots on one node over a period of time."""
        return (*self._ended, *(bar for own in self._open.values() for bar in own.values()))

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Event marks in the timeline, in the order they were added."""
        return tuple(self._marks)

    @property
    def use(self) -> tuple[Use, ...]:
        """Number of slots in use over time, with one entry per change."""
        return tuple(self._uses)

    @property
    def slots(self) -> int:
        """Number of slots that jobs have now, summed over all open bars."""
        return sum(bar[5] for own in self._open.values() for bar in own.values())

    @property
    def jobs(self) -> frozenset[str]:
        """Names of the jobs that have slots now, and therefore an open bar."""
        return frozenset(self._open)

    def on(self, node: str) -> dict[str, int]:
        """Return the number of slots that each job has on a node now, keyed by job."""
        return {job: own[node][5] for job, own in self._open.items() if node in own}

    def place(self, time_s: float, job: str, nodes: Mapping[str, int], decision: int) -> None:
        """Set the job's slots on each node from ``time_s`` on; bars that do not change continue."""
        own = self._open.setdefault(job, {})
        for node in [node for node, bar in own.items() if bar[5] != nodes.get(node)]:
            self._end(own.pop(node), time_s)
        for node, slots in nodes.items():
            if slots > 0 and node not in own:
                self._numbers += 1
                own[node] = (self._numbers, node, job, time_s, None, slots, decision)
        if not own:
            del self._open[job]

    def end(self, time_s: float, jobs: Collection[str]) -> None:
        """End all open bars (periods with slots) of the given jobs at ``time_s``."""
        for job in jobs:
            for bar in self._open.pop(job, {}).values():
                self._end(bar, time_s)

    def _end(self, bar: Bar, time_s: float) -> None:
        number, node, job, from_s, _, slots, decision = bar
        if time_s > from_s:
            self._ended.append((number, node, job, from_s, time_s, slots, decision))

    def mark(self, time_s: float, job: str, kind: str, text: str) -> None:
        """Add a mark of the given kind, with a text, for a job's event, or a node's if ``job`` is empty."""
        self._numbers += 1
        self._marks.append((self._numbers, time_s, job, kind, text))

    def measure(self, time_s: float, used: int, waiting: int | None, usd_per_h: float | None) -> None:
        """Record slots in use, waiting jobs and price [USD/h] at ``time_s``, replacing any values for that time."""
        last = self._uses[-1] if self._uses else None
        if last is not None and (last[1:] == (used, waiting, usd_per_h) or last[0] > time_s):
            return
        if last is not None and last[0] == time_s:
            self._uses.pop()
        self._uses.append((time_s, used, waiting, usd_per_h))
