"""What a job has lost so far, and what of it counts (pure)."""

from __future__ import annotations

from elastic_ray.durability import mean_time_between_losses_s


class Losses:
    """Losses of members and of the whole job.

    A loss of all workers is a failure, of which ``FailureConfig.max_failures`` allows so many; but not if the job was
    evicted (its nodes were to go and there were no others) and had saved itself by then. One whose nodes vanish without
    notice may be evicted too, for the allocator may see it first: it has had no time to save anything.

    Args:
        max_failures: failures that the job may restart after; -1 for no limit.
    """

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._lost = 0.0
        self._saved = False
        self.failures = 0
        self.evicted = False

    def evict(self, evicted: bool) -> bool:
        """Whether the job has nodes to go to; returns whether that is news."""
        news = evicted != self.evicted
        if news:
            self.evicted, self._saved = evicted, False
        return news

    def saved(self) -> None:
        """An automatic checkpoint is there."""
        self._saved = True

    def some_lost(self, before: int, after: int) -> None:
        """A group has lost members; each counts as its part of the job, for what takes one often takes the others."""
        self._lost += max(0.0, 1.0 - after / max(before, 1))

    def all_lost(self) -> bool:
        """The whole job is lost; returns whether it may restart."""
        self._lost += 1.0
        self.failures += not (self.evicted and self._saved)
        return self._max_failures < 0 or self.failures <= self._max_failures

    def mean_time_s(self, observed_s: float) -> float:
        """Mean time between losses of the whole job [s], after so long [s]."""
        return mean_time_between_losses_s(self._lost, observed_s)
