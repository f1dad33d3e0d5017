"""What a job has lost so far (pure)."""

from __future__ import annotations

from elastic_ray.checkpoints.interval import mean_time_between_losses_s

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
        failures: losses of all workers.
        raised: workers that were lost to an exception of their own.
        fruitless: restarts since a checkpoint was newer than at the one before.
        saved_steps: steps of the newest checkpoint at the last restart.
    """

    def __init__(self, max_failures: int, *, restart: bool = True) -> None:
        self._max_failures = max_failures
        self._restart = restart
        self.lost = 0.0
        self.failures = self.raised = self.fruitless = self.saved_steps = 0
        self._just_raised = False  # since a group has trained last

    def recall(self, *, lost: float, failures: int, raised: int, fruitless: int, saved_steps: int) -> None:
        """What the controller before this one has counted."""
        self.lost, self.failures, self.raised = lost, failures, raised
        self.fruitless, self.saved_steps = fruitless, saved_steps

    def some_lost(self, before: int, after: int) -> None:
        """A group has lost members; each counts as its part of the job, for what takes one often takes the others."""
        self.lost += max(0.0, 1.0 - after / max(before, 1))

    def one_raised(self) -> bool:
        """Count a worker that is lost to its own exception; returns whether the others may train on."""
        self.raised += 1
        self._just_raised = True
        return self._max_failures <= 0 or self.failures + self.raised <= self._max_failures

    def settled(self) -> None:
        """A group trains after the last loss."""
        self._just_raised = False

    def all_lost(self, saved_steps: int) -> bool:
        """The whole job is lost; returns whether it may restart.

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
