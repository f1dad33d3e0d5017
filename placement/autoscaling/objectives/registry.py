"""Registry of objectives by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from placement.autoscaling.objectives.base import Objective
from placement.autoscaling.objectives.by_size import BySize
from placement.autoscaling.objectives.cost_per_progress import Budget, CostPerProgress
from placement.autoscaling.objectives.utility_band import UtilityBand
from placement.checks import check_number
from placement.policies.baselines.throughput_efficiency import ThroughputEfficiencyPolicy
from placement.policies.baselines.utility_cost import UtilityCostPolicy

OBJECTIVES: Mapping[str, Callable[[], Objective]] = MappingProxyType(
    {
        "budget": lambda: Budget(usd_per_h=10.0),
        "cost_per_progress": CostPerProgress,
        "throughput_efficiency": lambda: BySize(policy=ThroughputEfficiencyPolicy()),
        "utility_band": UtilityBand,
        "utility_cost": lambda: BySize(policy=UtilityCostPolicy()),
    }
)
"""Registered objectives; the contract tests run over all of them."""


def make_objective(objective: str | Objective, budget_usd_per_h: float | None = None) -> Objective:
    """Return an objective, given its name or the object itself.

    Args:
        budget_usd_per_h: Limit on the average total cost of all nodes [USD/h]; required for, and only for, "budget".

    Raises:
        ValueError: The name is unknown, or "budget" and a budget were not given together.
        TypeError, ValueError: The budget is not a number above 0.
    """
    named = isinstance(objective, str) and objective in OBJECTIVES
    if not named and (isinstance(objective, str) or not callable(getattr(objective, "decide", None))):
        raise ValueError(f"objective must be one of {', '.join(sorted(OBJECTIVES))}, but got {objective!r}")
    if (objective == "budget") != (budget_usd_per_h is not None):
        raise ValueError(
            f"objective 'budget' and budget_usd_per_h, what the cluster may cost on average, go together, but got "
            f"{objective!r} and {budget_usd_per_h}"
        )
    if budget_usd_per_h is not None:
        check_number("budget_usd_per_h", budget_usd_per_h, above=0, finite=True)
        return Budget(usd_per_h=budget_usd_per_h)
    return OBJECTIVES[objective]() if isinstance(objective, str) else objective
