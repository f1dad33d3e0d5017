"""``fixed``: every job at one fixed size, first come, first served."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.policies.shared.base import Target, admit, held
from placement.text import count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FixedPolicy:
    """Policy that gives each job a fixed number of workers, in order of arrival, or fewer if room is short.

    A job shrinks only to admit another job at its minimum. This is the plain baseline for the other policies, and
    the choice for users who want to size their jobs themselves.

    Attributes:
        workers: Size of every job, within the job's own bounds; None gives each job its ``max_workers``.
    """

    name = "fixed"
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be 1 or more, or None for each job's maximum, but got {self.workers}")

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target size, and the reason for it, for each job, keyed by job name; see ``Policy.decide``."""
        admission = admit(jobs, cluster)
        targets = {job: Target(workers=0, reason=why) for job, why in admission.waiting.items()}
        for view in sorted(jobs, key=lambda view: view.arrival):
            if view.job in targets:
                continue
            workers = admission.floors[view.job]
            if (why := held(view, workers)) is not None:
                targets[view.job] = Target(workers=workers, reason=why)
                continue
            wanted = max(view.min_workers, min(self.workers or view.max_workers, view.max_workers))
            more = min(wanted - workers, int(admission.room.slots(view).sum()))
            if more > 0 and admission.room.add(view, more):
                workers += more
            targets[view.job] = Target(workers=workers, reason=f"{workers} of {count(wanted, 'wanted worker')} placed")
        return targets
