"""Cluster sizes by Or, Zhang and Freedman's rules: the nodes that a frugal policy would use if all were rented."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from placement.autoscaling.objectives.base import Demand, WantedSize
from placement.cluster.cluster import Cluster
from placement.policies.shared.base import Policy, as_targets
from placement.reasons import Reason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BySize:
    """Objective that requests the sizes that a frugal policy would choose if every available node existed.

    A frugal policy leaves GPUs idle that are not worth their price. Each job grows independently until one more worker
    is not worthwhile. Under ``throughput_efficiency``, the worker must add at least a fraction ``threshold`` of a
    current worker's throughput. Under ``utility_cost``, the time it saves must be worth more than its cost. Source:
    "Resource Elasticity in Distributed Deep Learning", MLSys 2020, section 4.1.
    """

    policy: Policy

    @property
    def name(self) -> str:
        """Name of the objective."""
        return self.policy.name

    def decide(self, demand: Demand, now_s: float) -> Mapping[str, WantedSize]:
        """Return the wanted size of each job, keyed by job name; see ``Objective.decide``."""
        views, nodes = [], {}
        prices: dict[str, float] = {}
        for view in demand.jobs:
            options = demand.offers[view.job]
            for offer in options:
                kind = offer.kind
                per_worker = float(offer.part_usd[-1]) / len(offer.part_usd)
                prices.setdefault(kind.gpu_type, per_worker)  # cheapest first
                for i in range(kind.max_nodes):
                    name = f"{kind.name}-{i:05d}"
                    nodes[name] = kind.node(name)
            if options:
                views.append(view.placed({}))
        told: Callable[[Mapping[str, float]], Policy] | None = getattr(self.policy, "priced", None)
        policy = self.policy if told is None else told(prices)
        targets = as_targets(policy.name, policy.decide(views, Cluster(nodes=tuple(nodes.values())), now_s))
        gpus = {view.job: demand.gpus[view.job] or demand.offers[view.job][0].kind.gpu_type for view in views}
        return {
            job: WantedSize(
                job=job,
                workers=min(target.workers, max(offer.limit for offer in demand.offers[job])),
                gpu=gpus[job],
                reason=target.reason,
            )
            for job, target in targets.items()
            if isinstance(target.reason, Reason)
        }
