"""``utility_cost``: grow while the time saved is worth more than it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from placement.cluster import Cluster
from placement.jobs import JobView, speeds
from placement.policies.base import Target, admit, held_reason
from placement.policies.growing import climb
from placement.room import Room


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UtilityCostPolicy:
    """Marginal utility against marginal dollars (Or, Zhang, Freedman, MLSys 2020, section 4.1).

    A job with W hours of work left on one worker runs t(k) = W / T(k) hours on k, with T as in
    ``placement.jobs.speeds``. One more worker is worth it while

        value x (t(k) - t(k + 1)) > price x ((k + 1) t(k + 1) - k t(k))

    W drops out, so that nothing need be known of the job's length. Where room is short, the largest ratio of the
    two sides goes first. GPUs that are not worth their price stay idle.

    Attributes:
        value: what finishing one hour earlier is worth [USD].
        price: of one worker for one hour [USD].
    """

    value: float = 4.0
    price: float = 1.0
    frugal: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        for field in ("value", "price"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be above 0 USD, but got {getattr(self, field)}")

    @property
    def name(self) -> str:
        """See ``Policy``."""
        return "utility_cost"

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """See ``Policy``."""
        admission = admit(jobs, cluster)
        empty = Room(cluster)
        curves = {view.job: speeds(view, empty.slots(view).tolist()) for view in jobs}

        def score(view: JobView, workers: int) -> float | None:
            curve = curves[view.job]
            if workers + 1 >= len(curve) or curve[workers + 1] <= 0:
                return None
            if curve[workers] <= 0:
                return float("inf")  # at this size it cannot run at all
            saved = self.value * (1.0 / curve[workers] - 1.0 / curve[workers + 1])
            paid = self.price * ((workers + 1) / curve[workers + 1] - workers / curve[workers])
            if saved <= max(paid, 0.0):
                return None
            return float(saved / paid) if paid > 0 else float("inf")

        counts = climb(jobs, admission, score)
        targets = {job: Target(workers=0, reason=f"utility_cost: {why}") for job, why in admission.waiting.items()}
        for view in jobs:
            if view.job not in counts:
                continue
            workers = counts[view.job]
            verdict = "is not worth its price" if score(view, workers) is None else "would pay, but finds no room"
            why = held_reason(view, workers) if view.held_at is not None else f"{workers} workers, one more {verdict}"
            targets[view.job] = Target(workers=workers, reason=f"utility_cost: {why}")
        return targets
