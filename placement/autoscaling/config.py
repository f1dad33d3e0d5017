"""Configuration of the cluster's autoscaling."""

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
    """Configuration that lets the allocator decide how many nodes of each type to have; Ray starts and ends them.

    Attributes:
        node_types: Node types that may be requested; :meth:`from_file` reads them from a cluster file.
        max_nodes: Most nodes of all types together; None for no limit.
        objective: An objective object, or a name: "budget", "cost_per_progress", "utility_band", "utility_cost",
            "throughput_efficiency".
        budget_usd_per_h: For "budget": limit on the cost of all nodes together, averaged over a day [USD/h].
        times: Timing of requests and releases of nodes.
        interval_s: Time between two decisions [s].

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
        """Return the configuration for the cluster described by a ``ray up`` file or a KubeRay manifest.

        Args:
            path: The file.
            prices: Prices by instance type; rounded defaults if None.
            objective: As in :class:`Autoscaling`.
            budget_usd_per_h: As in :class:`Autoscaling`.

        Raises:
            InputError: The file has no worker type, or an instance type that is not in the price table.
        """
        file = read_cluster_file(path, prices)
        return cls(
            node_types=file.types, max_nodes=file.max_nodes, objective=objective, budget_usd_per_h=budget_usd_per_h
        )

    @property
    def chosen(self) -> Objective:
        """The objective, resolved from its name."""
        return make_objective(self.objective, self.budget_usd_per_h)

    @property
    def obtainable(self) -> tuple[Node, ...]:
        """Every node that could be requested, up to the maximum of each type."""
        return tuple(each.node(f"{each.name}~{i}") for each in self.node_types for i in range(each.max_nodes))
