"""Weights of a sweep's trials, from rungs, ranks and remaining budget (pure).

A sweep ends when its longest survivor does. A trial's share should therefore grow with the training still *expected* of
it: high if it will probably continue to the end, low if it is about to be cut. With budget t (reports made so far),
rungs r_1 < r_2 < ... < R where successive halving keeps one trial in eta, and s the chance of passing the next rung r::

 expected = (r - t) + s (R - r)                     [reports]
 weight   = expected / mean expected of the running trials, within [1 / 4, 4]

s follows from the trial's rank among all trials with at least as many reports, including those that were cut or have
ended. With q the fraction of them that it beats, s is 1 if q >= 1 - 1 / eta (it would be kept now), and falls linearly
to 0 for the worst trial. A rank among only a few trials is unreliable, so s = (n s_rank + 1) / (n + eta), that is, a
prior of 1 / eta that counts as much as eta trials.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ray.events import flattened
from placement.arguments import NamesArguments
from placement.checks import check_number, check_whole

_MOST = 4.0
_MOST_RUNGS = 32  # that are shown


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Promise(NamesArguments):
    """Rule for comparing a sweep's running trials, so that the best get more workers; fields as in ASHAScheduler.

    Attributes:
        metric: Name of the reported metric; a nested metric is named as in Ray Tune, "eval/accuracy".
        mode: "max" if a larger metric is better, "min" otherwise.
        max_t: Number of reports after which a trial that is never stopped early ends; None uses the largest number of
            reports that any trial has made.
        grace_period: Number of reports at the first rung. At each rung, the scheduler stops all but the best trials.
        reduction_factor: Ratio of consecutive rungs (eta); one trial in ``reduction_factor`` passes a rung.

    Examples:
        >>> from tuning import Promise
        >>> Promise(metric="loss", mode="min").grace_period
        1
    """

    metric: str
    mode: str
    max_t: int | None = 100
    grace_period: int = 1
    reduction_factor: float = 4.0

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"metric must be the name of a reported metric, but got {self.metric!r}")
        if self.mode not in ("max", "min"):
            raise ValueError(f"mode must be 'max' or 'min', but got {self.mode!r}")
        check_whole("grace_period", self.grace_period)
        if self.max_t is not None:
            check_whole("max_t", self.max_t)
        if not 1 <= self.grace_period <= self._limit:
            raise ValueError(
                f"grace_period must be between 1 and max_t ({self._limit:g}) reports, but got {self.grace_period}"
            )
        check_number("reduction_factor", self.reduction_factor, above=1)

    @property
    def _limit(self) -> float:
        return math.inf if self.max_t is None else self.max_t

    @property
    def patience(self) -> int:
        """Number of reports that makes a trial fail if none has the metric; equal to the second rung (cut)."""
        return self.next_rung(self.grace_period)

    @property
    def rungs(self) -> tuple[int, ...]:
        """Numbers of reports when trials may be stopped, ending with ``max_t``; empty if ``max_t`` is None."""
        if self.max_t is None:
            return ()
        found = [self.grace_period]
        while found[-1] < self.max_t and len(found) < _MOST_RUNGS:
            found.append(self.next_rung(found[-1]))
        return tuple(sorted({*found, self.max_t}))

    def next_rung(self, reports: int) -> int:
        """Return the number of reports at the next rung (cut) after the given number of reports, at most ``max_t``."""
        if self.max_t is not None and reports >= self.max_t:
            return self.max_t
        passed = math.log(max(reports / self.grace_period, 1.0)) / math.log(self.reduction_factor)
        rung = self.grace_period * self.reduction_factor ** max(math.floor(passed) - 1, 0)
        while rung <= reports:
            rung *= self.reduction_factor
        return math.ceil(min(self._limit, rung))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """History of one trial: its metric after each report, and whether the trial is running."""

    trial: str
    values: tuple[float, ...] = ()  # the metric after 1, 2, ... reports; NaN where it was not reported.
    running: bool = True  # whether it still trains; one that was cut or has ended is only compared with

    def told(self, before: int, values: tuple[float, ...]) -> TrialRecord:
        """Return a record that keeps the first ``before`` metric values and replaces all later ones with ``values``."""
        kept = self.values[:before]
        return dataclasses.replace(self, values=(*kept, *(math.nan,) * (before - len(kept)), *values))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialWeight:
    """Factor (1/4 to 4) for a running trial's speed in the allocator's decisions, with its reason."""

    value: float
    reason: str


def weights(records: Sequence[TrialRecord], promise: Promise | None) -> dict[str, TrialWeight]:
    """Return a weight for every running trial, about 1 on average in [1 / 4, 4]; a better one never weighs less."""
    running = [each for each in records if each.running]
    if promise is None:
        return {each.trial: TrialWeight(value=1.0, reason="trials are not compared") for each in running}
    longest = promise.max_t or max([promise.patience, *(len(each.values) for each in records)])
    chances = {each.trial: chance(each, records, promise) for each in running}
    expected = {each.trial: _expected(each, chances[each.trial], promise, longest) for each in running}
    mean = sum(expected.values()) / len(expected) if expected else 1.0
    return {
        each.trial: TrialWeight(
            value=min(_MOST, max(1.0 / _MOST, expected[each.trial] / mean)) if mean > 0 else 1.0,
            reason=f"passes rung {promise.next_rung(len(each.values))} with a chance of {chances[each.trial]:.2f}: "
            f"{expected[each.trial]:.1f} more reports expected, {mean:.1f} on average",
        )
        for each in running
    }


def chance(trial: TrialRecord, records: Sequence[TrialRecord], promise: Promise) -> float:
    """Return the chance (0 to 1) that a trial passes its next rung (cut), by its rank among trials that got as far."""
    eta = promise.reduction_factor
    prior = 1.0 / eta
    at = len(trial.values)
    own = _score(trial, at, promise)
    peers = [_score(each, at, promise) for each in records if each.trial != trial.trial and len(each.values) >= at]
    if not at or not peers:
        return prior
    beaten = sum(1.0 if own > peer else 0.5 if own == peer else 0.0 for peer in peers) / len(peers)
    ranked = min(1.0, beaten / (1.0 - prior))
    return (len(peers) * ranked + eta * prior) / (len(peers) + eta)


def _score(trial: TrialRecord, at: int, promise: Promise) -> float:
    """Return the metric after ``at`` reports, negated if smaller is better; NaN counts as worst."""
    value = trial.values[at - 1] if at else math.nan
    if math.isnan(value):
        return -math.inf
    return value if promise.mode == "max" else -value


def _expected(trial: TrialRecord, s: float, promise: Promise, longest: int) -> float:
    at = min(len(trial.values), longest)
    rung = min(promise.next_rung(at), longest)
    return max(rung - at, 0) + s * (longest - rung)


def score_of(metrics: Mapping[str, object], *names: str) -> float | None:
    """Return the metric value used to compare a report; NaN if it is not a number, None if it is missing.

    Args:
        names: Possible names of the metric; the first one in the report is used.
    """
    flat = dict(flattened(metrics))
    value = next((flat[name] for name in names if flat.get(name) is not None), None)
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def lacks_metric(metrics: Mapping[str, object], promise: Promise) -> str:
    """Return an error message for a report that lacks the metric of ``promise``, or has a non-number for it."""
    flat = dict(flattened(metrics))
    if flat.get(promise.metric) is not None:
        return f"trials are compared by {promise.metric!r}, but {flat[promise.metric]!r} is no number: report one"
    had = ", ".join(repr(name) for name in flat) or "nothing"
    return (
        f"trials are compared by Promise(metric={promise.metric!r}), but what was reported is {had}: report it, or "
        'let the promise name what is (a nested metric as "eval/accuracy")'
    )


def check_searchable(name: object) -> None:
    """Raise ValueError if a parameter has the same name as a setting the allocator controls (``num_workers``...)."""
    if name in ("num_workers", "scaling_config"):
        raise ValueError(
            f"{name!r} cannot be searched: the allocator changes a trial's workers while it runs, within "
            "scaling_config=ScalingConfig(num_workers=(min, max)). If it is something else of yours (a data loader's "
            "processes, say), give it another name"
        )


_PER_RUN = 2  # a scheduler may not have heard of the last one when it decides


class CheckpointCache:
    """Cache of Ray references to checkpoints in the cluster's memory, keyed by run (one start of a trial) and path."""

    def __init__(self) -> None:
        self._of_run: dict[str, dict[str, Any]] = {}
        self._until_s: dict[str, float] = {}

    def hold(self, run: str, path: str, reference: Any) -> None:
        """Add the Ray reference to a checkpoint that a run has reported; only the run's last two are kept."""
        mine = self._of_run.setdefault(run, {})
        mine[path] = reference
        while len(mine) > _PER_RUN:
            del mine[next(iter(mine))]

    def find(self, path: str | None) -> Any | None:
        """Return the reference to the checkpoint at this path, whichever run it belongs to; None if not cached."""
        return next((each[path] for each in self._of_run.values() if path in each), None)

    def over(self, run: str, until_s: float) -> None:
        """Keep a finished run's checkpoints until ``until_s`` [s, monotonic]; another trial may start from them."""
        if run in self._of_run:
            self._until_s[run] = until_s

    def expire(self, now_s: float) -> None:
        """Discard finished runs' checkpoints whose ``until_s`` (see ``over``) is before ``now_s`` [s, monotonic]."""
        for run in [run for run, until_s in self._until_s.items() if now_s > until_s]:
            del self._until_s[run]
            self._of_run.pop(run, None)
