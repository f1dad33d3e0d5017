"""A page whose facts do not change any more (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_ray.observe.page.model import JobDetail, PageSnapshot
from elastic_ray.observe.page.source import ActionRefusedError
from placement.errors import InputError
from placement.simulator.results.outlook import Outlook


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
        """None: there is nothing new to look for."""
        return None

    def look(self, now_s: float) -> PageSnapshot:
        """Everything on the page."""
        return self._snapshot

    def detail(self, job: str) -> JobDetail | None:
        """One job; None if it is not known."""
        return self._details.get(job)

    def what_if(self, nodes: str, policy: str, now_s: float) -> tuple[tuple[Outlook, ...], tuple[Outlook, ...]]:
        """Nothing runs here; see ``Source``."""
        raise InputError("what-if asks about jobs that run now, and none runs here")

    def act(self, job: str, action: str, workers: int | None) -> str:
        """Nothing runs here; see ``Source``."""
        raise ActionRefusedError("this page shows what was stored: no job runs here")
