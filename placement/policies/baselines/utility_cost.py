"""``utility_cost``: grow while the time saved is worth more than it costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from placement.checks import check_number
from placement.cluster.cluster import Cluster
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView
from placement.goodput.step_time import Floats
from placement.policies.shared.base import Target, count
from placement.policies.shared.greedy_growth import decide_by_worth


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UtilityCostPolicy:
    """Marginal utility against marginal dollars (Or, Zhang, Freedman, MLSys 2020, section 4.1).

    A job with W hours of work left on one worker runs t(k) = W / T(k) hours on k, with T as in
    ``placement.cluster.jobs.speeds``. One more worker is worth it while

        value x (t(k) - t(k + 1)) > price x ((k + 1) t(k + 1) - k t(k))

    W drops out, so that nothing need be known of the job's length. Where room is short, the largest ratio of the
    two sides goes first. GPUs that are not worth their price stay idle. Stragglers are left as by
    ``throughput_efficiency``.

    The price is that of the GPU type that the job runs on. One that does not run yet is taken to pay the mean over
    the slots it could have.

    Attributes:
        value: what finishing one hour earlier is worth [USD].
        price: of one worker for one hour on a GPU type that ``prices`` does not name [USD].
        prices: of one worker for one hour, by GPU type [USD]; a simulation fills it in from its price table.
        slow_factor: how many times slower a node must be to be left; above 1.
    """

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

    @property
    def name(self) -> str:
        """See ``Policy``."""
        return "utility_cost"

    def priced(self, prices: Mapping[str, float]) -> UtilityCostPolicy:
        """Return the policy with these prices of one worker for one hour, by GPU type [USD]."""
        return self if self.prices else dataclasses.replace(self, prices=dict(prices))

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """See ``Policy``."""
        room = FreeResources(cluster)
        types = {node.node_id: node.gpu_type for node in cluster.nodes}
        prices = {view.job: self._price(view, room, types) for view in jobs}

        def worth(view: JobView, curve: Floats, workers: int) -> float | None:
            if curve[workers + 1] <= 0:
                return None
            if curve[workers] <= 0:
                return math.inf  # at this size it cannot run at all
            saved = self.value * (1.0 / curve[workers] - 1.0 / curve[workers + 1])
            paid = prices[view.job] * ((workers + 1) / curve[workers + 1] - workers / curve[workers])
            if saved <= max(paid, 0.0):
                return None
            return float(saved / paid) if paid > 0 else math.inf

        return decide_by_worth(self.name, jobs, cluster, worth, _say, slow_factor=self.slow_factor)

    def _price(self, view: JobView, room: FreeResources, types: Mapping[str, str]) -> float:
        """USD of one worker for one hour."""
        slots = dict.fromkeys(types.values(), 0)
        held = {node: workers for node, workers in view.allocation.items() if node in types}
        for node, n in (held or dict(zip(room.node_ids, room.slots(view).tolist(), strict=True))).items():
            slots[types[node]] += n
        total = sum(slots.values())
        return sum(n * self.prices.get(gpu, self.price) for gpu, n in slots.items()) / total if total else self.price


def _say(workers: int, worth: float | None) -> str:
    return f"{count(workers)}, one more {'is not worth its price' if worth is None else 'would pay, but finds no room'}"
