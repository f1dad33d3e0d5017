"""Human-readable explanations of why a job has its workers, and of the effect of one more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from placement.cluster.cluster import Cluster, Node, satisfying
from placement.cluster.jobs import JobView, speeds
from placement.cluster.packing import FreeResources
from placement.planning.problem import Plan
from placement.planning.spans import find_places, spans_nodes
from placement.reasons import Reason
from placement.text import count, describe, printable, short_ids

EXTRA = "one-more-worker"
"""Id of the node that is imagined."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Human-readable explanation of a job's size; ``str()`` returns it as short text."""

    job: str
    nodes: Mapping[str, int]  # workers per node id that it is to have
    reason: str  # of the last decision, a sentence
    figures: str  # what was weighed in it
    speed: float  # on so many workers, relative to its smallest size; 0 while it waits
    speed_with_one_more: float | None  # on one worker more, on as few nodes as they fit; None where it may not grow
    # the job that would have more workers if the cluster had room for one more of this job's; None if there is none
    taker: str | None
    with_room: str  # what the policy says of this job in that case
    nodes_wanted: str = ""  # why the autoscaler wants nodes for it, with its figures; empty without

    def __str__(self) -> str:
        workers = sum(self.nodes.values())
        places = ", ".join(f"{count} on {node}" for node, count in sorted(self.nodes.items())) or "none"
        lines = [f"job {self.job} has {count(workers)} ({places}): {self.reason}"]
        lines += [self.figures] if self.figures else []
        if self.speed_with_one_more is None:
            lines.append("one more worker: it is at its largest useful size")
        else:
            gain = self.speed_with_one_more - self.speed
            lines.append(f"one more worker: its speed would be {self.speed_with_one_more:.2f}, {gain:+.2f}")
        if self.taker is None:
            lines.append("room for one more worker would change nobody's size")
        elif self.taker == self.job:
            lines.append(f"room for one more worker would go to it: {self.with_room}")
        else:
            lines.append(f"room for one more worker would go to job {self.taker}; of this job: {self.with_room}")
        lines += [f"nodes: {self.nodes_wanted}"] if self.nodes_wanted else []
        return "\n".join(short_ids(printable(line)) for line in lines)


def explain(
    view: JobView,
    reason: Reason,
    views: Sequence[JobView],
    decide: Callable[[Sequence[JobView], Cluster], Plan],
    cluster: Cluster,
) -> Explanation:
    """Explain a job's size, by deciding once more with a hypothetical node for one more worker of the job."""
    workers = view.workers
    slots = FreeResources(cluster).slots(view).tolist()
    if spans_nodes(view, cluster):
        slots = [1] * len(find_places(view, cluster, view.max_workers))
    curve = speeds(view, [*slots, 1])
    larger = Cluster(nodes=(*cluster.nodes, _extra(view, cluster)))
    plan = decide(views, larger)
    gains = {other.job: sum(plan.allocation.get(other.job, {}).values()) - other.workers for other in views}
    taker = max(sorted(gains), key=lambda job: (gains[job], job == view.job), default=None)
    return Explanation(
        job=view.job,
        nodes=dict(view.allocation),
        reason=str(reason),
        figures=reason.figures,
        speed=float(curve[min(workers, len(curve) - 1)]),
        speed_with_one_more=float(curve[workers + 1]) if workers + 1 < len(curve) else None,
        taker=taker if taker is not None and gains[taker] > 0 else None,
        with_room=str(plan.reasons.get(view.job, f"it needs {view.min_workers} x {describe(view.bundle)} at least")),
    )


def _extra(view: JobView, cluster: Cluster) -> Node:
    """Return a hypothetical node for one worker, like the nodes that the job uses or could use."""
    nodes = cluster.by_id()
    own = [nodes[node] for node in sorted(view.allocation) if node in nodes]
    like = next(iter(own or [node for node in cluster.nodes if node.matches(view.selector)]), None)
    labels = like.labels if like is not None else satisfying(view.selector)
    return Node(node_id=EXTRA, total=dict(view.bundle), free=dict(view.bundle), labels=labels)
