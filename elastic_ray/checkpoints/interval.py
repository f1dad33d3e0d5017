"""Interval of automatic checkpoints (pure): the cost of a checkpoint against the cost of a loss.

With M the mean time between losses of the whole job and C what one checkpoint costs, the interval that wastes least is
about ``sqrt(2 C M) - C`` (Young, CACM 1974; Daly, FGCS 2006, equation 13). Below C = M / 2 only; beyond that, M.
"""

from __future__ import annotations

import math

PRIOR_MEAN_TIME_S = 24 * 3600.0
"""Mean time between losses that a job starts from: one a day, as if it had been seen once."""
FIRST_INTERVAL_S = 30.0
"""Until the first checkpoint, which shows what they cost."""
_SHORTEST_S = 10.0
_LONGEST_S = 3600.0
_MOST_OVERHEAD = 0.005


def mean_time_between_losses_s(losses: float, observed_s: float) -> float:
    """M, from what the job has seen and a prior of one loss a day.

    Args:
        losses: losses of the whole job so far; a member that was lost counts as its part of the job, for what takes one
            (a node's end, a spot market) often takes the others as well.
        observed_s: for how long they were counted [s].
    """
    if not (losses >= 0 and observed_s >= 0):
        raise ValueError(f"losses and observed_s must be 0 or more, but got {losses} and {observed_s}")
    return (PRIOR_MEAN_TIME_S + observed_s) / (1.0 + losses)


def checkpoint_interval_s(cost_s: float, mean_time_s: float) -> float:
    """Time from one automatic checkpoint to the next [s], between 10 s and an hour.

    Never so short that checkpoints take more than half a percent of the time, however often the job is lost.

    Args:
        cost_s: C, what one checkpoint takes from the training [s].
        mean_time_s: M [s].
    """
    if not (cost_s >= 0 and mean_time_s > 0):
        raise ValueError(f"cost_s must be 0 or more and mean_time_s above 0, but got {cost_s} and {mean_time_s}")
    best_s = math.sqrt(2.0 * cost_s * mean_time_s) - cost_s if cost_s < mean_time_s / 2.0 else mean_time_s
    return min(_LONGEST_S, max(best_s, _SHORTEST_S, cost_s / _MOST_OVERHEAD))
