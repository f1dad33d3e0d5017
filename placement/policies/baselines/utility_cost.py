"""``utility_cost``: a job grows while the time saved is worth more than the extra workers cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from placement.checks import check_number
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.cluster.packing import FreeResources
from placement.goodput.remaining import seconds_to_end
from placement.goodput.step_time import Floats
from placement.policies.shared.base import Target, decide_by_worth
from placement.text import count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UtilityCostPolicy:
    """Policy that adds workers while marginal utility exceeds marginal cost [USD] (``placement.cluster.utility``).

    A job that needs t(k) more hours on k workers may get one more while

        U(t(k + 1)) - U(t(k)) > price x ((k + 1) t(k + 1) - k t(k))

    with U the job's own utility function. If the job has none, or its length is not known yet, U falls by ``value`` per
    hour, and the length cancels out. If room is short, the job with the largest ratio of the two sides comes first.
    GPUs that are not worth their price stay idle. Slow nodes are avoided as in ``throughput_efficiency``.

    The price is for the GPU types that the job is running on or, for a job that is not running, the mean over the slots
    it could have.

    Attributes:
        value: Value of finishing one hour earlier [USD], for jobs without a utility function or known length.
        price: Price per worker and hour on GPU types that are not in ``prices`` [USD].
        prices: Price per worker and hour [USD], keyed by GPU type; a simulation fills it in from its price table.
        slow_factor: Minimum slowdown for a node to be avoided; above 1.
    """

    name = "utility_cost"
    value: float = 4.0
    price: float = 1.0
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    slow_factor: float = 1.5
    frugal: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        for field in ("value", "price"):
            check_number(field, getattr(self, field), above=0, unit="USD")
        for gpu, price in self.prices.items():
            check_number(f"prices[{gpu!r}]", price, least=0, unit="USD")
        check_number("slow_factor", self.slow_factor, above=1)

    def priced(self, prices: Mapping[str, float]) -> UtilityCostPolicy:
        """Return the policy with these prices per worker and hour [USD], keyed by GPU type, unless it has its own."""
        return self if self.prices else dataclasses.replace(self, prices=dict(prices))

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target size, and the reason for it, for each job, keyed by job name; see ``Policy.decide``."""
        room = FreeResources(cluster)
        types = {node.node_id: node.gpu_type for node in cluster.nodes}
        prices = {view.job: self._price(view, room, types) for view in jobs}

        left_s = {view.job: seconds_to_end(view, room.slots(view).tolist()) for view in jobs if view.utility}

        def worth(view: JobView, curve: Floats, workers: int) -> float | None:
            if curve[workers + 1] <= 0:
                return None
            if curve[workers] <= 0:
                return math.inf  # at this size it cannot run at all
            known_s = left_s.get(view.job)
            hours = 1.0 / curve[workers : workers + 2] if known_s is None else known_s[workers - 1 : workers + 1] / 3600
            paid = prices[view.job] * float((workers + 1) * hours[1] - workers * hours[0])
            saved = self.value * float(hours[0] - hours[1])
            if view.utility is not None and known_s is not None:
                old, new = view.utility.at(max(now_s - view.submitted_s, 0.0) + 3600.0 * hours)
                saved = float(new - old)
            if saved <= max(paid, 0.0):
                return None
            return float(saved / paid) if paid > 0 else math.inf

        return decide_by_worth(jobs, cluster, worth, _say, slow_factor=self.slow_factor)

    def _price(self, view: JobView, room: FreeResources, types: Mapping[str, str]) -> float:
        """Return the price per worker and hour [USD]; GPU types without a price cost what the job has paid so far."""
        price = view.bill.worker_usd_per_h if view.bill is not None and view.bill.worker_usd_per_h else self.price
        slots = dict.fromkeys(types.values(), 0)
        held = {node: workers for node, workers in view.allocation.items() if node in types}
        for node, n in (held or dict(zip(room.node_ids, room.slots(view).tolist(), strict=True))).items():
            slots[types[node]] += n
        total = sum(slots.values())
        return sum(n * self.prices.get(gpu, price) for gpu, n in slots.items()) / total if total else price


def _say(workers: int, worth: float | None) -> str:
    return f"{count(workers)}, one more {'is not worth its price' if worth is None else 'would pay, but finds no room'}"
