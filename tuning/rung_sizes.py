"""Numbers of workers for the trials in each rung, so that a sweep ends in time at the lowest cost (pure).

After Misra et al., "RubberBand: Cloud-based Hyperparameter Tuning" (EuroSys 2021). Successive halving with rungs
r_1 < ... < r_k = R and n trials admits n_i = ceil(n / eta^(i - 1)) trials to rung i, each making r_i - r_(i - 1)
reports. With W_i remaining reports in rung i, v(w) reports per second from a trial with w workers, and p_i trials
running side by side::

 seconds(i, w) = max(W_i / p_i, one trial's reports) / v(w)        p_i = min(n_i, trials at a time, slots / w)
 worker-seconds(i, w) = W_i w / v(w)

The sizes w_i minimise total worker-seconds, subject to total seconds fitting into the remaining time. With a budget
alone, they minimise total seconds subject to the remaining worker-seconds. v(w) is the trials' goodput model, fitted
while they are running, divided by the work per report so far; the sizes are updated at each report.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.arguments import NamesArguments
from placement.checks import check_kind, check_number
from placement.cluster.jobs import JobView, goodputs
from tuning.trials import Promise, TrialRecord

_MARGIN = 1.1  # by which the rest is to end early: changes of size take time, and trials pass rungs in any order
_LAST = 0.03  # part of the whole for what the margin of the last minutes is too short for
_MOST_POINTS = 200
_HOUR_S = 3600.0
_Point = tuple[float, float, tuple[int, ...]]  # seconds, worker-seconds, sizes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(NamesArguments):
    """Name and limits of a sweep: ``tuning.elastic(train, sweep=Sweep(deadline_s=3600))``.

    Attributes:
        name: Name of the sweep; by default, the name of the Tune experiment.
        deadline_s: Time from ``fit()`` until all trials should be done [s]; None for no limit. Trials in each rung (see
            ``Promise``) get the cheapest numbers of workers that meet the deadline.
        budget_usd: Limit on the cost of the trials' workers [USD]; None for no limit. Without a deadline, trials get
            the fastest numbers of workers that stay within the budget.
        usd_per_worker_h: Price per worker [USD/h]; required with a budget.

    Examples:
        >>> from tuning import Sweep
        >>> Sweep(deadline_s=3600.0).deadline_s
        3600.0
    """

    name: str | None = None
    deadline_s: float | None = None
    budget_usd: float | None = None
    usd_per_worker_h: float | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            check_kind("name", self.name, str, "the sweep's name, or None")
        for field, unit in (("deadline_s", "seconds"), ("budget_usd", "USD"), ("usd_per_worker_h", "USD per hour")):
            if (value := getattr(self, field)) is not None:
                check_number(field, value, above=0, unit=unit, finite=True)
        if self.budget_usd is not None and self.usd_per_worker_h is None:
            raise ValueError("budget_usd needs usd_per_worker_h, the price of a worker [USD/h], but got None")

    @property
    def planned(self) -> bool:
        """True if the sweep has a deadline or a budget, so that a number of workers is planned for each rung."""
        return self.deadline_s is not None or self.budget_usd is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Training that remains between the previous rung (point where trials are cut) and this one, for all trials."""

    trials: int  # that come into it, at least 1
    reports: float  # still to be made by all of them
    longest: float  # of these the most that one trial makes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RungSizes:
    """Number of workers per trial in each rung, with the expected time and cost of the rest of the sweep."""

    sizes: tuple[int, ...]
    seconds: float  # until the end
    worker_s: float  # worker-seconds until then
    feasible: bool  # whether that keeps the limits; if not, it comes closest


def rungs_left(promise: Promise, trials: int, records: Collection[TrialRecord]) -> tuple[Rung, ...]:
    """Return, for each rung, the training left between the previous rung and it, in a sweep of ``trials`` trials."""
    found, low, expected = [], 0, float(trials)
    for high in promise.rungs:
        made = [min(max(len(each.values) - low, 0), high - low) for each in records]
        entered = sum(each > 0 for each in made)
        missing = [high - low - each for each, record in zip(made, records, strict=True) if record.running and each]
        waiting = sum(record.running and not each for each, record in zip(made, records, strict=True))
        coming = max(trials - len(records), 0) + waiting
        fresh = min(max(math.ceil(expected) - entered, 0), coming)
        found.append(
            Rung(
                trials=max(entered + fresh, 1),
                reports=float(sum(missing) + fresh * (high - low)),
                longest=float(high - low if fresh else max(missing, default=0)),
            )
        )
        low, expected = high, expected / promise.reduction_factor
    return tuple(found)


def size_rungs(
    rungs: Sequence[Rung],
    rates: NDArray[np.float64],
    *,
    slots: int,
    at_once: int,
    seconds: float = math.inf,
    worker_s: float = math.inf,
) -> RungSizes:
    """Return the number of workers per trial, for each rung, that meets the limits at the lowest cost.

    Without a limit on ``seconds``, the fastest sizes within ``worker_s`` are chosen. If the limits cannot be met,
    ``feasible`` is False and the sizes are the closest possible.

    Args:
        rates: Element w - 1 is a trial's reports per second on w workers, 0 if w is invalid; at least one is above 0.
    """
    points: list[_Point] = [(0.0, 0.0, ())]
    able = [w for w, rate in enumerate(rates.tolist(), start=1) if rate > 0]
    usable = [w for w in able if w <= slots] or able[:1]
    for rung in rungs:
        options = [
            (max(rung.reports / side, rung.longest) / rates[w - 1], rung.reports * w / rates[w - 1], w)
            for w in usable
            for side in [max(1, min(rung.trials, at_once, slots // w))]
        ]
        points = _front([(t + dt, c + dc, (*sizes, w)) for t, c, sizes in points for dt, dc, w in options])
    fitting = [each for each in points if each[0] <= seconds and each[1] <= worker_s]
    if fitting:
        best = fitting[-1] if math.isfinite(seconds) else fitting[0]
    else:
        in_time = [each for each in points if each[0] <= seconds]
        best = in_time[-1] if in_time else points[0]
    return RungSizes(sizes=best[2], seconds=best[0], worker_s=best[1], feasible=bool(fitting))


def _front(found: Sequence[_Point]) -> list[_Point]:
    """Return the Pareto front of time and cost, fastest first, thinned out if it has too many points."""
    front: list[_Point] = []
    for each in sorted(found):
        if not front or each[1] < front[-1][1]:
            front.append(each)
    step = math.ceil(len(front) / _MOST_POINTS)
    return front if step == 1 else [*front[:-1:step], front[-1]]


class SweepPlanner:
    """Planner that keeps choosing the number of workers per trial while a sweep with ``trials`` trials is running.

    Args:
        begun_s: Time when the sweep started [s since the epoch].
    """

    def __init__(self, sweep: Sweep, promise: Promise, trials: int, begun_s: float) -> None:
        self._sweep, self._promise, self._trials, self._begun_s = sweep, promise, trials, begun_s
        self._seen_s, self._spent_s, self._at_once = begun_s, 0.0, 1
        self.note = ""
        """What its user must know: that a limit cannot be kept, and what would do; empty otherwise."""

    def sizes(
        self,
        records: Mapping[str, TrialRecord],
        views: Sequence[JobView],
        slots: Mapping[str, Sequence[int]],
        now_s: float,
    ) -> dict[str, int]:
        """Return the number of workers for each running trial, keyed by trial; empty until a speed is known."""
        self._spent_s += max(now_s - self._seen_s, 0.0) * sum(view.workers for view in views)
        self._seen_s, self._at_once = now_s, max(self._at_once, len(views))
        rates = _rates(records, views, slots)
        if not rates.any():
            return {}
        left_s = worker_s = math.inf
        if self._sweep.deadline_s is not None:
            left_s = (self._begun_s + (1 - _LAST) * self._sweep.deadline_s - now_s) / _MARGIN
        price = self._sweep.usd_per_worker_h
        if self._sweep.budget_usd is not None and price is not None:
            worker_s = self._sweep.budget_usd / price * _HOUR_S - self._spent_s
        room = max(sum(each) for each in slots.values())
        rungs = rungs_left(self._promise, self._trials, tuple(records.values()))
        found = size_rungs(rungs, rates, slots=room, at_once=self._at_once, seconds=left_s, worker_s=worker_s)
        self.note = "" if found.feasible else self._refusal(found, now_s)
        ends = self._promise.rungs
        sized: dict[str, int] = {}
        for view in views:
            made = len(records[view.job].values) if view.job in records else 0
            rung = min(sum(end <= made for end in ends), len(ends) - 1)
            sized[view.job] = min(max(found.sizes[rung], view.min_workers), view.max_workers)
        return sized

    def _refusal(self, found: RungSizes, now_s: float) -> str:
        """Return why the limits cannot be kept, and what limits could be."""
        price, needs_s = self._sweep.usd_per_worker_h, now_s - self._begun_s + found.seconds * _MARGIN
        cost = f" and {(self._spent_s + found.worker_s) / _HOUR_S * price:.3g} USD" if price is not None else ""
        limits = {"deadline_s": self._sweep.deadline_s, "budget_usd": self._sweep.budget_usd}
        said = " and ".join(f"{name}={value:g}" for name, value in limits.items() if value is not None)
        return (
            f"{said} cannot be kept: by what its trials have told, the sweep takes {needs_s:.0f} s{cost} from its "
            "beginning; it continues with the sizes that come closest. Give it as much, or fewer trials or reports"
        )


def _rates(
    records: Mapping[str, TrialRecord], views: Sequence[JobView], slots: Mapping[str, Sequence[int]]
) -> NDArray[np.float64]:
    """Return mean reports per second on 1, 2, ... workers over all trials with known speed; empty without any."""
    seconds: list[NDArray[np.float64]] = []
    for view in views:
        made = len(records[view.job].values) if view.job in records else 0
        speeds = goodputs(view, slots[view.job]) if made and view.progress is not None else np.zeros(0)
        if not speeds.any() or view.progress is None or not view.progress.done or not view.init_batch_size:
            continue
        usable = [view.min_workers <= w and view.sizes.allow(w) for w in range(1, len(speeds) + 1)]
        work = view.progress.done / made * view.init_batch_size
        with np.errstate(divide="ignore"):
            seconds.append(np.where(usable, work / speeds, math.inf))
    if not seconds:
        return np.zeros(0)
    least = min(len(each) for each in seconds)
    mean: NDArray[np.float64] = np.mean([each[:least] for each in seconds], axis=0)
    return 1.0 / mean
