"""``budget``: shortest completion times for an hourly budget, averaged over time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from placement.autoscaling.objectives.base import Demand, WantedSize
from placement.autoscaling.objectives.cost_per_progress import CostPerProgress
from placement.checks import check_number
from placement.cluster.jobs import Account

_MOST_FACTOR = 50.0  # of the value of an hour, up or down, by what has been saved or overspent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Objective that sizes each job by a common value of an hour; that value rises and falls with the money saved.

    By Lagrange, minimising the mean completion time under a bound on the mean spending is the same as minimising

        sum over jobs of (value + price(k)) x T(k)

    with one ``value`` for all jobs and all times. A job's size then depends only on its own speed-up curve, and the
    cluster scales with the number of jobs (the boundary of optimal allocations in "BOA Constrictor", 2026). The value
    is not known in advance. It is

        B / n x exp(saved / (B x patience))

    with B the budget, n the mean number of jobs and saved = B x hours - spent: an integral controller, whose steady
    state is spending B. Near it, jobs with speed-up k^p spend value x p / (1 - p) each, B / n for p = 1/2. The
    account fades over a day, so that what was saved long ago is not spent at once.

    Deadlines and budgets of jobs are respected as under ``cost_per_progress``.
    """

    name = "budget"
    usd_per_h: float  # B, for all nodes together, on average [USD/h]; above 0
    patience_h: float = 2.0  # hours of budget that may be saved, or overspent, before the value changes e-fold
    hysteresis: float = 0.02  # relative gain that is worth a change

    def __post_init__(self) -> None:
        for field in ("usd_per_h", "patience_h"):
            check_number(field, getattr(self, field), above=0, finite=True)
        check_number("hysteresis", self.hysteresis, least=0)

    def decide(self, demand: Demand, now_s: float) -> Mapping[str, WantedSize]:
        """Return the wanted sizes; see ``Objective``."""
        value = self.value_usd_per_h(demand.account, len(demand.jobs))
        wants = CostPerProgress(value_usd_per_h=value, hysteresis=self.hysteresis).decide(demand, now_s)
        spent = demand.account.spent_usd / demand.account.hours if demand.account.hours else 0.0
        said = f"budget of {self.usd_per_h:g} USD/h, {spent:.3g} spent so far, an hour is worth {value:.3g} USD"
        return {job: dataclasses.replace(want, reason=want.reason.with_figures(said)) for job, want in wants.items()}

    def value_usd_per_h(self, account: Account, jobs: int) -> float:
        """Return the current value of saving one hour, for each job [USD/h].

        Args:
            jobs: Current number of jobs, which counts like one more hour of the account.
        """
        # The present jobs count like an hour's: a mean over the first minutes says nothing.
        mean = (account.job_hours + jobs) / (account.hours + 1.0)
        saved_h = account.hours - account.spent_usd / self.usd_per_h
        factor = math.exp(min(max(saved_h / self.patience_h, -math.log(_MOST_FACTOR)), math.log(_MOST_FACTOR)))
        return self.usd_per_h / max(mean, 1.0) * factor
