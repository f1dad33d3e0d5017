"""Counts of a job's lost workers and complete losses so far, and the history of its size (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_ray.checkpoints.interval import FIRST_INTERVAL_S, mean_time_between_losses_s
from elastic_ray.events import EventKind
from elastic_ray.membership.instructions import Note

if TYPE_CHECKING:
    from elastic_ray.record.controller_state import ControllerState

MOST_FRUITLESS = 3  # restarts without a new checkpoint between them: what ends the job each time does so again


class Losses:
    """Counts of lost workers and of failures that cost a job all its workers, which limit the job's restarts.

    Losing all workers is a failure, and so is losing one worker to its own exception. ``FailureConfig.max_failures``
    limits the number of failures. If it is 0, Ray Train's default, the job restarts as long as it makes progress.
    Preemption, which saves the job between two steps, is not a failure.

    Args:
        max_failures: Number of failures that the job may restart after; 0 for no limit while it makes progress, -1 for
            no limit at all.
        restart: True if the job may restart when ``max_failures`` is 0; False if its first failure then ends it.
    """

    def __init__(self, max_failures: int, *, restart: bool = True) -> None:
        self._max_failures, self._restart = max_failures, restart
        self.lost = 0.0
        self.failures = self.raised = self.fruitless = self.saved_steps = 0
        self._just_raised = False  # since a group has trained last

    @property
    def counts(self) -> dict[str, Any]:
        """Counts to save for the next controller, as fields of ``ControllerState``."""
        return {name: getattr(self, name) for name in ("lost", "failures", "raised", "fruitless", "saved_steps")}

    def recall(self, state: ControllerState) -> None:
        """Restore the counts saved in ``state`` by the previous controller."""
        vars(self).update({name: getattr(state, name) for name in self.counts})

    def some_lost(self, before: int, after: int) -> None:
        """Count lost workers, each as a fraction 1 / ``before`` of the job, which now has ``after`` workers."""
        self.lost += max(0.0, 1.0 - after / max(before, 1))

    def one_raised(self) -> bool:
        """Count a worker lost to its own exception; return True if the other workers may continue training."""
        self.raised += 1
        self._just_raised = True
        return self._max_failures <= 0 or self.failures + self.raised <= self._max_failures

    def settled(self) -> None:
        """Record that a group is training again, so that a later loss is counted as a new one."""
        self._just_raised = False

    def all_lost(self, saved_steps: int) -> bool:
        """Record the loss of the entire job; return True if the job may restart."""
        self.lost += 1.0
        self.failures += 1
        if self._just_raised:  # the exception that has cost the job its last worker is this failure
            self.raised -= 1
        self._just_raised = False
        if self._max_failures:
            return self._max_failures < 0 or self.failures + self.raised <= self._max_failures
        if saved_steps > self.saved_steps:
            self.fruitless, self.saved_steps = 0, saved_steps
        self.fruitless += 1
        return self._restart and self.fruitless <= MOST_FRUITLESS

    def mean_time_s(self, observed_s: float) -> float:
        """Return the mean time between total losses [s], given an observation time of ``observed_s`` [s]."""
        return mean_time_between_losses_s(self.lost, observed_s)


_RESIZE_COST_S = 0.2  # before the first one was measured
STUCK_FAILURES = 10


class SizeHistory:
    """History of a job's size changes and starts; times are monotonic [s].

    Attributes are as in ``ControllerState``; ``settled_s`` is the time at which the last group was formed.
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

    @property
    def counts(self) -> dict[str, Any]:
        """History to save for the next controller, as fields of ``ControllerState``."""
        names = ("most_workers", "resizes", "resize_cost_s", "start_s", "launched_at_s")
        return {name: getattr(self, name) for name in names}

    def recall(self, state: ControllerState, at_s: float) -> None:
        """Restore the previous controller's history; ``at_s`` is the current time [s since the epoch]."""
        if state.launched_at_s is not None:
            self.launched(self.settled_s - max(0.0, at_s - state.launched_at_s), state.launched_at_s)
        self.most_workers, self.resizes = state.most_workers, state.resizes
        self.resize_cost_s, self.start_s = state.resize_cost_s, state.start_s
        self._first_s = self.settled_s if state.most_workers else None

    def launched(self, now_s: float, at_s: float) -> None:
        """Record that processes are starting without a training group; ``at_s`` is ``now_s`` in [s since the epoch]."""
        if self._launched_s is None:
            self._launched_s, self.launched_at_s = now_s, at_s

    def starting_s(self, now_s: float) -> float:
        """Return how long processes have been starting while no group is training [s]; 0 if none are starting."""
        return max(0.0, now_s - self._launched_s) if self._launched_s is not None else 0.0

    def start_detail(self, now_s: float) -> dict[str, float]:
        """Return ``{"start_s": seconds}``, the time since processes were launched; empty if none are starting."""
        return {"start_s": self.starting_s(now_s)} if self._launched_s is not None else {}

    def start_ended(self) -> None:
        """Record that the starting processes have formed a group or failed."""
        self._launched_s = self.launched_at_s = None

    def settled(self, note: Note, now_s: float) -> None:
        """Record that the new group described by ``note`` is training."""
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
        """Count a failed group; return True if many in a row have failed without a committed step in between."""
        self._stuck = (steps, self._stuck[1] + 1 if steps == self._stuck[0] else 1)
        return self._stuck[1] > STUCK_FAILURES

    def saves_soon(self, now_s: float) -> bool:
        """True if the job has trained too briefly for its first automatic checkpoint to be expected."""
        return now_s - (self._first_s or 0.0) < 2.0 * FIRST_INTERVAL_S
