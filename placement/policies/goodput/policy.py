"""``goodput``: workers go where they shorten the queue most, and only if the change pays back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from placement.checks import check_number
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.goodput.remaining import overdue, rank_weights, seconds_left
from placement.goodput.speeds import GoodputCache
from placement.policies.goodput.local_search import improve, present_placements
from placement.policies.goodput.mixed_types import MixedTypes
from placement.policies.goodput.speed_value import SpeedValue
from placement.policies.goodput.tables import OptionTable, Placement, build
from placement.policies.shared.base import Target, count, held_reason

_MOST_URGENT = 10.0  # a job that is late weighs at most so many times more
_ROUNDS = 6  # a decision is repeated from its own outcome until it stays; more than two are rare


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GoodputPolicy:
    """Maximises the sum over jobs of weight x phi(speed) - max(weight, charge) x (phi(speed) - phi(speed x discount)).

    * speed: goodput of an option over that on the job's smallest size; measured step times count before the fitted
      model (``placement.goodput.speeds``).
    * weight = ``JobView.weight`` x (rank / n)^a, rank 1 for the job with most work left: heSRPT's idea
      (``remaining.rank_weights``), with GPUs of several types softened the more the emptier the cluster is: the last
      few long jobs share the best type rather than end one after the other. It uses declared epochs x measured
      progress per epoch; jobs that declare nothing weigh as much as the middle one. A job that would end later than
      ``late`` times its fair time (``remaining.overdue``) weighs more by that ratio, at most ten times, so that no job
      starves.
    * discount = H' / (H' + d) for anything but staying as it is, d = ``resize_cost_s`` and H' = min(horizon,
      remaining time); another 1 / (1 + hysteresis) for taking workers away or moving. What it takes is charged at a
      weight of ``charge`` at least: while a job pauses its GPUs serve nobody, whosever they are, and a long job would
      else pause for every short one that comes and goes. Where there is one GPU type, those that are idle in the
      outcome are given without that charge, to jobs that gain by them more than the pause costs and ``hysteresis``.
    * phi(s) = (s^p - 1) / p. With p = 0, log s, the sum is proportionally fair (Nash's bargaining solution): p =
      ``fair_power`` where no length is known. Where all are, p = ``power``; where some are, p is between the two by
      their part, and the others count as long as these are on average. On a crowded cluster (more than ``crowd`` jobs
      for each worker that fits) p is larger with the crowd, up to 1: the nearer each job is to one
      worker, the less there is to gain by sharing evenly, and with p = 1 the sum becomes "shortest remaining time
      first", which is optimal where speed grows linearly. With fewer than half of ``crowd`` it falls towards 0: there
      is enough for all, and even shares end soonest.

    Minimums come first (``admission``), except on a crowded cluster: there a job may wait, for which weight x phi(0)
    is the price, and a running one may be stopped if it says what that costs (``JobView.stop_cost_s``). Then every
    job takes argmax of value - price x workers, with one dual price per GPU type (``dual_prices``), among sizes that
    leave no scattered room; what is left is filled with any size. The outcome replaces the present allocation only if
    it is worth more after all costs of changing (``local_search``), so that equal inputs change nothing. A job's
    workers are all of one GPU type, but for those that a job with ``JobView.mixed_gpu_types`` gets from the slots that
    are left (``mixed_types``).

    The defaults are round numbers; between them and their neighbours (p 0.4 to 0.7, a 0.7 to 1.5, H 200 to 400 s) the
    average completion time of a trace moves by 1 to 4 %, down on some and up on others.

    Attributes:
        horizon_s: least H, time within which a change must pay back [s]; H is the mean time that a size of this job has
            lasted if that is longer. So a job whose changes cost minutes does not follow every short job that comes and
            goes, and does not stay at one worker for days either: the longer it stays, the more a change may cost.
        crowd: jobs for each worker that fits from which a cluster is crowded.
        hysteresis: relative gain that is worth taking a worker away from a running job for.
        exponent: a; 0 weighs all jobs alike.
        power: p where all lengths are known and jobs are between half of ``crowd`` and ``crowd``; see above.
        fair_power: p where none is.
        late: estimated finish-time fairness from which a job weighs more.
        charge: least weight of what a pause costs, as a part of the largest ``JobView.weight``.
        sharpness: how sharply a job of twice the length counts as longer where there are ``crowd`` jobs; it is
            proportional to the jobs, 1 at least, and infinite with one GPU type.
        lengths: whether to use declared lengths.
    """

    horizon_s: float = 300.0
    crowd: float = 0.25
    hysteresis: float = 0.05
    exponent: float = 1.0
    power: float = 0.5
    fair_power: float = 0.0
    late: float = 3.0
    charge: float = 0.5
    sharpness: float = 2.0
    lengths: bool = True
    _cache: GoodputCache = dataclasses.field(default_factory=GoodputCache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number("horizon_s", self.horizon_s, above=0, unit="seconds")
        check_number("crowd", self.crowd, above=0, unit="jobs for each worker")
        for field in ("hysteresis", "exponent", "charge", "sharpness"):
            check_number(field, getattr(self, field), least=0)
        for field in ("power", "fair_power"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field} must be between 0 and 1, but got {getattr(self, field)}")
        check_number("late", self.late, least=1)

    @property
    def name(self) -> str:
        """See ``Policy``."""
        return "goodput"

    @property
    def prices(self) -> Mapping[str, float]:
        """Dual price of a slot by GPU type in the last decision; empty before the first."""
        return dict(self._cache.prices)

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """See ``Policy``."""
        if not any(view.mixed_gpu_types for view in jobs):
            return self._on_one_type_each(jobs, cluster, now_s)
        mixed = MixedTypes(cluster=cluster, horizon_s=self.horizon_s, hysteresis=self.hysteresis, cache=self._cache)
        alone = [mixed.on_one_type(view) for view in jobs]
        return mixed.extend(jobs, self._on_one_type_each(alone, cluster, now_s))

    def _on_one_type_each(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """The decision with all workers of a job on one GPU type."""
        instance = build(jobs, cluster, self._cache)
        utility = self.utility(instance, now_s)
        placements, valid = present_placements(instance)
        before, waiting = placements, dict[int, str]()
        for _ in range(_ROUNDS):
            better, waiting = improve(instance, utility, placements, valid)
            if better is None:  # Nothing better: keep each valid placement, drop jobs whose nodes have shrunk.
                placements = [placement if ok else Placement() for placement, ok in zip(placements, valid, strict=True)]
                break
            placements, valid = better, [True] * len(better)
        speed = instance.speed_at(placements).tolist()
        targets = {}
        for j, view in enumerate(instance.views):
            here = placements[j]
            if here.place:
                reason = _reason(instance, utility, j, (before[j], here), speed[j])
            else:
                reason = waiting.get(j) or "waits: nothing is left"
            targets[view.job] = _target(instance, here, f"goodput: {reason}")
        return targets

    def utility(self, instance: OptionTable, now_s: float) -> SpeedValue:
        """What each job's speed is worth now."""
        views = instance.views
        left_s = seconds_left(views, instance.rate) if self.lengths else np.full(len(views), np.nan)
        untold = np.array([view.progress is None for view in views], dtype=np.bool_)
        unknown = np.isnan(left_s) & ~untold
        if np.isfinite(left_s[~untold]).any():
            # One that has yet to start can tell nothing, and others may be the first of their model: they count as long
            # as the rest is on average. Were they of unknown length, lengths would count for nothing until the last of
            # them is known, and with each arrival jobs that wait would start, and stop again.
            left_s = np.where(untold | unknown, np.nanmean(left_s[~untold]), left_s)
        known = len(views) > 0 and not np.isnan(left_s).any()
        room = self.crowd * max(float(instance.capacities.sum()), 1.0)
        crowd = len(views) / room if instance.alike and known else 1.0
        # Sizes on one type are shared out finely anyway; of several, the best would go whole to the one that is ahead.
        sharpness = max(self.sharpness * crowd, 1.0) if len(instance.pools) > 1 else math.inf
        weight = rank_weights(left_s, self.exponent, sharpness)
        weight = weight * np.array([view.weight for view in views], dtype=np.float64)
        if known:
            share = max(float(instance.capacities.sum()) / len(views), 1.0) if instance.alike else 1.0
            fair = np.where(instance.possible & (instance.sizes <= share), instance.speed, 0.0).max(axis=1, initial=0.0)
            lateness = overdue(views, left_s, instance.rate, np.maximum(fair, 1.0), now_s)
            weight = weight * np.clip(np.nan_to_num(lateness, nan=1.0) / self.late, 1.0, _MOST_URGENT)
        cost_s = np.array([view.resize_cost_s for view in views], dtype=np.float64)
        lasted_s = np.array([max(now_s - v.submitted_s, 0.0) / (v.restarts + 1) for v in views], dtype=np.float64)
        guessed = float(unknown.mean()) if known else 1.0
        power = self.power + guessed * (self.fair_power - self.power)
        return SpeedValue(
            weight=weight,
            left_s=left_s,
            cost_s=cost_s,
            power=min(power * max(min(2.0 * crowd, 1.0), crowd), 1.0) if known else self.fair_power,
            horizon_s=np.maximum(self.horizon_s, lasted_s),
            hysteresis=self.hysteresis,
            charge=self.charge * max((view.weight for view in views), default=1.0),
            crowded=crowd > 1.0,
        )


def _target(instance: OptionTable, placement: Placement, reason: str) -> Target:
    """What a job is to have, and where."""
    if not placement.place:
        return Target(workers=0, reason=reason)
    pool = instance.pools[placement.pool]
    nodes = {pool.node_ids[i]: workers for i, workers in sorted(placement.place.items())}
    return Target(workers=placement.workers, reason=reason, nodes=nodes)


def _reason(
    instance: OptionTable, utility: SpeedValue, j: int, placements: tuple[Placement, Placement], speed: float
) -> str:
    """The decision for one job as a sentence."""
    view, (before, after) = instance.views[j], placements
    if view.held_at is not None:
        return held_reason(view, after.workers)
    if after == before:
        text = f"stays at {count(after.workers)}, speed {speed:.2f}"
    elif not before.place:
        text = f"starts with {count(after.workers)}, speed {speed:.2f}"
    else:
        text = f"{view.workers} -> {count(after.workers)}: speed {speed:.2f}"
    larger = instance.possible[j] & (instance.pool_of == after.pool) & (instance.sizes > after.workers)
    if larger.any():
        c = int(np.flatnonzero(larger)[0])
        more = "one" if instance.sizes[c] == after.workers + 1 else str(int(instance.sizes[c]) - after.workers)
        text += f", {more} more would add {instance.speed[j, c] - speed:.2f}"
    else:
        text += ", the most it can use now"
    scale = "assumed, no model yet" if view.goodput is None else "fitted and measured"
    return f"{text} ({scale}); its weight is {utility.weight[j]:.2f}, a resize costs {view.resize_cost_s:.3g} s"
