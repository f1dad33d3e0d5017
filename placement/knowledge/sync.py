"""SHELL: keeps the allocator's knowledge in files, in threads beside its event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable

from placement.cluster.jobs import JobView
from placement.knowledge.knowledge import Knowledge
from placement.knowledge.records import Memory
from placement.knowledge.store import KnowledgeStore, StorageRoot
from placement.storage.storage_calls import StorageCalls

logger = logging.getLogger("placement.allocator")

_EVERY_S = 10.0
_CALL_TIMEOUT_S = 60.0
_SAVE_TIMEOUT_S = 5.0  # of who waits for all that is known to be written; it still is, later
_LOAD_TIMEOUT_S = 3.0  # a slow file system must not keep a job waiting: it then hears of it later


@dataclasses.dataclass(slots=True, kw_only=True)
class _Place:
    """One storage root: what is kept there, and since when."""

    store: KnowledgeStore
    calls: StorageCalls
    loading: asyncio.Task[None]
    fingerprints: set[str]
    version: int = 0
    saved_s: float = 0.0
    hurry: bool = False
    saving: bool = False


class Keeper:
    """Reads what was kept under a storage root when its first job comes, and writes news there.

    Under each root lies what is known of the models of jobs that used it, and of those that were found there.

    Args:
        knowledge: what is known; only read here.
        writer: name of this allocator's files, unique among the clusters that share a storage.
        recall: takes what was read.
    """

    def __init__(self, knowledge: Knowledge, writer: str, recall: Callable[[Memory], None]) -> None:
        self._knowledge = knowledge
        self._writer = writer
        self._recall = recall
        self._places: dict[tuple[str, str], _Place] = {}
        self._homes: dict[str, _Place] = {}
        self._saves: set[asyncio.Task[None]] = set()

    def knows(self, job: str) -> bool:
        """Whether it is known where the job's results are."""
        return job in self._homes

    async def open(self, job: str, root: StorageRoot) -> None:
        """A job's results are there; returns when what was kept there has been recalled, or that takes long."""
        place = self._places.get(root.key)
        if place is None:
            store = KnowledgeStore(root, self._writer)
            calls = StorageCalls(root.path, threads=1)  # of its own: one that hangs holds up no other
            loading = asyncio.get_running_loop().create_task(self._load(root.key, store, calls))
            place = self._places[root.key] = _Place(store=store, calls=calls, loading=loading, fingerprints=set())
        self._homes[job] = place
        await asyncio.wait([place.loading], timeout=_LOAD_TIMEOUT_S)

    async def _load(self, key: tuple[str, str], store: KnowledgeStore, calls: StorageCalls) -> None:
        try:
            memory = await calls.run("reading what jobs have measured", store.load, timeout_s=_CALL_TIMEOUT_S)
        except Exception as error:  # a job trains without it all the same
            logger.warning("what earlier jobs have measured cannot be read from %s: %s", key[1], error)
            return
        self._places[key].fingerprints |= {step.fingerprint for step in memory.steps}
        self._recall(memory)

    def heard(self, view: JobView) -> None:
        """A job's heartbeat."""
        if view.fingerprint is not None and view.job in self._homes:
            self._homes[view.job].fingerprints.add(view.fingerprint)

    def ended(self, job: str) -> None:
        """A job is over: its cluster may be gone soon, so what it has measured is written at once."""
        place = self._homes.pop(job, None)
        if place is not None:
            place.hurry = True

    async def save(self, *, now: bool = False) -> None:
        """Write what is new, where that is due (or everywhere, and wait for that a little)."""
        for key, place in self._places.items():
            due = now or place.hurry or time.monotonic() - place.saved_s >= _EVERY_S
            if due and place.version != self._knowledge.version and place.loading.done() and not place.saving:
                place.saving = True
                task = asyncio.get_running_loop().create_task(self._save(key, place))
                self._saves.add(task)
                task.add_done_callback(self._saves.discard)
            elif place.version == self._knowledge.version:
                place.hurry = False
        if now and self._saves:
            await asyncio.wait(self._saves, timeout=_SAVE_TIMEOUT_S)

    async def _save(self, key: tuple[str, str], place: _Place) -> None:
        version, memory = self._knowledge.version, self._knowledge.memory(place.fingerprints)
        place.hurry, place.saved_s = False, time.monotonic()
        try:
            if memory.steps:
                await place.calls.run(
                    "writing what jobs have measured", lambda: place.store.save(memory), timeout_s=_CALL_TIMEOUT_S
                )
            place.version = version
        except Exception as error:  # the next round tries again
            logger.warning("what jobs have measured cannot be written to %s: %s", key[1], error)
        finally:
            place.saving = False
