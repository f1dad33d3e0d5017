"""Interval of automatic checkpoints (pure): balances the cost of a checkpoint against the cost of a failure.

With M the mean time between losses of the entire job and C the cost of one checkpoint, the interval that wastes the
least is about ``sqrt(2 C M) - C`` (Young, CACM 1974; Daly, FGCS 2006, equation 13). This holds for C < M / 2; otherwise
the interval is M.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

PRIOR_MEAN_TIME_S = 24 * 3600.0
"""Mean time between losses that a job starts from: one a day, as if it had been seen once."""
FIRST_INTERVAL_S = 30.0
"""Until the first checkpoint, which shows what they cost."""
_SHORTEST_S = 10.0
_LONGEST_S = 3600.0
_MOST_OVERHEAD = 0.005


def mean_time_between_losses_s(losses: float, observed_s: float) -> float:
    """Return the mean time between failures that cost a job all its workers [s], given a prior of one failure per day.

    Args:
        losses: number of such failures so far. Losing some of the workers counts as their fraction of the job, because
            the cause (a node failure, a spot market) often affects other workers too.
    """
    return (PRIOR_MEAN_TIME_S + observed_s) / (1.0 + losses)


def checkpoint_interval_s(cost_s: float, mean_time_s: float) -> float:
    """Return the time between automatic checkpoints [s], which take at most half a percent of the time up to 1 h."""
    best_s = math.sqrt(2.0 * cost_s * mean_time_s) - cost_s if cost_s < mean_time_s / 2.0 else mean_time_s
    return min(_LONGEST_S, max(best_s, _SHORTEST_S, cost_s / _MOST_OVERHEAD))


Kept = tuple[str, Mapping[str, Any]]


class CheckpointRetention:
    """Retention policy for a run's checkpoints: which to keep, and which to delete when a new one is added.

    Without a score, the newest ``num_to_keep`` are kept. With a score, the best ``num_to_keep`` are kept, and also the
    latest, because a run must always be able to continue from its latest state. A checkpoint whose score is missing or
    not a number ranks below all others. If scores are equal, the newer checkpoint is kept.
    """

    def __init__(
        self, *, num_to_keep: int | None = None, score_attribute: str | None = None, score_order: str = "max"
    ) -> None:
        """Check the rules and start without checkpoints."""
        if num_to_keep is not None and num_to_keep < 1:
            raise ValueError(f"num_to_keep must be None (keep all) or 1 or more, but got {num_to_keep}")
        if score_order not in ("max", "min"):
            raise ValueError(f"score_order must be 'max' or 'min', but got {score_order!r}")
        self._num_to_keep, self._score_attribute = num_to_keep, score_attribute
        self._sign = 1.0 if score_order == "max" else -1.0
        self._kept: list[Kept] = []

    def add(self, path: str, metrics: Mapping[str, Any]) -> tuple[str, ...]:
        """Add the checkpoint at ``path``; return the paths of the checkpoints that are no longer kept, oldest first."""
        self._kept = [entry for entry in self._kept if entry[0] != path]
        self._kept.append((path, metrics))
        if self._num_to_keep is None or len(self._kept) <= self._num_to_keep:
            return ()
        ranked = sorted(range(len(self._kept)), key=self._rank)
        staying = {*ranked[-self._num_to_keep :], len(self._kept) - 1}
        dropped = tuple(path for i, (path, _) in enumerate(self._kept) if i not in staying)
        self._kept = [entry for i, entry in enumerate(self._kept) if i in staying]
        return dropped

    def clear(self) -> None:
        """Remove all entries, so that the checkpoints found in storage can be added anew."""
        self._kept = []

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Path and metrics of each kept checkpoint, oldest first."""
        return tuple(self._kept)

    @property
    def latest(self) -> Kept | None:
        """Newest checkpoint; None if no checkpoint is kept."""
        return self._kept[-1] if self._kept else None

    def _rank(self, index: int) -> tuple[float, int]:
        """Return a checkpoint's sort key: by score, worst first, then by age, oldest first."""
        if self._score_attribute is None:
            return 0.0, index
        score = self._kept[index][1].get(self._score_attribute)
        try:
            value = math.nan if score is None else float(score) * self._sign
        except (TypeError, ValueError):
            value = math.nan
        return -math.inf if math.isnan(value) else value, index
