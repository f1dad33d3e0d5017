"""``fair_share``: equal numbers for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from placement.cluster import Cluster
from placement.jobs import JobView, speeds
from placement.policies.base import Target, admit, held_reason
from placement.policies.growing import climb
from placement.room import Room


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FairSharePolicy:
    """Max-min fairness of worker counts: one more worker always goes to the job with the fewest.

    A job that another worker would not speed up, or that is at its maximum, leaves its share to the others.
    """

    @property
    def name(self) -> str:
        """See ``Policy``."""
        return "fair_share"

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """See ``Policy``."""
        admission = admit(jobs, cluster)
        empty = Room(cluster)
        curves = {view.job: speeds(view, empty.slots(view).tolist()) for view in jobs}

        def score(view: JobView, workers: int) -> float | None:
            curve = curves[view.job]
            gains = workers + 1 < len(curve) and curve[workers + 1] > curve[workers]
            return -float(workers) if gains else None

        counts = climb(jobs, admission, score)
        targets = {job: Target(workers=0, reason=f"fair_share: {why}") for job, why in admission.waiting.items()}
        for view in jobs:
            if view.job in counts:
                workers = counts[view.job]
                why = held_reason(view, workers) if view.held_at is not None else f"{workers} workers are its share"
                targets[view.job] = Target(workers=workers, reason=f"fair_share: {why}")
        return targets
