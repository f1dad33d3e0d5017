"""One worker at a time to whoever scores highest."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from placement.jobs import JobView
from placement.policies.base import Admission

Score = Callable[[JobView, int], "float | None"]
"""(job, its workers) -> what one more is worth; None if it wants no more."""


def climb(jobs: Sequence[JobView], admission: Admission, score: Score) -> dict[str, int]:
    """Workers of each admitted job, after one more went again and again to the highest score that still fits.

    Equal scores go in the order of arrival; held jobs stay at their floor. Takes from ``admission.room``.
    """
    counts = dict(admission.floors)
    views = {view.job: view for view in jobs}
    heap: list[tuple[float, tuple[float, str], str]] = []

    def offer(job: str) -> None:
        view = views[job]
        if view.held_at is None and counts[job] < view.useful_workers:
            worth = score(view, counts[job])
            if worth is not None:
                heapq.heappush(heap, (-worth, view.arrival, job))

    for job in counts:
        offer(job)
    while heap:
        _, _, job = heapq.heappop(heap)
        if admission.room.add(views[job], 1):
            counts[job] += 1
            offer(job)
    return counts
