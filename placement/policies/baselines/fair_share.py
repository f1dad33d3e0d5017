"""``fair_share``: an equal number of workers for every job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.goodput.step_time import Floats
from placement.policies.shared.base import Target, decide_by_worth
from placement.text import count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FairSharePolicy:
    """Policy that divides workers by weighted max-min fairness: the next worker goes to the job with the fewest.

    A job that is at its maximum, or that another worker would not speed up, leaves its share to the other jobs.
    """

    name = "fair_share"

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target size, and the reason for it, for each job, keyed by job name; see ``Policy.decide``."""

        def worth(view: JobView, curve: Floats, workers: int) -> float | None:
            return -float(workers) if curve[workers + 1] > curve[workers] else None

        return decide_by_worth(jobs, cluster, worth, lambda workers, _: f"{count(workers)}, its share")
