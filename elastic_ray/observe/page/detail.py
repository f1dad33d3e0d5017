"""One job's part of the page (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from elastic_ray.events import WorkerInfo
from elastic_ray.observe.page.job_memory import JobMemory, noise_scale, pauses, shares_of_time
from elastic_ray.observe.page.model import JobDetail
from elastic_ray.observe.page.rows import finite
from elastic_ray.observe.page.source import JobAnswer
from placement.allocator.explaining import Explanation
from placement.cluster.cluster import Cluster
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView, goodputs
from placement.text import clipped

MOST_SIZES = 128


def job_detail(memory: JobMemory, cluster: Cluster, answer: JobAnswer, now_s: float) -> JobDetail:
    """Everything about one job.

    Args:
        memory: what the page knows of it.
        cluster: the nodes; the curve is that of the sizes that fit on them.
        answer: what its controller and the allocator say when asked about it alone.
        now_s: present time [s since the epoch].
    """
    view = memory.state.view if memory.state is not None else None
    curve = _curve(view, cluster)
    workers = sum(memory.state.target.values()) if memory.state is not None else 0
    begun_s = view.submitted_s if view is not None else memory.first_s
    slow = view.slow_nodes if view is not None else {}
    events = tuple(memory.events)
    return JobDetail(
        job=memory.job,
        curve=curve,
        measured=_measured(view),
        gain=_gain(answer.explanation, dict(curve).get(workers)),
        explanation="" if answer.explanation is None else clipped(str(answer.explanation), 4000),
        noise_scale=noise_scale(memory.state),
        series=memory.series,
        pauses=pauses(events, memory.status.last_pause if memory.status is not None else None),
        shares=shares_of_time(events, memory.status, begun_s, memory.ended_s or now_s),
        workers=tuple(_worker(each, slow, answer.ray_dashboard) for each in answer.workers),
        events=tuple((e.time_s, e.kind.value, e.from_workers, e.to_workers, clipped(e.reason)) for e in events),
        logs=memory.facts.storage if memory.facts is not None else "",
    )


def _worker(info: WorkerInfo, slow_nodes: Mapping[str, float], ray_dashboard: str) -> tuple[Any, ...]:
    """A line of the workers' table; what a worker is like counts before what is known of its node."""
    slowness = info.slowness if info.slowness is not None else slow_nodes.get(info.node)
    logs = f"{ray_dashboard}/#/logs/?nodeId={quote(info.node)}" if ray_dashboard else None
    return info.rank, info.node, info.pid, info.generation, info.silence_s, slowness, logs


def _gain(told: Explanation | None, goodput: float | None) -> float | None:
    """What one more worker adds to this goodput [samples/s], by the speeds that the allocator goes by."""
    if told is None or told.speed_with_one_more is None or told.speed <= 0 or goodput is None:
        return None
    return goodput * (told.speed_with_one_more / told.speed - 1.0)


def _curve(view: JobView | None, cluster: Cluster) -> tuple[tuple[int, float], ...]:
    """(workers, goodput) by the fitted model, at sizes that fit on these nodes; empty without a model."""
    if view is None or view.goodput is None:
        return ()
    slots = FreeResources(cluster).slots(view).tolist()
    values = finite(goodputs(view, slots))[:MOST_SIZES]
    return tuple((number, value) for number, value in enumerate(values, start=1) if value > 0)


def _measured(view: JobView | None) -> tuple[tuple[int, float], ...]:
    """(workers, goodput) of each size's measured steps: the best of those that were tried there."""
    if view is None or view.goodput is None:
        return ()
    best: dict[int, float] = {}
    for observations in view.observations.values():
        for seen in observations:
            batch = seen.replicas * seen.atomic_bsz * (seen.accum_steps + 1)
            if batch >= 1:
                value = batch / seen.step_time * float(view.goodput.efficiency(batch))
                best[seen.replicas] = max(best.get(seen.replicas, 0.0), value)
    return tuple(sorted(best.items()))
