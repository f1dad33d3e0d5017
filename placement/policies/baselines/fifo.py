"""``fifo``: first come, first served."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, requested_workers
from placement.policies.shared.base import Target, admit, grow, held
from placement.policies.shared.stable_placement import WorstFitPlacer
from placement.text import count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FifoPolicy:
    """Policy that gives each job, in order of arrival, as many workers as it can use; no job overtakes another.

    A job that requests a fixed number of workers gets exactly that number: it waits until they are free, and all later
    jobs wait too. Other jobs keep their minimum while later jobs arrive, and earlier jobs grow first.
    """

    name = "fifo"
    rigid: bool = dataclasses.field(default=True, init=False)

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target size, and the reason for it, for each job, keyed by job name; see ``Policy.decide``."""
        order = sorted(jobs, key=lambda view: view.arrival)
        if any(requested_workers(view) is not None for view in jobs):
            return _in_line(order, cluster)
        admission = admit(jobs, cluster)
        counts = grow(order, admission)
        targets = {job: Target(workers=0, reason=why) for job, why in admission.waiting.items()}
        for view in order:
            if view.job in counts:
                workers = counts[view.job]
                why = held(view, workers) or f"{count(workers)}, in its turn"
                targets[view.job] = Target(workers=workers, reason=why)
        return targets


def _in_line(order: Sequence[JobView], cluster: Cluster) -> dict[str, Target]:
    """Return targets in order of arrival: running jobs stay, others start as requested until one must wait."""
    placer = WorstFitPlacer(cluster)
    targets: dict[str, Target] = {}
    kept = {view.job: placer.keep(view) for view in order if view.workers}
    blocked = ""
    for view in order:
        asks = requested_workers(view) or view.held_at or view.min_workers
        nodes = kept.get(view.job) or (None if blocked else placer.spread(view, asks))
        if nodes is None:
            blocked = blocked or view.job
            targets[view.job] = Target(workers=0, reason=f"waits for {count(asks)}, behind {blocked}")
        else:
            workers = sum(nodes.values())
            targets[view.job] = Target(workers=workers, reason=f"has the {workers} it asked for", nodes=nodes)
    return targets
