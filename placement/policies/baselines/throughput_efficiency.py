"""``throughput_efficiency``: a job grows while each added worker contributes enough compared with the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from placement.checks import check_number
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.cluster.utility import SCALING_THRESHOLD, scaling_efficiency
from placement.goodput.step_time import Floats
from placement.policies.shared.base import Target, decide_by_worth
from placement.text import count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputEfficiencyPolicy:
    """Policy that adds workers while the scaling efficiency exceeds a threshold (Or, Zhang, Freedman, MLSys 2020).

    A job with k workers may get one more while the ``scaling_efficiency`` s(k) from k to k + 1 workers exceeds
    ``threshold`` (section 4.1). The throughput R is the speed from ``placement.cluster.jobs.speeds``: useful samples
    per second at the best batch, so statistical efficiency counts too. If room is short, the job with the largest s
    comes first. GPUs that no job uses well stay idle.

    The paper replaces stragglers. This policy instead avoids nodes where some job has measured steps that take
    ``slow_factor`` times longer (``JobView.slow_nodes``), as long as every job can still run.

    Attributes:
        threshold: Minimum of s(k), from 0 (any gain suffices) to below 1 (perfect scaling).
        slow_factor: Minimum slowdown for a node to be avoided; above 1.
    """

    name = "throughput_efficiency"
    threshold: float = SCALING_THRESHOLD
    slow_factor: float = 1.5
    frugal: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must be at least 0 and below 1, but got {self.threshold}")
        check_number("slow_factor", self.slow_factor, above=1)

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target size, and the reason for it, for each job, keyed by job name; see ``Policy.decide``."""
        return decide_by_worth(jobs, cluster, self._worth, self._say, slow_factor=self.slow_factor)

    def _worth(self, view: JobView, curve: Floats, workers: int) -> float | None:
        if curve[workers] <= 0:
            return 1.0  # at this size it cannot run at all
        efficiency = scaling_efficiency(workers, float(curve[workers]), workers + 1, float(curve[workers + 1]))
        return efficiency if efficiency > self.threshold else None

    def _say(self, workers: int, worth: float | None) -> str:
        more = f"not reach {self.threshold:g} of one's work" if worth is None else f"do {worth:.2f} of one's work"
        return f"{count(workers)}, one more would {more}"
