"""SHELL: stores the allocator's knowledge in files, in threads beside its event loop."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable

from placement.cluster.jobs import JobView
from placement.knowledge.knowledge import Knowledge
from placement.knowledge.records import Measurements
from placement.knowledge.store import KnowledgeStore, StorageRoot
from placement.storage.storage_calls import StorageCalls

logger = logging.getLogger("placement.allocator")

_EVERY_S = 10.0
_CALL_TIMEOUT_S = 60.0
_SAVE_TIMEOUT_S = 5.0  # of who waits for all that is known to be written; it still is, later
_LOAD_TIMEOUT_S = 3.0  # a slow file system must not keep a job waiting: it then hears of it later


class _SyncedRoot:
    """Storage root of some jobs: its store, and what has been read from it and written to it."""

    def __init__(
        self, root: StorageRoot, knowledge: Knowledge, writer: str, recall: Callable[[Measurements], None]
    ) -> None:
        self._path, self._knowledge, self._recall = root.path, knowledge, recall
        self._store = KnowledgeStore(root, writer)
        self._calls = StorageCalls(root.path, threads=1)  # of its own: one that hangs holds up no other
        self._fingerprints: set[str] = set()
        self._version, self._saved_s, self._hurry, self._saving = 0, 0.0, False, False
        self.loading = asyncio.get_running_loop().create_task(self._load())

    async def _load(self) -> None:
        """Load the measurements stored under the root; a failure is logged."""
        what = "reading what jobs have measured"
        try:
            measurements = await self._calls.run(what, self._store.load, timeout_s=_CALL_TIMEOUT_S)
        except Exception as error:  # a job trains without it all the same
            logger.warning("what earlier jobs have measured cannot be read from %s: %s", self._path, error)
            return
        self.know(each.fingerprint for each in measurements.steps)
        self.know(each.fingerprint for each in measurements.strategies)
        self._recall(measurements)

    def know(self, fingerprints: Iterable[str]) -> None:
        """Record that jobs of these models use the root."""
        self._fingerprints.update(fingerprints)

    def hurry_up(self) -> None:
        """Request a write at the next opportunity, because the job's cluster may soon be gone."""
        self._hurry = True

    def is_due(self, *, now: bool) -> bool:
        """True if changes must be written now; the root is then marked as being written."""
        if self._knowledge.version == self._version:
            self._hurry = False
            return False
        due = now or self._hurry or time.monotonic() - self._saved_s >= _EVERY_S
        if not due or self._saving or not self.loading.done():
            return False
        self._saving = True
        return True

    async def save(self) -> None:
        """Write the knowledge about the root's models; a failure is logged, and the write is tried again later."""
        version, measurements = self._knowledge.version, self._knowledge.measurements(self._fingerprints, time.time())
        self._hurry, self._saved_s = False, time.monotonic()
        try:
            if measurements.steps or measurements.strategies:
                save = functools.partial(self._store.save, measurements)
                await self._calls.run("writing what jobs have measured", save, timeout_s=_CALL_TIMEOUT_S)
            self._version = version
        except Exception as error:  # the next round tries again
            logger.warning("what jobs have measured cannot be written to %s: %s", self._path, error)
        finally:
            self._saving = False


class KnowledgeSync:
    """Reads the knowledge stored under a storage root when its first job arrives, and writes changes back.

    Each root holds the knowledge about the models of the jobs that used it, and of the models found there.

    Args:
        knowledge: The knowledge to write; it is only read here.
        writer: Name of this allocator's files, unique among the clusters that share a storage.
    """

    def __init__(self, knowledge: Knowledge, writer: str, recall: Callable[[Measurements], None]) -> None:
        self._knowledge, self._writer, self._recall = knowledge, writer, recall
        self._roots: dict[tuple[str, str], _SyncedRoot] = {}
        self._root_of_job: dict[str, _SyncedRoot] = {}
        self._saves: set[asyncio.Task[None]] = set()

    def knows(self, job: str) -> bool:
        """True if the storage root of the job's results is known."""
        return job in self._root_of_job

    async def open(self, job: str, root: StorageRoot) -> None:
        """Open the storage root of a job; return once its contents are loaded, or after a short timeout."""
        if root.key not in self._roots:
            self._roots[root.key] = _SyncedRoot(root, self._knowledge, self._writer, self._recall)
        known = self._root_of_job[job] = self._roots[root.key]
        await asyncio.wait([known.loading], timeout=_LOAD_TIMEOUT_S)

    def heard(self, view: JobView) -> None:
        """Record from a job's heartbeat which model the job trains."""
        if view.fingerprint is not None and view.job in self._root_of_job:
            self._root_of_job[view.job].know([view.fingerprint])

    def ended(self, job: str) -> None:
        """Record the end of a job; its measurements are written at once, since its cluster may soon be gone."""
        root = self._root_of_job.pop(job, None)
        if root is not None:
            root.hurry_up()

    async def save(self, *, now: bool = False) -> None:
        """Write changes to each root that is due; with ``now``, to all of them, waiting briefly for the writes."""
        for root in self._roots.values():
            if root.is_due(now=now):
                task = asyncio.get_running_loop().create_task(root.save())
                self._saves.add(task)
                task.add_done_callback(self._saves.discard)
        if now and self._saves:
            await asyncio.wait(self._saves, timeout=_SAVE_TIMEOUT_S)
