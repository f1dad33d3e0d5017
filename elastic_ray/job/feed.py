"""A job's reports for somebody who takes them one by one, and how far training may run ahead of that (pure)."""

from __future__ import annotations

import asyncio

from elastic_ray.events import Report


class ReportFeed:
    """Reports in the order of their numbers, each once, whatever order they come in and however often.

    A restart from a checkpoint repeats the reports after it; those that were taken already are not given again.

    Args:
        taken: number of the last report before the first one here; a run that goes on from a checkpoint counts on.
        ahead: how many reports nobody has taken may have been made before the next one waits; None for any number.
    """

    def __init__(self, *, taken: int = 0, ahead: int | None = None) -> None:
        self._taken = taken
        self._ahead = ahead
        self._reports: dict[int, Report] = {}
        self._open = True
        self._changed = asyncio.Event()

    def put(self, report: Report) -> None:
        """A worker has reported."""
        if report.index not in self._reports:
            self._reports[report.index] = report
            self._wake()

    async def turn(self, index: int) -> None:
        """Wait until the worker that has made this report may train on."""
        while self._open and self._ahead is not None and index > self._taken + self._ahead:
            await self._changed.wait()

    async def next(self, after: int | None, wait_s: float) -> Report | None:
        """The report that follows number ``after``, which counts as taken with all before it.

        Args:
            after: the last report that was dealt with; None for none of this run's.
            wait_s: longest wait [s].

        Returns:
            None if there is none (yet), or the feed was closed.
        """
        after = self._taken if after is None else after
        if after > self._taken:
            self._taken = after
            self._wake()
        deadline_s = asyncio.get_running_loop().time() + wait_s
        while after + 1 not in self._reports and self._open:
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                return None
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except asyncio.TimeoutError:
                return None
        return self._reports.get(after + 1)

    def close(self) -> None:
        """There will be no more reports; nobody waits any longer."""
        self._open = False
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
