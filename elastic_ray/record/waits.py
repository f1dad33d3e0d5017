"""What a job cannot go on without, in a few words (pure)."""

from __future__ import annotations

from collections.abc import Collection

from elastic_ray.events import JobPhase
from elastic_ray.job_spec import JobSpec
from elastic_ray.membership.roster import WorkerPhase
from placement.cluster.cluster import GPU_TYPE_LABEL


def waits_for(
    spec: JobSpec,
    phase: JobPhase,
    *,
    workers: Collection[WorkerPhase],
    target_workers: int,
    storage: str,
    needs_node: bool,
) -> str:
    """What a job waits for: storage, else slots or a node, a placement group, processes; empty where it trains.

    Args:
        spec: the job.
        phase: where it is in its life.
        workers: phase of each of its workers.
        target_workers: what the allocator has given it.
        storage: what it waits for storage for; empty where storage answers.
        needs_node: whether no node that there is could ever hold one of its workers.
    """
    if phase.ended:
        return ""
    if storage:
        return "storage"
    if phase in (JobPhase.RUNNING, JobPhase.PAUSED):
        return ""
    if not target_workers:
        return ("a node of the autoscaler with " if needs_node else "") + _slots(spec)
    reserving = sum(each is WorkerPhase.RESERVING for each in workers)
    if reserving:
        return f"placement group of {reserving} of {max(len(workers), target_workers)} workers"
    return "start of processes"


def _slots(spec: JobSpec) -> str:
    """``2 slots (CPU 1, GPU 1) on T4``."""
    needs = ", ".join(f"{name} {amount:g}" for name, amount in sorted(spec.bundle.items()) if amount)
    kind = spec.label_selector.get(GPU_TYPE_LABEL, "")
    number = "1 slot" if spec.min_workers == 1 else f"{spec.min_workers} slots"
    return f"{number} ({needs})" + (f" on {kind}" if kind else "")
