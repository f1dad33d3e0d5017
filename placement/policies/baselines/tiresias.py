"""``tiresias``: least attained service, in two queues, for jobs of a fixed size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from placement.checks import check_number
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, requested_workers
from placement.cluster.packing import FreeResources
from placement.policies.shared.base import Target, admit, grow, held
from placement.policies.shared.stable_placement import WorstFitPlacer
from placement.text import count


@dataclasses.dataclass(slots=True, kw_only=True)
class TiresiasPolicy:
    """Policy with two-dimensional least attained service, discretised (Gu et al., "Tiresias", NSDI 2019).

    A job starts in the first queue and moves to the second, permanently, once it has used ``threshold_s`` GPU-seconds.
    Each queue is first in, first out (section 4.1). A job that requests a fixed number of workers
    (``TraceJobView.requested_workers``) gets exactly that number or nothing, and gives way to any job ahead of it;
    running jobs keep their nodes. Jobs that request no number keep their minimum and grow in the order of the queues.

    The policy is stateful: it remembers in which order jobs entered the second queue.
    """

    name = "tiresias"
    threshold_s: float = 57_600.0
    rigid: bool = dataclasses.field(default=True, init=False)
    _entered: dict[str, int] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("threshold_s", self.threshold_s, above=0, unit="GPU-seconds")

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target size, and the reason for it, for each job, keyed by job name; see ``Policy.decide``."""
        order = self._queue(jobs)
        if any(requested_workers(view) is not None for view in jobs):
            return self._share_time(order, cluster)
        admission = admit(jobs, cluster)
        counts = grow(order, admission)
        targets = {job: Target(workers=0, reason=why) for job, why in admission.waiting.items()}
        for view in jobs:
            if view.job not in targets:
                workers = counts[view.job]
                targets[view.job] = Target(workers=workers, reason=held(view, workers) or self._served(view))
        return targets

    def _queue(self, jobs: Sequence[JobView]) -> list[JobView]:
        """Return the jobs in order of service: the first queue by arrival, then the second by time of entry."""
        present = {view.job for view in jobs}
        self._entered = {job: rank for job, rank in self._entered.items() if job in present}
        for view in sorted(jobs, key=lambda view: view.arrival):
            if view.attained_s >= self.threshold_s and view.job not in self._entered:
                self._entered[view.job] = 1 + max(self._entered.values(), default=0)
        return sorted(jobs, key=lambda view: (self._entered.get(view.job, 0), view.arrival))

    def _share_time(self, order: Sequence[JobView], cluster: Cluster) -> dict[str, Target]:
        """Decide by the cluster's totals which jobs run; running jobs stay in place, and others are spread."""
        totals = FreeResources(cluster)
        runs = [view for view in order if totals.add(view, _asks(view))]
        placer = WorstFitPlacer(cluster)
        places = {view.job: placer.keep(view) for view in runs if view.workers == _asks(view)}
        targets: dict[str, Target] = {}
        for view in runs:
            nodes = places.get(view.job) or placer.spread(view, _asks(view))
            if nodes is not None:
                targets[view.job] = Target(workers=_asks(view), reason=self._served(view), nodes=nodes)
        for view in order:
            if view.job not in targets:
                reason = f"waits: no room for {count(_asks(view))} beside those before it"
                targets[view.job] = Target(workers=0, reason=reason)
        return targets

    def _served(self, view: JobView) -> str:
        queue = "second" if view.job in self._entered else "first"
        return f"served in the {queue} queue after {view.attained_s / 3600:.2f} GPU-hours"


def _asks(view: JobView) -> int:
    return requested_workers(view) or view.held_at or view.min_workers
