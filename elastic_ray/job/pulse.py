"""Who has been silent for too long (pure but for the arguments)."""

from __future__ import annotations

from collections.abc import Iterable

# The controller's own hiccups are no silence of the workers: a gap between two looks counts at most this much.
_LONGEST_GAP_S = 0.3


class Pulse:
    """Silence of workers on a clock that stands still while the controller itself is held up.

    Args:
        timeout_s: silence after which a worker counts as hung.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._clock_s = 0.0
        self._looked_s: float | None = None
        self._heard_s: dict[str, float] = {}

    def heard(self, worker: str) -> None:
        """A sign of life."""
        self._heard_s[worker] = self._clock_s

    def forget(self, worker: str) -> None:
        """Expect nothing from it any more."""
        self._heard_s.pop(worker, None)

    def silent(self, now_s: float, members: Iterable[str]) -> list[tuple[str, float]]:
        """Members that have been silent for longer than the timeout, and for how long [s]."""
        if self._looked_s is not None:
            self._clock_s += min(max(0.0, now_s - self._looked_s), _LONGEST_GAP_S)
        self._looked_s = now_s
        quiet = [(w, self._clock_s - self._heard_s[w]) for w in members if w in self._heard_s]
        return [(worker, silence_s) for worker, silence_s in quiet if silence_s > self._timeout_s]
