"""Queue of a job's reports for a reader, which limits how far training runs ahead of the reader (pure)."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from typing import Generic, TypeVar

from elastic_ray.events import Report

T = TypeVar("T")

MOST = 1000


class BoundedLog(Generic[T]):
    """Log of the latest of numbered items, which may arrive out of order; a restart repeats some numbers."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._things: dict[int, T] = {}
        self.low = 0  # below it nothing is kept
        self._full = False
        self.first = 0  # smallest number that there ever was; 0 before the first
        self.last = 0  # largest one

    def __contains__(self, number: int) -> bool:
        return number in self._things

    def get(self, number: int) -> T | None:
        """Return the item with this number; None if no such item was stored, or if it is no longer kept."""
        return self._things.get(number)

    def gone(self, number: int) -> bool:
        """True if an item with this number is too old to be kept."""
        return self._full and number < self.low

    def put(self, number: int, thing: T) -> None:
        """Store an item, replacing an earlier item with the same number."""
        self.first = min(self.first or number, number)
        if self.gone(number):
            return
        if not self._full:
            self.low = self.first
        self._things[number] = thing
        self.last = max(self.last, number)
        while len(self._things) > self._most:
            self._full = True
            self._things.pop(self.low, None)
            self.low += 1

    def values(self) -> tuple[T, ...]:
        """Return the kept items, in order of their numbers."""
        return tuple(self._things[number] for number in sorted(self._things))


_MOST_LINES = 20_000


class Backlog:
    """Lines waiting to be written; beyond a limit, the oldest lines are dropped and counted."""

    def __init__(self, most: int = _MOST_LINES) -> None:
        self._most = most
        self._lines: collections.deque[str] = collections.deque()
        self._taken = 0  # of the first lines: they are being written
        self.dropped = 0  # lines that had to go since that was last told

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, line: str) -> bool:
        return line in self._lines

    def add(self, line: str) -> None:
        """Add a line; if the backlog is full, drop the oldest waiting line."""
        self._lines.append(line)
        if len(self._lines) - self._taken > self._most:
            del self._lines[self._taken]
            self.dropped += 1

    def pop_dropped(self) -> int:
        """Return the number of lines dropped since the previous call."""
        dropped, self.dropped = self.dropped, 0
        return dropped

    def take(self) -> tuple[str, ...]:
        """Return the lines to write now; call :meth:`written` or :meth:`failed` before the next call."""
        assert not self._taken, "lines are being written"
        self._taken = len(self._lines)
        return tuple(self._lines)

    def written(self) -> None:
        """Remove the lines returned by the last :meth:`take`, which are now in the file."""
        for _ in range(self._taken):
            self._lines.popleft()
        self._taken = 0

    def failed(self) -> None:
        """Keep the lines returned by the last :meth:`take`, which could not be written."""
        self._taken = 0
        while len(self._lines) > self._most:
            self._lines.popleft()
            self.dropped += 1


_MISSING_S = 5.0
_LOOK_S = 1.0


class ReportQueue:
    """Queue that delivers each report once, in order of number, even if reports arrive out of order or repeatedly.

    A restart from a checkpoint repeats the reports made after it; reports already delivered are not delivered again.
    Only the latest reports are kept; earlier ones must be read from the run's file, see :meth:`gone`.

    Args:
        taken: Number of the report whose checkpoint this run continues from; numbering continues from there.
        ahead: Number of undelivered reports that training may make before it waits for the reader; None for no limit.
    """

    def __init__(self, *, taken: int = 0, ahead: int | None = None, keep: int = MOST) -> None:
        self._taken, self._ahead = taken, ahead
        self._reports: BoundedLog[Report] = BoundedLog(keep if ahead is None else max(keep, ahead + 2))
        self._open = True
        self._hole: tuple[int, float] | None = None
        self._changed = asyncio.Event()

    def put(self, report: Report) -> None:
        """Add a worker's report to the queue."""
        if report.index not in self._reports and not self._reports.gone(report.index):
            self._reports.put(report.index, report)
            self._wake()

    def start_after(self, taken: int) -> None:
        """Set the number ``taken`` of the report that the run continues after; call this before reports are added."""
        self._taken = max(self._taken, taken)

    def wanted(self, after: int | None) -> int:
        """Return the number of the report that follows number ``after`` or, if None, the last delivered report."""
        return (self._taken if after is None else after) + 1

    def gone(self, number: int) -> bool:
        """True if the report with this number is too old to be kept."""
        return self._reports.gone(number)

    @property
    def oldest(self) -> int:
        """Number of the oldest report that is kept."""
        return self._reports.low

    async def wait_for_reader(self, index: int) -> None:
        """Wait while report ``index`` is more than ``ahead`` reports ahead of the reader, to slow down training."""
        while self._open and self._ahead is not None and index > self._taken + self._ahead:
            await self._changed.wait()

    async def next(self, after: int | None, wait_s: float) -> Report | None:
        """Mark reports up to ``after`` as delivered and return the next; None after ``wait_s`` [s] or if closed."""
        after = self._taken if after is None else after
        if after > self._taken:
            self._taken = after
            self._wake()
        deadline_s = asyncio.get_running_loop().time() + wait_s
        while after + 1 not in self._reports and self._open and not self.gone(after + 1):
            now_s = asyncio.get_running_loop().time()
            if (later := self._past_a_hole(after + 1, now_s)) is not None:
                return later
            if now_s >= deadline_s:
                return None
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(deadline_s - now_s, _LOOK_S))
        return self._reports.get(after + 1)

    def _past_a_hole(self, number: int, now_s: float) -> Report | None:
        """Return the report after one that has been missing for a while (lost with its controller); else None."""
        if self._reports.last <= number:
            self._hole = None
            return None
        if self._hole is None or self._hole[0] != number:
            self._hole = (number, now_s)
        if now_s - self._hole[1] < _MISSING_S:
            return None
        return next(report for report in self._reports.values() if report.index > number)

    def close(self) -> None:
        """Close the queue, so that all waiting callers return."""
        self._open = False
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
