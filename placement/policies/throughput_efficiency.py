"""``throughput_efficiency``: grow while an added worker still does a fair part of a present one's work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from placement.cluster import Cluster
from placement.jobs import JobView, speeds
from placement.policies.base import Target, admit, held_reason
from placement.policies.growing import climb
from placement.room import Room


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputEfficiencyPolicy:
    """Scaling efficiency above a threshold (Or, Zhang, Freedman, MLSys 2020, section 4.1).

    A job of k workers may have one more while

        s(k) = (T(k + 1) - T(k)) / (T(k) / k) > threshold

    with T the speed of ``placement.jobs.speeds``: useful samples per second at the best batch, so that statistical
    efficiency counts too. Where room is short, the largest s goes first. GPUs that nobody uses well stay idle.

    Attributes:
        threshold: least s(k), from 0 (any gain) to below 1 (perfect scaling).
    """

    threshold: float = 0.2
    frugal: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must be at least 0 and below 1, but got {self.threshold}")

    @property
    def name(self) -> str:
        """See ``Policy``."""
        return "throughput_efficiency"

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """See ``Policy``."""
        admission = admit(jobs, cluster)
        empty = Room(cluster)
        curves = {view.job: speeds(view, empty.slots(view).tolist()) for view in jobs}

        def score(view: JobView, workers: int) -> float | None:
            curve = curves[view.job]
            if workers + 1 >= len(curve):
                return None
            if curve[workers] <= 0:
                return 1.0  # at this size it cannot run at all
            efficiency = float(workers * (curve[workers + 1] / curve[workers] - 1.0))
            return efficiency if efficiency > self.threshold else None

        counts = climb(jobs, admission, score)
        targets = {
            job: Target(workers=0, reason=f"throughput_efficiency: {why}") for job, why in admission.waiting.items()
        }
        for view in jobs:
            if view.job not in counts:
                continue
            workers = counts[view.job]
            worth = score(view, workers)
            why = f"{workers} workers, one more would " + (
                f"not reach {self.threshold:g} of one's work" if worth is None else f"do {worth:.2f} of one's work"
            )
            if view.held_at is not None:
                why = held_reason(view, workers)
            targets[view.job] = Target(workers=workers, reason=f"throughput_efficiency: {why}")
        return targets
