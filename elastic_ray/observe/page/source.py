"""Protocol of a page's source of facts, and the values it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from elastic_ray.events import JobEvent, JobStatus, WorkerInfo
from elastic_ray.observe.page.model import JobDetail, PageSnapshot
from placement.allocator.explaining import Explanation
from placement.allocator.snapshot import AllocatorLook
from placement.errors import InputError
from placement.simulator.results.outlook import Outlook


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Facts that do not change while a job runs."""

    min_workers: int
    max_workers: int
    storage: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobLook:
    """Answers of a job's controller."""

    job: str
    status: JobStatus | None = None
    facts: JobFacts | None = None  # None where it has not said
    events: tuple[JobEvent, ...] = ()  # those that are new, oldest first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeLook:
    """A living node as Ray lists it."""

    node: str
    address: str
    total: Mapping[str, float]  # its resources, without Ray's bookkeeping
    labels: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLook:
    """A cluster at one moment."""

    now_s: float
    allocator: AllocatorLook | None  # None while there is none
    jobs: tuple[JobLook, ...] = ()  # answers of the controllers that were asked this time
    alive: frozenset[str] = frozenset()  # names of the jobs whose controllers live
    nodes: tuple[NodeLook, ...] = ()
    problem: str = ""  # why this is not all; empty if it is


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """Answers of one job that are asked for only while somebody looks at it."""

    workers: tuple[WorkerInfo, ...] = ()
    explanation: Explanation | None = None  # the allocator's; None where it does not know the job


LOOKS = ("logs", "stack")
"""What can be asked of one worker's process."""


class ActionRefusedError(Exception):
    """Error raised if a job refuses an action; the message is the reason."""


class Source(Protocol):
    """Protocol of a source of facts.

    All calls may block, and come one at a time from a thread.
    """

    @property
    def period_s(self) -> float | None:
        """Time between two looks [s]; None where the facts do not change."""

    def look(self, now_s: float) -> PageSnapshot:
        """Return everything on the page."""

    def detail(self, job: str) -> JobDetail | None:
        """Return the detail of a job; None if it is unknown."""

    def process(self, job: str, rank: int, what: str) -> str:
        """Return a worker's last output (``logs``), or where its threads are (``stack``); not one at a time.

        Raises ActionRefusedError: there is no such worker, or it cannot be looked at.
        """

    def what_if(self, nodes: str, policy: str, now_s: float) -> tuple[tuple[Outlook, ...], tuple[Outlook, ...]]:
        """Return the running jobs on the nodes there are, and on others (``T4:4x8``).

        Raises InputError: the nodes or the policy are wrong, or there is nothing to ask about.
        """

    def act(self, job: str, action: str, workers: int | None) -> str:
        """Resize a job (to `workers`), or release, pause, resume or stop it, by the ``action``; return what was done.

        Raises ActionRefusedError: it cannot be done.
        """


class StoredPage:
    """Page of stored data; a ``Source``.

    Args:
        snapshot: everything but what belongs to one job.
    """

    def __init__(self, snapshot: PageSnapshot, details: Mapping[str, JobDetail]) -> None:
        self._snapshot, self._details = snapshot, details

    @property
    def period_s(self) -> float | None:
        """None: a stored page does not change."""
        return None

    def look(self, now_s: float) -> PageSnapshot:
        """Return everything on the page."""
        return self._snapshot

    def detail(self, job: str) -> JobDetail | None:
        """Return the detail of a job; None if it is unknown."""
        return self._details.get(job)

    def process(self, job: str, rank: int, what: str) -> str:
        """Nothing runs here; see ``Source``."""
        raise ActionRefusedError("this page shows what was stored: no process runs here")

    def what_if(self, nodes: str, policy: str, now_s: float) -> tuple[tuple[Outlook, ...], tuple[Outlook, ...]]:
        """Raise InputError, because no job runs here; see ``Source``."""
        raise InputError("what-if asks about jobs that run now, and none runs here")

    def act(self, job: str, action: str, workers: int | None) -> str:
        """Raise ActionRefusedError, because no job runs here; see ``Source``."""
        raise ActionRefusedError("this page shows what was stored: no job runs here")
