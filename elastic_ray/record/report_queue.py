"""A job's reports for a reader that takes them one by one, and how far training may run ahead of that (pure)."""

from __future__ import annotations

import asyncio
import contextlib

from elastic_ray.events import Report
from elastic_ray.record.bounded_log import MOST, BoundedLog

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
        self._taken = taken
        self._ahead = ahead
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
        """Number of the report that follows number ``after``."""
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
        """The report that follows number ``after``, which counts as taken with all before it.

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
        """The report after a missing one, if that has been missing for a while: its controller has died with it."""
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
