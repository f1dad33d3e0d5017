"""Estimates of when waiting jobs would start, renewed at intervals (pure)."""

from __future__ import annotations

from collections.abc import Callable

from placement.allocator.snapshot import CoreSnapshot
from placement.planning.start_times import start_times

EVERY_S = 5.0


class StartTimes:
    """Answers for many jobs from one look at the cluster."""

    def __init__(self, look: Callable[[], CoreSnapshot]) -> None:
        self._look = look
        self._starts: dict[str, float] = {}
        self._looked_s: float | None = None

    def of(self, job: str, now_s: float) -> float | None:
        """Seconds until the job has its smallest size, of one that has no workers; None where that cannot be told.

        Args:
            now_s: present time [s since the epoch]; a clock that went back makes the last look an old one.
        """
        if self._looked_s is None or not 0.0 <= now_s - self._looked_s < EVERY_S:
            self._starts, self._looked_s = self._estimate(), now_s
        start_s = self._starts.get(job)
        return None if start_s is None else max(0.0, start_s - (now_s - self._looked_s))

    def _estimate(self) -> dict[str, float]:
        seen = self._look()
        waiting = [state.view for state in seen.jobs.values() if not state.target and not state.view.paused]
        running = [(state.view, state.target) for state in seen.jobs.values() if state.target]
        return start_times(waiting, running, seen.cluster) if waiting else {}
