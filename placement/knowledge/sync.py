"""SHELL: stores the allocator's knowledge in files, in threads beside its event loop."""

from __future__ import annotations

import asyncio
import dataclasses
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


@dataclasses.dataclass(slots=True, kw_only=True)
class _RootState:
    """State of one storage root: its store, and what has been read from it and written to it."""

    store: KnowledgeStore
    calls: StorageCalls
    loading: asyncio.Task[None]
    fingerprints: set[str]
    version: int = 0
    saved_s: float = 0.0
    hurry: bool = False
    saving: bool = False

    def know(self, fingerprints: Iterable[str]) -> None:
        """Record that jobs of these models use the root."""
        self.fingerprints.update(fingerprints)

    def is_due(self, version: int, *, now: bool) -> bool:
        """True if changes must be written now; the root is then marked as being written."""
        if version == self.version:
            self.hurry = False
            return False
        due = now or self.hurry or time.monotonic() - self.saved_s >= _EVERY_S
        if not due or self.saving or not self.loading.done():
            return False
        self.saving = True
        return True

    def begin(self) -> None:
        """Record the start of a write."""
        self.hurry, self.saved_s = False, time.monotonic()

    def written(self, version: int) -> None:
        """Record the version that was written."""
        self.version = version

    def over(self) -> None:
        """Record the end of a write, successful or not."""
        self.saving = False

    def hurry_up(self) -> None:
        """Request a write at the next opportunity, because the job's cluster may soon be gone."""
        self.hurry = True


class KnowledgeSync:
    """Reads the knowledge stored under a storage root when its first job arrives, and writes changes back.

    Each root holds the knowledge about the models of the jobs that used it, and of the models found there.

    Args:
        knowledge: The knowledge to write; it is only read here.
        writer: Name of this allocator's files, unique among the clusters that share a storage.
    """

    def __init__(self, knowledge: Knowledge, writer: str, recall: Callable[[Measurements], None]) -> None:
        self._knowledge, self._writer, self._recall = knowledge, writer, recall
        self._roots: dict[tuple[str, str], _RootState] = {}
        self._root_of_job: dict[str, _RootState] = {}
        self._saves: set[asyncio.Task[None]] = set()

    def knows(self, job: str) -> bool:
        """True if the storage root of the job's results is known."""
        return job in self._root_of_job

    async def open(self, job: str, root: StorageRoot) -> None:
        """Open the storage root of a job; return once its contents are loaded, or after a short timeout."""
        known = self._roots.get(root.key)
        if known is None:
            store = KnowledgeStore(root, self._writer)
            calls = StorageCalls(root.path, threads=1)  # of its own: one that hangs holds up no other
            loading = asyncio.get_running_loop().create_task(self._load(root.key, store, calls))
            known = self._roots[root.key] = _RootState(store=store, calls=calls, loading=loading, fingerprints=set())
        self._root_of_job[job] = known
        await asyncio.wait([known.loading], timeout=_LOAD_TIMEOUT_S)

    async def _load(self, key: tuple[str, str], store: KnowledgeStore, calls: StorageCalls) -> None:
        """Load the measurements stored under a root; a failure is logged."""
        try:
            measurements = await calls.run("reading what jobs have measured", store.load, timeout_s=_CALL_TIMEOUT_S)
        except Exception as error:  # a job trains without it all the same
            logger.warning("what earlier jobs have measured cannot be read from %s: %s", key[1], error)
            return
        self._roots[key].know(each.fingerprint for each in measurements.steps)
        self._roots[key].know(each.fingerprint for each in measurements.strategies)
        self._recall(measurements)

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
        for key, root in self._roots.items():
            if root.is_due(self._knowledge.version, now=now):
                task = asyncio.get_running_loop().create_task(self._save(key, root))
                self._saves.add(task)
                task.add_done_callback(self._saves.discard)
        if now and self._saves:
            await asyncio.wait(self._saves, timeout=_SAVE_TIMEOUT_S)

    async def _save(self, key: tuple[str, str], root: _RootState) -> None:
        """Write the knowledge about one root's models; a failure is logged, and the write is tried again later."""
        version, measurements = self._knowledge.version, self._knowledge.measurements(root.fingerprints, time.time())
        root.begin()
        try:
            if measurements.steps or measurements.strategies:
                await root.calls.run(
                    "writing what jobs have measured", lambda: root.store.save(measurements), timeout_s=_CALL_TIMEOUT_S
                )
            root.written(version)
        except Exception as error:  # the next round tries again
            logger.warning("what jobs have measured cannot be written to %s: %s", key[1], error)
        finally:
            root.over()
