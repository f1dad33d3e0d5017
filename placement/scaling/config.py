"""What a user sets about the cluster's size."""

from __future__ import annotations

import dataclasses

from placement.autoscale import AutoscalerConfig
from placement.cluster import Node
from placement.node_types import NodeType, check_types
from placement.scaling.base import Objective
from placement.scaling.registry import make_objective


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    """Lets the allocator decide how many nodes of which type there are; Ray's autoscaler starts and ends them.

    Attributes:
        node_types: on offer, as the cluster file has them (``placement.node_types.read_node_types``).
        objective: by name, or one: "cost_per_progress", "utility_band", "utility_cost", "throughput_efficiency".
        times: of the decision.
        interval_s: time between two looks [s].
    """

    node_types: tuple[NodeType, ...]
    objective: str | Objective = "cost_per_progress"
    times: AutoscalerConfig = dataclasses.field(default_factory=AutoscalerConfig)
    interval_s: float = 2.0

    def __post_init__(self) -> None:
        check_types(self.node_types)
        make_objective(self.objective)
        if not self.interval_s > 0:
            raise ValueError(f"interval_s must be above 0 seconds, but got {self.interval_s}")

    @property
    def obtainable(self) -> tuple[Node, ...]:
        """Every node that there could be."""
        return tuple(each.node(f"{each.name}~{i}") for each in self.node_types for i in range(each.max_nodes))
