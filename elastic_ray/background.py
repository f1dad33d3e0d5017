"""Background tasks of a controller, held here because the event loop keeps only weak references to tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger("elastic_ray.job")


class Background:
    """Background tasks of one owner, kept referenced until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background, and return its task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("work beside a controller's loop failed", exc_info=error)

    async def finish(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` [s] for all tasks to end, then cancel any that are still running."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
            self.cancel()
            await asyncio.sleep(0)  # they end in their own turn

    def cancel(self) -> None:
        """Cancel all tasks that are still running."""
        for task in self._tasks:
            task.cancel()
