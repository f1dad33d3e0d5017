"""A job's reports for a reader that takes them one by one, and how far training may run ahead of that (pure)."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from typing import Generic, TypeVar

from elastic_ray.events import Report

T = TypeVar("T")

MOST = 1000


class BoundedLog(Generic[T]):
    """Log of the last numbered items.

    Numbers grow by one, but for this: they may come in another order, and a restart goes back and repeats some.
    """

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
        """Return the item of this number; None if there is none (any more)."""
        return self._things.get(number)

    def gone(self, number: int) -> bool:
        """True if items of this number are no longer kept."""
        return self._full and number < self.low

    def put(self, number: int, thing: T) -> None:
        """Keep a thing, in place of an earlier one of its number."""
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

    def began_with(self, number: int) -> None:
        """Set the number of the first item, which is not kept."""
        self.first = number

    def values(self) -> tuple[T, ...]:
        """Return the kept items, by number."""
        return tuple(self._things[number] for number in sorted(self._things))


_MOST_LINES = 20_000


class Backlog:
    """Lines that wait to be written; of too many, the oldest are dropped, and counted."""

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
        """Add a line; too many drop the oldest."""
        self._lines.append(line)
        if len(self._lines) - self._taken > self._most:
            del self._lines[self._taken]
            self.dropped += 1

    def tell_dropped(self) -> int:
        """Return the number of lines dropped since the last call."""
        dropped, self.dropped = self.dropped, 0
        return dropped

    def take(self) -> tuple[str, ...]:
        """Return the lines to write now; either :meth:`written` or :meth:`failed` follows before the next call."""
        assert not self._taken, "lines are being written"
        self._taken = len(self._lines)
        return tuple(self._lines)

    def written(self) -> None:
        """Drop the taken lines, which are in the file."""
        for _ in range(self._taken):
            self._lines.popleft()
        self._taken = 0

    def failed(self) -> None:
        """Keep the lines, which could not be written."""
        self._taken = 0
        while len(self._lines) > self._most:
            self._lines.popleft()
            self.dropped += 1


_MISSING_S = 5.0
_LOOK_S = 1.0


class ReportQueue:
    """Reports in the order of their numbers, each once, whatever order they come in and however often.

    A restart from a checkpoint repeats the reports after it; those that were taken already are not given again. Only
    the last ones are kept: an earlier one is to be looked for in the run's file, see :meth:`gone`.

    Args:
        taken: number of the last report before the first one here; a run that continues from a checkpoint counts on.
        ahead: how many reports that are not taken may have been made before the next one waits; None for any number.
        keep: how many are kept.
    """

    def __init__(self, *, taken: int = 0, ahead: int | None = None, keep: int = MOST) -> None:
        self._taken, self._ahead = taken, ahead
        self._reports: BoundedLog[Report] = BoundedLog(keep if ahead is None else max(keep, ahead + 2))
        self._open = True
        self._hole: tuple[int, float] | None = None
        self._changed = asyncio.Event()

    def put(self, report: Report) -> None:
        """Put a worker's report into the queue."""
        if report.index not in self._reports and not self._reports.gone(report.index):
            self._reports.put(report.index, report)
            self._wake()

    def begin_after(self, taken: int) -> None:
        """Set the report after which the run continues; called before anything is put here."""
        self._taken = max(self._taken, taken)

    def wanted(self, after: int | None) -> int:
        """Return the number of the report that follows number ``after``."""
        return (self._taken if after is None else after) + 1

    def gone(self, number: int) -> bool:
        """True if the report of this number was here and is no longer kept."""
        return self._reports.gone(number)

    @property
    def oldest(self) -> int:
        """Number of the oldest report that is kept, or would be."""
        return self._reports.low

    async def wait_for_reader(self, index: int) -> None:
        """Wait until the worker that has made this report may train on."""
        while self._open and self._ahead is not None and index > self._taken + self._ahead:
            await self._changed.wait()

    async def next(self, after: int | None, wait_s: float) -> Report | None:
        """Return the report that follows number ``after``, which counts as taken with all before it.

        Args:
            after: the last report that was dealt with; None for none of this run's.
            wait_s: longest wait [s].

        Returns None if there is none (yet), or the queue was closed.
        """
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
        """Return the report after a missing one, if that has been missing for a while.

        Its controller has died with it.
        """
        if self._reports.last <= number:
            self._hole = None
            return None
        if self._hole is None or self._hole[0] != number:
            self._hole = (number, now_s)
        if now_s - self._hole[1] < _MISSING_S:
            return None
        return next(report for report in self._reports.values() if report.index > number)

    def close(self) -> None:
        """Close the queue: there will be no more reports, and no caller waits."""
        self._open = False
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
