"""Which checkpoints of a sweep's runs are in the cluster's memory, and for how long they stay there (pure)."""

from __future__ import annotations

from typing import Any

_PER_RUN = 2  # a scheduler may not have heard of the last one when it decides


class CheckpointCache:
    """References to checkpoints, by run and path."""

    def __init__(self) -> None:
        self._of_run: dict[str, dict[str, Any]] = {}
        self._until_s: dict[str, float] = {}

    def hold(self, run: str, path: str, reference: Any) -> None:
        """A run has reported a checkpoint; its last two stay."""
        mine = self._of_run.setdefault(run, {})
        mine[path] = reference
        while len(mine) > _PER_RUN:
            del mine[next(iter(mine))]

    def find(self, path: str | None) -> Any | None:
        """The checkpoint that is stored at this path; None if it is not held."""
        return next((each[path] for each in self._of_run.values() if path in each), None)

    def over(self, run: str, until_s: float) -> None:
        """A run is over; what it has reported is wanted until then [s, monotonic], as PBT pauses donors as well."""
        if run in self._of_run:
            self._until_s[run] = until_s

    def expire(self, now_s: float) -> None:
        """Forget runs whose time is over."""
        for run in [run for run, until_s in self._until_s.items() if now_s > until_s]:
            del self._until_s[run]
            self._of_run.pop(run, None)
