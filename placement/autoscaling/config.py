"""Configuration of the cluster's size."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from placement.arguments import NamesArguments
from placement.autoscaling.autoscaler import AutoscalerConfig
from placement.autoscaling.cluster_file import read_cluster_file
from placement.autoscaling.objectives.base import Objective
from placement.autoscaling.objectives.registry import make_objective
from placement.checks import check_number
from placement.cluster.cluster import Node
from placement.cluster.node_types import NodeType, check_types
from placement.cluster.price_table import PriceTable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling(NamesArguments):
    """Configuration that lets the allocator decide how many nodes of which type there are; Ray starts and ends them.

    Attributes:
        node_types: on offer; :meth:`from_file` reads those of a cluster file.
        max_nodes: of all types together; None for no such limit.
        objective: by name, or one: "budget", "cost_per_progress", "utility_band", "utility_cost",
            "throughput_efficiency".
        budget_usd_per_h: with "budget": what all nodes together may cost, on average over a day [USD/h].
        times: of the decision.
        interval_s: time between two looks [s].

    Examples:
        >>> from placement import Autoscaling, NodeType
        >>> node = NodeType(name="t4", resources={"CPU": 8.0, "GPU": 4.0}, usd_per_h=2.0, max_nodes=8)
        >>> Autoscaling(node_types=(node,)).objective
        'cost_per_progress'
    """

    node_types: tuple[NodeType, ...]
    max_nodes: int | None = None
    objective: str | Objective = "cost_per_progress"
    times: AutoscalerConfig = dataclasses.field(default_factory=AutoscalerConfig)
    interval_s: float = 2.0
    budget_usd_per_h: float | None = None

    def __post_init__(self) -> None:
        check_types(self.node_types)
        make_objective(self.objective, self.budget_usd_per_h)
        if self.max_nodes is not None and not self.max_nodes >= 1:
            raise ValueError(f"max_nodes must be None or 1 or more, but got {self.max_nodes}")
        check_number("interval_s", self.interval_s, above=0, unit="seconds")

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        prices: PriceTable | None = None,
        objective: str | Objective = "cost_per_progress",
        budget_usd_per_h: float | None = None,
    ) -> Autoscaling:
        """Make the configuration for the cluster that a file of ``ray up`` or a KubeRay manifest describes.

        Args:
            path: the file.
            prices: by instance type; rounded defaults if None.
            objective: see above.
            budget_usd_per_h: see above.

        Raises:
            InputError: the file has no worker type, or an instance type that the price table does not know.
        """
        file = read_cluster_file(path, prices)
        return cls(
            node_types=file.types, max_nodes=file.max_nodes, objective=objective, budget_usd_per_h=budget_usd_per_h
        )

    @property
    def chosen(self) -> Objective:
        """Objective itself, resolved from its name."""
        return make_objective(self.objective, self.budget_usd_per_h)

    @property
    def obtainable(self) -> tuple[Node, ...]:
        """Every node that could exist."""
        return tuple(each.node(f"{each.name}~{i}") for each in self.node_types for i in range(each.max_nodes))
