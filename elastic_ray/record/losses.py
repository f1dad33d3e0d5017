"""What a job has lost so far (pure)."""

from __future__ import annotations

from elastic_ray.checkpoints.interval import mean_time_between_losses_s


class Losses:
    """Losses of members and of the whole job.

    A loss of all workers is a failure, of which ``FailureConfig.max_failures`` allows so many. To be preempted, saved
    between two steps, is none.

    Args:
        max_failures: failures that the job may restart after; -1 for no limit.

    Attributes:
        lost: losses so far, in whole jobs.
        failures: losses of all workers.
    """

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self.lost = 0.0
        self.failures = 0

    def recall(self, *, lost: float, failures: int) -> None:
        """What the controller before this one has counted."""
        self.lost, self.failures = lost, failures

    def some_lost(self, before: int, after: int) -> None:
        """A group has lost members; each counts as its part of the job, for what takes one often takes the others."""
        self.lost += max(0.0, 1.0 - after / max(before, 1))

    def all_lost(self) -> bool:
        """The whole job is lost; returns whether it may restart."""
        self.lost += 1.0
        self.failures += 1
        return self._max_failures < 0 or self.failures <= self._max_failures

    def mean_time_s(self, observed_s: float) -> float:
        """Mean time between losses of the whole job [s], after so long [s]."""
        return mean_time_between_losses_s(self.lost, observed_s)
