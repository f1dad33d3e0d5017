"""``cost_per_progress``: lowest cost, counting time as money; ``budget``: shortest times for an hourly budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from placement.autoscaling.objectives.base import UNKNOWN_S, Demand, NodeTypeOption, WantedSize, option_on, work_left
from placement.checks import check_number
from placement.cluster.jobs import Account, JobView
from placement.goodput.step_time import Floats
from placement.reasons import Cause, Reason
from placement.text import count

_LONGEST_S = 1e9  # a utility that stays flat has no value at infinity
_MARGIN = 1.1  # a deadline is planned for with so much time to spare: estimates of what is left are not exact


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompletionForecast:
    """Forecast of a job's completion on one node type, for each number of workers from 1."""

    offer: NodeTypeOption
    time_s: Floats  # until its end [s], infinity where it does not run
    usd: Floats  # for the nodes until then [USD]
    score: Floats  # what is minimised [USD]

    def cost(self, workers: int) -> str:
        """Return the remaining cost and time on this many workers, as text."""
        return f"{self.usd[workers - 1]:.3g} USD in {self.time_s[workers - 1] / 3600.0:.3g} h"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostPerProgress:
    """Objective that gives each job the size with the lowest remaining cost, counting time as money.

        score(k) = (price(k) + value) x T(k),    T(k) = (W - g s) / G(k) + s    if nodes have to start first

    with W the remaining work, G(k) the goodput on k workers, g the current goodput and s the start-up time. Per unit of
    progress, the score is (price + value) / G. A ``value`` of 0 minimises money alone, nearly always at the smallest
    size; the larger ``value``, the more may be spent to finish earlier. Among all ways to spend a given sum on a job
    whose G changes during training, a constant ``value`` gives the shortest time, since money is spent where it saves
    the most time (Lagrange).

    If a job declares the value of its completion (``JobView.utility``), that function replaces ``value`` once the job's
    length is known: the job gets the size with the largest surplus (``placement.cluster.utility``).

    A job with a deadline gets the cheapest size that meets it; a job with a budget gets the fastest size that its
    remaining budget can pay for. If no size qualifies, this is reported at once, and the job gets the size that comes
    closest. Both require the job's length; until it is known, ``value`` is used.

    A job changes its size only if the score improves by ``hysteresis``. A single job pays for whole nodes; several jobs
    pay for their shares of nodes.
    """

    name = "cost_per_progress"
    value_usd_per_h: float = 0.0  # what an hour less is worth, for each job [USD/h]
    hysteresis: float = 0.02  # relative gain that is worth a change

    def __post_init__(self) -> None:
        for field in ("value_usd_per_h", "hysteresis"):
            check_number(field, getattr(self, field), least=0)

    def decide(self, demand: Demand, now_s: float) -> Mapping[str, WantedSize]:
        """Return the wanted size of each job, keyed by job name; see ``Objective.decide``."""
        return {view.job: self._want(view, demand, now_s) for view in demand.jobs if demand.offers[view.job]}

    def _want(self, view: JobView, demand: Demand, now_s: float) -> WantedSize:
        """Return the job's best size and GPU type within its limits; see ``_blind`` for held or unknown jobs."""
        gpu = demand.gpus[view.job]
        options = demand.offers[view.job]
        if not options[0].known or view.held_at is not None:
            return _blind(view, option_on(options, gpu), now_s)
        forecasts = [self._forecast(view, offer, demand, now_s) for offer in options]
        left_usd = None if view.budget_usd is None else view.budget_usd - demand.spent_usd.get(view.job, 0.0)
        left_s = None if view.deadline_s is None else (view.deadline_s - now_s) / _MARGIN
        aim, note = "least cost", None
        if left_usd is not None or left_s is not None:
            if work_left(view) is None:
                note = Reason(Cause.UNPLANNED, (_limits(view),))
            else:
                aim = "soonest within its budget" if left_s is None else "least cost by its deadline"
                forecasts, note = _within(forecasts, left_s, left_usd)
        best, k = self._best(forecasts, view, gpu)
        reason = self._reason(view, best, k, aim if note is None else "best to be had")
        return WantedSize(job=view.job, workers=k, gpu=best.offer.kind.gpu_type, reason=reason, note=note)

    def _forecast(self, view: JobView, offer: NodeTypeOption, demand: Demand, now_s: float) -> CompletionForecast:
        """Forecast completion at every size; unknown work counts as ``UNKNOWN_S`` at current or smallest goodput."""
        rate = offer.rate
        sizes = np.arange(1, len(rate) + 1)
        here = demand.gpus[view.job] == offer.kind.gpu_type
        have = view.workers if here else 0
        now = _at(demand.offers[view.job], demand.gpus[view.job], view.workers)
        work = work_left(view)
        if work is None:
            work = (now or float(rate[rate > 0][0] if (rate > 0).any() else 1.0)) * UNKNOWN_S
        wait_s = np.where(sizes > have, offer.kind.startup_s, 0.0)
        change_s = np.where((sizes != have) & (have > 0), view.resize_cost_s, 0.0)
        meanwhile = np.minimum(now * wait_s, work)
        usd_per_h = offer.whole_usd if demand.alone else offer.part_usd
        # What never ends is the worst also where an hour costs nothing, and zero times infinity would be the best.
        with np.errstate(divide="ignore", invalid="ignore"):
            time_s = np.where(rate > 0, wait_s + change_s + (work - meanwhile) / rate, np.inf)
            usd = np.where(rate > 0, usd_per_h * time_s / 3600.0, np.inf)
            late_usd = self.value_usd_per_h * time_s / 3600.0
            if view.utility is not None and work_left(view) is not None:
                age_s = max(now_s - view.submitted_s, 0.0)
                late_usd = view.utility.at(np.array(age_s)) - view.utility.at(age_s + np.minimum(time_s, _LONGEST_S))
            score = np.where(rate > 0, usd + late_usd, np.inf)
        return CompletionForecast(offer=offer, time_s=time_s, usd=usd, score=score)

    def _best(
        self, forecasts: list[CompletionForecast], view: JobView, gpu: str | None
    ) -> tuple[CompletionForecast, int]:
        """Return the forecast and explored size with the lowest score, or the current type if it is hardly worse."""
        ranked: list[tuple[float, int, int]] = []
        for i, forecast in enumerate(forecasts):
            score = forecast.score[: forecast.offer.limit]
            k = max(int(np.argmin(score)), view.min_workers - 1)  # also where no size gets on: all are infinite
            stays = forecast.offer.kind.gpu_type == gpu
            if stays and 0 < view.workers <= len(score):
                at = view.workers - 1
                if score[at] <= score[k] * (1.0 + self.hysteresis):
                    k = at
            ranked.append((float(score[k]) * (1.0 if stays or gpu is None else 1.0 + self.hysteresis), i, k + 1))
        _, i, k = min(ranked)
        return forecasts[i], k

    def _reason(self, view: JobView, best: CompletionForecast, k: int, aim: str) -> Reason:
        if not np.isfinite(best.time_s[k - 1]):
            return Reason(Cause.NO_PROGRESS, (count(k),))
        known = "" if work_left(view) is not None else " for every hour on its present size"
        figures = f"{best.cost(k)}{known}, an hour is worth {self.value_usd_per_h:.3g} USD"
        return Reason(Cause.LEAST_COST, (aim, count(k), best.offer.kind.name), figures)


def _within(
    forecasts: list[CompletionForecast], left_s: float | None, left_usd: float | None
) -> tuple[list[CompletionForecast], Reason | None]:
    """Return the forecasts with options that miss a deadline or budget ranked last, and a reason if all do.

    With a deadline the cheapest option ranks first, with only a budget the fastest. If no option meets both, the
    fastest within the budget ranks first, else the cheapest.
    """
    met = [_meets(p, left_s, left_usd) for p in forecasts]
    if any(fits.any() for fits in met):
        by = "usd" if left_s is not None else "time_s"
        kept = [np.where(fits, getattr(p, by), np.inf) for p, fits in zip(forecasts, met, strict=True)]
        return [dataclasses.replace(p, score=_finite(score, p)) for p, score in zip(forecasts, kept, strict=True)], None
    paid = [_meets(p, None, left_usd) for p in forecasts]
    by = "time_s" if any(fits.any() for fits in paid) else "usd"
    rest = [
        dataclasses.replace(p, score=_finite(np.where(fits, getattr(p, by), np.inf) if by == "time_s" else p.usd, p))
        for p, fits in zip(forecasts, paid, strict=True)
    ]
    best = min(rest, key=lambda p: float(p.score.min()))
    k = int(np.argmin(best.score))
    limits = {
        "deadline": None if left_s is None else f"due in {max(left_s, 0.0) * _MARGIN / 3600.0:.3g} h",
        "budget": None if left_usd is None else f"{max(left_usd, 0.0):.3g} USD left",
    }
    what, figures = " and ".join(name for name in limits if limits[name]), "; ".join(filter(None, limits.values()))
    if not np.isfinite(best.time_s[k]):
        return rest, Reason(Cause.UNMET, (what, "no size is known to make progress"), figures)
    had = f"at best {count(k + 1)} on {best.offer.kind.name}"
    return rest, Reason(Cause.UNMET, (what, had), figures).with_figures(f"{best.cost(k + 1)} more")


def _meets(forecast: CompletionForecast, left_s: float | None, left_usd: float | None) -> NDArray[np.bool_]:
    fits = np.isfinite(forecast.time_s)
    if left_s is not None:
        fits &= forecast.time_s <= left_s
    if left_usd is not None:
        fits &= forecast.usd <= left_usd
    return fits


def _finite(score: Floats, forecast: CompletionForecast) -> Floats:
    """Return the scores, with options that miss the target ranked after all others, the fastest first.

    The scores stay finite, since exploration may allow no other option.
    """
    behind = 1e12 * (1.0 + forecast.time_s)
    finite: Floats = np.where(np.isfinite(score), score, behind)
    return finite


def _at(options: tuple[NodeTypeOption, ...], gpu: str | None, workers: int) -> float:
    """Return the current goodput [samples/s]; 0 while the job is waiting."""
    for offer in options:
        if offer.kind.gpu_type == gpu and 0 < workers <= len(offer.rate):
            return float(offer.rate[workers - 1])
    return 0.0


def _blind(view: JobView, offer: NodeTypeOption, now_s: float) -> WantedSize:
    """Return the size for a job whose speed is unknown or whose user has fixed the size."""
    k = offer.limit if view.held_at is None else len(offer.rate)
    k = max(min(k, len(offer.rate)), view.min_workers)
    held = view.held_at is not None
    reason = Reason(Cause.HELD, (view.held_at,)) if held else Reason(Cause.EXPLORES, (count(k),))
    note = None
    if not held and (view.deadline_s is not None or view.budget_usd is not None):
        note = Reason(Cause.UNPLANNED, (_limits(view),))
    if view.deadline_s is not None and view.deadline_s <= now_s:
        note = Reason(Cause.PASSED)
    return WantedSize(job=view.job, workers=k, gpu=offer.kind.gpu_type, reason=reason, note=note)


def _limits(view: JobView) -> str:
    """Return the limits that the user has set: deadline, budget, or both."""
    limits = {"deadline": view.deadline_s, "budget": view.budget_usd}
    return " and ".join(name for name, limit in limits.items() if limit is not None)


_PATIENCE_H = 2.0  # hours of budget that may be saved, or overspent, before the value changes e-fold
_MOST_FACTOR = 50.0  # of the value of an hour, up or down, by what has been saved or overspent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Objective that gives all jobs a common value of time, adjusted to spend an hourly budget.

    By Lagrange, minimising the mean completion time under a bound on the mean spending is the same as minimising

        sum over jobs of (value + price(k)) x T(k)

    with one ``value`` for all jobs and all times. A job's size then depends only on its own speed-up curve, and the
    cluster scales with the number of jobs (the boundary of optimal allocations in "BOA Constrictor", 2026). The value
    is not known in advance. It is

        B / n x exp(saved / (B x patience))

    with B the budget, n the mean number of jobs and saved = B x hours - spent: an integral controller, whose steady
    state is spending B. Near it, jobs with speed-up k^p spend value x p / (1 - p) each, B / n for p = 1/2. Past savings
    decay over a day, so that they are not spent all at once.

    Jobs' deadlines and budgets are respected as under ``cost_per_progress``.
    """

    name = "budget"
    usd_per_h: float  # B, for all nodes together, on average [USD/h]; above 0
    hysteresis: float = 0.02  # relative gain that is worth a change

    def __post_init__(self) -> None:
        check_number("usd_per_h", self.usd_per_h, above=0, finite=True)
        check_number("hysteresis", self.hysteresis, least=0)

    def decide(self, demand: Demand, now_s: float) -> Mapping[str, WantedSize]:
        """Return the wanted size of each job, keyed by job name; see ``Objective.decide``."""
        value = self.value_usd_per_h(demand.account, len(demand.jobs))
        wants = CostPerProgress(value_usd_per_h=value, hysteresis=self.hysteresis).decide(demand, now_s)
        spent = demand.account.spent_usd / demand.account.hours if demand.account.hours else 0.0
        said = f"budget of {self.usd_per_h:g} USD/h, {spent:.3g} spent so far, an hour is worth {value:.3g} USD"
        return {job: dataclasses.replace(want, reason=want.reason.with_figures(said)) for job, want in wants.items()}

    def value_usd_per_h(self, account: Account, jobs: int) -> float:
        """Return the current value of finishing a job one hour earlier [USD/h]."""
        # The present jobs count like an hour's: a mean over the first minutes says nothing.
        mean = (account.job_hours + jobs) / (account.hours + 1.0)
        saved_h = account.hours - account.spent_usd / self.usd_per_h
        factor = math.exp(min(max(saved_h / _PATIENCE_H, -math.log(_MOST_FACTOR)), math.log(_MOST_FACTOR)))
        return self.usd_per_h / max(mean, 1.0) * factor
