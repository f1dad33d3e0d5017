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
    """Facts that do not change while a job runs.

    Attributes:
        storage: its run directory.
    """

    min_workers: int
    max_workers: int
    storage: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobLook:
    """Answers of a job's controller.

    Attributes:
        events: those that are new, oldest first.
        facts: None where it has not said.
    """

    job: str
    status: JobStatus | None = None
    facts: JobFacts | None = None
    events: tuple[JobEvent, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeLook:
    """A living node as Ray lists it.

    Attributes:
        total: its resources, without Ray's bookkeeping.
    """

    node: str
    address: str
    total: Mapping[str, float]
    labels: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLook:
    """A cluster at one moment.

    Attributes:
        allocator: None while there is none.
        jobs: answers of the controllers that were asked this time.
        alive: names of the jobs whose controllers live.
        problem: why this is not all; empty if it is.
    """

    now_s: float
    allocator: AllocatorLook | None
    jobs: tuple[JobLook, ...] = ()
    alive: frozenset[str] = frozenset()
    nodes: tuple[NodeLook, ...] = ()
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """Answers of one job that are asked for only while somebody looks at it.

    Attributes:
        explanation: the allocator's; None where it does not know the job.
        ray_dashboard: its address, which has what workers print; empty without.
    """

    workers: tuple[WorkerInfo, ...] = ()
    explanation: Explanation | None = None
    ray_dashboard: str = ""


class ActionRefusedError(Exception):
    """A job does not do what it was asked to; the message is the reason."""


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

    def what_if(self, nodes: str, policy: str, now_s: float) -> tuple[tuple[Outlook, ...], tuple[Outlook, ...]]:
        """The running jobs on the nodes there are, and on others (``T4:4x8``).

        Raises:
            InputError: the nodes or the policy are wrong, or there is nothing to ask about.
        """

    def act(self, job: str, action: str, workers: int | None) -> str:
        """``resize`` (to so many workers), ``release``, ``pause``, ``resume`` or ``stop`` a job; returns what was done.

        Raises:
            ActionRefusedError: it cannot be done.
        """


class StoredPage:
    """Shows what was read once; a ``Source``.

    Args:
        snapshot: everything but what belongs to one job.
        details: of each job.
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

    def what_if(self, nodes: str, policy: str, now_s: float) -> tuple[tuple[Outlook, ...], tuple[Outlook, ...]]:
        """Raise InputError, because no job runs here; see ``Source``."""
        raise InputError("what-if asks about jobs that run now, and none runs here")

    def act(self, job: str, action: str, workers: int | None) -> str:
        """Raise ActionRefusedError, because no job runs here; see ``Source``."""
        raise ActionRefusedError("this page shows what was stored: no job runs here")
