"""Losses of a job so far (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_ray.checkpoints.interval import FIRST_INTERVAL_S, mean_time_between_losses_s
from elastic_ray.events import EventKind
from elastic_ray.membership.instructions import Note

if TYPE_CHECKING:
    from elastic_ray.record.controller_state import ControllerState

MOST_FRUITLESS = 3  # restarts without a new checkpoint between them: what ends the job each time does so again


class Losses:
    """Losses of members and of the whole job.

    A loss of all workers is a failure, and so is that of one to an exception of its own; ``FailureConfig.max_failures``
    allows so many. Where that is 0, as Ray
    Train has it by default, the job restarts for as long as it makes progress. To be preempted, saved between two
    steps, is no failure.

    Args:
        max_failures: failures that the job may restart after; 0 for as long as it makes progress, -1 for no limit.
        restart: whether 0 allows that; else the first failure is the last.

    Attributes:
        lost: losses so far, in whole jobs.
        raised: workers that were lost to an exception of their own.
        fruitless: restarts since a checkpoint was newer than at the one before.
        saved_steps: steps of the newest checkpoint at the last restart.
    """

    def __init__(self, max_failures: int, *, restart: bool = True) -> None:
        self._max_failures, self._restart = max_failures, restart
        self.lost = 0.0
        self.failures = self.raised = self.fruitless = self.saved_steps = 0
        self._just_raised = False  # since a group has trained last

    def recall(self, *, lost: float, failures: int, raised: int, fruitless: int, saved_steps: int) -> None:
        """Restore the counts of the controller before."""
        self.lost, self.failures, self.raised = lost, failures, raised
        self.fruitless, self.saved_steps = fruitless, saved_steps

    def some_lost(self, before: int, after: int) -> None:
        """Count lost members, each as its part of the job, because losses often come together."""
        self.lost += max(0.0, 1.0 - after / max(before, 1))

    def one_raised(self) -> bool:
        """Count a worker that is lost to its own exception; returns whether the others may train on."""
        self.raised += 1
        self._just_raised = True
        return self._max_failures <= 0 or self.failures + self.raised <= self._max_failures

    def settled(self) -> None:
        """Close the losses: a group trains after the last one."""
        self._just_raised = False

    def all_lost(self, saved_steps: int) -> bool:
        """Record the loss of the whole job; True if it may restart.

        Args:
            saved_steps: steps of its newest checkpoint; 0 without one.
        """
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
        """Mean time between losses of the whole job [s], after so long [s]."""
        return mean_time_between_losses_s(self.lost, observed_s)


_RESIZE_COST_S = 0.2  # before the first one was measured
_STUCK_FAILURES = 10


class SizeHistory:
    """History of a job's sizes; times are monotonic [s].

    Attributes:
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
        """Restore the history of the controller before; the time now is ``at_s`` [s since the epoch]."""
        if state.launched_at_s is not None:
            self.launched(self.settled_s - max(0.0, at_s - state.launched_at_s), state.launched_at_s)
        self.most_workers, self.resizes = state.most_workers, state.resizes
        self.resize_cost_s, self.start_s = state.resize_cost_s, state.start_s
        self._first_s = self.settled_s if state.most_workers else None

    def launched(self, now_s: float, at_s: float) -> None:
        """Record that processes start while no group trains; ``at_s`` is the same time in seconds since the epoch."""
        if self._launched_s is None:
            self._launched_s, self.launched_at_s = now_s, at_s

    def starting_s(self, now_s: float) -> float:
        """Return for how long processes have been starting while no group trains [s]; 0 where one does."""
        return max(0.0, now_s - self._launched_s) if self._launched_s is not None else 0.0

    def told_of_start(self, now_s: float) -> dict[str, float]:
        """Return the starting time as an event's detail; empty if no worker starts."""
        return {"start_s": self.starting_s(now_s)} if self._launched_s is not None else {}

    def start_ended(self) -> None:
        """End the present start, which gave no group."""
        self._launched_s = self.launched_at_s = None

    def settled(self, note: Note, now_s: float) -> None:
        """Record that a group trains."""
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
        """True if group after group fails without progress (ranks that run different code, a cut network).

        Args:
            steps: committed when the present one failed.
        """
        self._stuck = (steps, self._stuck[1] + 1 if steps == self._stuck[0] else 1)
        return self._stuck[1] > _STUCK_FAILURES

    def stuck_because(self, reason: str) -> str:
        """Return the message for a stuck job."""
        return f"{_STUCK_FAILURES} groups in a row failed without a single step; the last: {reason}"

    def saves_soon(self, now_s: float) -> bool:
        """True if the job has trained for so short a time that it need not have saved itself."""
        return now_s - (self._first_s or 0.0) < 2.0 * FIRST_INTERVAL_S
