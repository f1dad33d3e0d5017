"""What a job has been through: the sizes it has had, and what starting and changing size have cost it (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_ray.checkpoints.interval import FIRST_INTERVAL_S
from elastic_ray.events import EventKind
from elastic_ray.membership.instructions import Note

if TYPE_CHECKING:
    from elastic_ray.record.controller_state import ControllerState

_RESIZE_COST_S = 0.2  # before the first one was measured
_STUCK_FAILURES = 10


class SizeHistory:
    """Times are monotonic [s].

    Attributes:
        most_workers: the largest group that it has had.
        resizes: how often it has changed size.
        resize_cost_s: pause of a change of size, the latest counting most [s].
        start_s: from the last start of processes to the group that they formed [s].
        settled_s: when the last group was formed.
        launched_at_s: when the processes began that start now [s since the epoch]; None where none start.
    """

    def __init__(self, now_s: float) -> None:
        self.most_workers = self.resizes = 0
        self.resize_cost_s = _RESIZE_COST_S
        self.start_s = 0.0
        self.settled_s = now_s
        self._first_s: float | None = None
        self._launched_s: float | None = None
        self.launched_at_s: float | None = None
        self._stuck: tuple[int, int] = (-1, 0)

    def recall(self, state: ControllerState, at_s: float) -> None:
        """What the controller before this one has seen; now is ``at_s`` [s since the epoch]."""
        if state.launched_at_s is not None:
            self.launched(self.settled_s - max(0.0, at_s - state.launched_at_s), state.launched_at_s)
        self.most_workers, self.resizes = state.most_workers, state.resizes
        self.resize_cost_s, self.start_s = state.resize_cost_s, state.start_s
        self._first_s = self.settled_s if state.most_workers else None

    def launched(self, now_s: float, at_s: float) -> None:
        """Processes start, and no group trains meanwhile; ``at_s`` is the same time in seconds since the epoch."""
        if self._launched_s is None:
            self._launched_s, self.launched_at_s = now_s, at_s

    def starting_s(self, now_s: float) -> float:
        """For how long processes have been starting while no group trains [s]; 0 where one does."""
        return max(0.0, now_s - self._launched_s) if self._launched_s is not None else 0.0

    def told_of_start(self, now_s: float) -> dict[str, float]:
        """The same as an event's detail; empty where none start."""
        return {"start_s": self.starting_s(now_s)} if self._launched_s is not None else {}

    def start_ended(self) -> None:
        """What was started is over, without a group."""
        self._launched_s = self.launched_at_s = None

    def settled(self, note: Note, now_s: float) -> None:
        """A group trains."""
        self.settled_s = now_s
        if self._launched_s is not None:
            self.start_s = now_s - self._launched_s
            self.start_ended()
            self._first_s = now_s if self._first_s is None else self._first_s
        self.most_workers = max(self.most_workers, note.to_workers)
        if note.kind is EventKind.RESIZE:
            self.resizes += 1
            self.resize_cost_s += 0.3 * (note.pause.pause_s - self.resize_cost_s)

    def is_stuck(self, steps: int) -> bool:
        """Whether group after group fails without progress (ranks that run different code, a cut network).

        Args:
            steps: committed when the present one failed.
        """
        self._stuck = (steps, self._stuck[1] + 1 if steps == self._stuck[0] else 1)
        return self._stuck[1] > _STUCK_FAILURES

    def stuck_because(self, reason: str) -> str:
        """What to say of it."""
        return f"{_STUCK_FAILURES} groups in a row failed without a single step; the last: {reason}"

    def saves_soon(self, now_s: float) -> bool:
        """Whether it has trained for so short a time that it need not have saved itself."""
        return now_s - (self._first_s or 0.0) < 2.0 * FIRST_INTERVAL_S
