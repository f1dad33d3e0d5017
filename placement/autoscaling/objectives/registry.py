"""Objectives by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from placement.autoscaling.objectives.base import Objective
from placement.autoscaling.objectives.by_size import throughput_efficiency, utility_cost
from placement.autoscaling.objectives.cost_per_progress import CostPerProgress
from placement.autoscaling.objectives.utility_band import UtilityBand

OBJECTIVES: Mapping[str, Callable[[], Objective]] = MappingProxyType(
    {
        "cost_per_progress": CostPerProgress,
        "throughput_efficiency": throughput_efficiency,
        "utility_band": UtilityBand,
        "utility_cost": utility_cost,
    }
)
"""Registered objectives; the contract tests run over all of them."""


def make_objective(objective: str | Objective) -> Objective:
    """The objective of that name, or the objective itself.

    Raises:
        ValueError: no objective has that name.
    """
    if not isinstance(objective, str):
        return objective
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {', '.join(sorted(OBJECTIVES))}, but got {objective!r}")
    return OBJECTIVES[objective]()
