"""Protocol of the page's data sources, and the values that a source returns."""

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
    """Facts about a job, from its specification, that do not change while the job runs."""

    min_workers: int
    max_workers: int
    storage: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobLook:
    """Answers that a job's controller gave in one poll."""

    job: str
    status: JobStatus | None = None
    facts: JobFacts | None = None  # None where it has not said
    events: tuple[JobEvent, ...] = ()  # those that are new, oldest first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeLook:
    """Description of a living node, as listed by Ray."""

    node: str
    address: str
    total: Mapping[str, float]  # its resources, without Ray's bookkeeping
    labels: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLook:
    """State of a cluster as found in one poll."""

    now_s: float
    allocator: AllocatorLook | None  # None while there is none
    jobs: tuple[JobLook, ...] = ()  # answers of the controllers that were asked this time
    alive: frozenset[str] = frozenset()  # names of the jobs whose controllers live
    nodes: tuple[NodeLook, ...] = ()
    problem: str = ""  # why this is not all; empty if it is


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """Answers about one job, requested only while somebody is viewing its details."""

    workers: tuple[WorkerInfo, ...] = ()
    explanation: Explanation | None = None  # the allocator's; None where it does not know the job


LOOKS = ("logs", "stack")
"""What can be asked of one worker's process."""


class ActionRefusedError(Exception):
    """Error raised if a job refuses an action; the message is the reason."""


class Source(Protocol):
    """Protocol of a source of the page; its methods may block, and are called one at a time (but ``process``)."""

    @property
    def period_s(self) -> float | None:
        """Time between two polls [s]; None if the data never changes."""

    def poll(self, now_s: float) -> PageSnapshot:
        """Return everything on the page, as of ``now_s``."""

    def detail(self, job: str) -> JobDetail | None:
        """Return the details of a job; None if the job is unknown."""

    def process(self, job: str, rank: int, what: str) -> str:
        """Return a worker's last output (``what="logs"``) or thread stacks (``"stack"``), even during other calls."""

    def what_if(self, nodes: str, policy: str, now_s: float) -> tuple[tuple[Outlook, ...], tuple[Outlook, ...]]:
        """Return the outlook (expected size and end) of each running job, on the existing nodes and on ``nodes``."""

    def act(self, job: str, action: str, workers: int | None) -> str:
        """Carry out ``action`` (resize to ``workers``, release, pause, resume or stop) and return what was done."""


class StoredPage:
    """Page of stored data, as a :class:`Source` that never changes."""

    def __init__(self, snapshot: PageSnapshot, details: Mapping[str, JobDetail]) -> None:
        self._snapshot, self._details = snapshot, details

    @property
    def period_s(self) -> float | None:
        """Always None, because a stored page does not change."""
        return None

    def poll(self, now_s: float) -> PageSnapshot:
        """Return the stored snapshot."""
        return self._snapshot

    def detail(self, job: str) -> JobDetail | None:
        """Return the details of a job; None if the job is unknown."""
        return self._details.get(job)

    def process(self, job: str, rank: int, what: str) -> str:
        """Raise ActionRefusedError, because a stored page has no running processes."""
        raise ActionRefusedError("this page shows a stored run, which has no processes")

    def what_if(self, nodes: str, policy: str, now_s: float) -> tuple[tuple[Outlook, ...], tuple[Outlook, ...]]:
        """Raise InputError, because a stored page has no running jobs."""
        raise InputError("what-if asks about jobs that run now, and none runs here")

    def act(self, job: str, action: str, workers: int | None) -> str:
        """Raise ActionRefusedError, because a stored page has no running jobs."""
        raise ActionRefusedError("this page shows what was stored: no job runs here")
