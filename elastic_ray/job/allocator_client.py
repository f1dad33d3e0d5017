"""SHELL: a job controller's connection to the allocator: sends heartbeats, receives measurements from other jobs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import posixpath
import time
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from elastic_ray.checkpoints.run_directory import resolve
from elastic_ray.job_spec import JobSpec
from placement.allocator.actor import find_allocator
from placement.allocator.events import HeartbeatReply
from placement.cluster.jobs import Bill, JobView
from placement.knowledge.store import StorageRoot
from placement.versions import VersionError, spoken

logger = logging.getLogger("elastic_ray.job")

_HEARTBEAT_S = 1.0
_SLOW_S = 5.0  # without an answer after which the log says so
_LOST_S = 60.0  # a call that nobody answers is lost; an allocator that is gone for good fails it long before


class AllocatorClient:
    """Client that sends the allocator a heartbeat every second, or sooner on demand; starts the allocator if needed."""

    def __init__(
        self, spec: JobSpec, controller: Any, view: Callable[[], JobView], hear: Callable[[HeartbeatReply], None]
    ) -> None:
        self._spec, self._controller, self._view, self._receive = spec, controller, view, hear
        self.nodes = 1  # how many nodes there are that could run a worker of the job, as the allocator said last
        filesystem, path = resolve(spec.storage_path, spec.storage_filesystem)
        root = posixpath.dirname(path) if spec.trial is None else spec.trial.knowledge_path
        self._root = StorageRoot(path=root, filesystem=filesystem, private=spec.elastic.private_files)
        self._root_is_known = False
        self._answers = True  # it is told once that it does not
        self._allocator: Any = None
        self._over = False
        self._due_s = 0.0
        self._attained_s = 0.0
        self._bill: Bill | None = None
        self._seen_s = time.monotonic()
        self._beating: asyncio.Task[None] | None = None

    def soon(self) -> None:
        """Request that the next heartbeat be sent early, because the job's state has changed."""
        self._due_s = 0.0

    def tick(self, now_s: float) -> None:
        """Send a heartbeat if it is due at time ``now_s`` [s, monotonic]."""
        beats = self._beating is not None and not self._beating.done()
        if beats or now_s < self._due_s:
            return  # what has changed since the one under way was made goes with the next
        self._due_s = now_s + _HEARTBEAT_S
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    def ended(self) -> None:
        """Report to the allocator that the job has ended."""
        self._over = True
        if self._allocator is not None:
            self._allocator.ended.remote(self._spec.job, self._seen())

    def _seen(self) -> JobView:
        view, now_s = self._view(), time.monotonic()
        self._attained_s += view.workers * (now_s - self._seen_s)
        self._seen_s = now_s
        return dataclasses.replace(view, attained_s=self._attained_s, bill=self._bill)

    async def _beat(self) -> None:
        """Send one heartbeat and pass the allocator's answer on."""
        try:
            if self._allocator is None:
                found = await asyncio.to_thread(find_allocator)
                await self._answer(found.speak.remote(spoken()))
                self._allocator = found
            if self._over:
                return
            root = None if self._root_is_known else self._root
            beat = self._allocator.heartbeat.remote(self._seen(), self._controller, root)
            answer: HeartbeatReply = await self._answer(beat)
        except VersionError as error:
            self._complain(str(error))
            self._receive(HeartbeatReply(priors={}, knows_root=False, note=str(error)))
            return
        except (RayError, asyncio.TimeoutError, ValueError, RuntimeError) as error:  # it may be restarting
            self._complain(f"{str(error) or type(error).__name__}; trying again")
            self._allocator, self._root_is_known = None, False
            return
        self._root_is_known, self._answers, self.nodes = answer.knows_root, True, answer.nodes
        self._bill = answer.bill or self._bill
        self._receive(answer)

    async def _answer(self, beat: Any) -> Any:
        """Wait for the answer to a call; another call would only add load to a busy allocator."""
        answer: asyncio.Future[Any] = asyncio.ensure_future(beat)
        if not (await asyncio.wait([answer], timeout=_SLOW_S))[0]:
            self._complain(f"nothing for {_SLOW_S:g} s; waiting")
        return await asyncio.wait_for(answer, _LOST_S)

    def _complain(self, reason: str) -> None:
        """Log that the allocator does not answer, once until it answers again."""
        if self._answers:
            logger.info("job %s: the allocator does not answer (%s)", self._spec.job, reason)
        self._answers = False
