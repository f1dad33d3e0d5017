"""Workload recorded on a real cluster, converted to simulator input: jobs, lengths and fitted profiles."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from placement.allocator.events import JobEnded, JobHeartbeat, NodesChanged
from placement.allocator.recording import Life
from placement.cluster.cluster import Cluster, is_split, parts
from placement.cluster.jobs import JobView
from placement.errors import InputError
from placement.goodput.fitting import Observation, fit
from placement.goodput.model import NoiseScale
from placement.goodput.step_time import ThroughputModel
from placement.planning.spans import find_places, spans_nodes
from placement.simulator.workloads.profiles import Application, Counts
from placement.simulator.workloads.traces import TraceJob

_STILL = NoiseScale(sqr=1.0, var=0.0)  # of a batch that stays as it is the noise does not matter


@dataclasses.dataclass(frozen=True, slots=True)
class FittedTimes:
    """Step times predicted by a fitted throughput model."""

    model: ThroughputModel  # fitted to what was measured
    local_bsz_range: tuple[int, int]  # see ``Times``

    def times(self, counts: Counts, local_bsz: float) -> tuple[float, float]:
        """Return the step time and its synchronisation part from the model [s]; see ``Times``."""
        step_s = float(self.model.step_time(len(counts), sum(counts), local_bsz, 0))
        return step_s, step_s - min(float(self.model.step_time(1, 1, local_bsz, 0)), step_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """Job recorded on a real cluster."""

    job: str
    application: str  # fingerprint of its model
    arrival_s: float  # when the allocator first heard of it [s from the first arrival]
    granted_s: float | None  # when it was first given workers [s from the first arrival]; None if it never was
    end_s: float | None  # when it was over [s from the first arrival]; None if it was not yet
    epochs: int  # that it trained, or that it declares while it is not over
    view: JobView  # as it was heard of last


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWorkload:
    """Workload as arguments for ``simulate``: jobs, profiles and cluster."""

    jobs: tuple[RecordedJob, ...]  # in the order of their arrival
    applications: Mapping[str, Application]
    cluster: str  # as a string, all nodes with as many workers as fit
    most_workers: int  # the most that any of the jobs may have
    started_s: float  # the first arrival [s since the epoch]

    @property
    def trace(self) -> tuple[TraceJob, ...]:
        """Trace jobs, in order of arrival."""
        return tuple(
            TraceJob(
                name=job.job,
                time_s=job.arrival_s,
                application=job.application,
                num_replicas=job.view.max_workers,
                batch_size=self.applications[job.application].init_batch_size,
                sizes=job.view.sizes,
            )
            for job in self.jobs
        )

    @property
    def epochs(self) -> dict[str, int]:
        """Number of epochs, keyed by job, for ``Lengths``."""
        return {job.job: job.epochs for job in self.jobs}


def recorded_workload(life: Life, *, gpu: str = "t4") -> RecordedWorkload:
    """Return the jobs in a recording, with profiles fitted to all of their measurements.

    Args:
        gpu: GPU type assumed for nodes whose type is unknown.
    """
    beats = [(now_s, event.view) for now_s, event in life.events if isinstance(event, JobHeartbeat)]
    if not beats:
        raise InputError("a recorded workload must hold one job or more, but no heartbeat was recorded")
    started_s = min(now_s for now_s, _ in beats)
    first = {view.job: now_s for now_s, view in reversed(beats)}
    last = {view.job: view for _, view in beats}
    last |= {e.job: e.view for _, e in life.events if isinstance(e, JobEnded) and e.view is not None and e.job in last}
    ends = {event.job: now_s for now_s, event in life.events if isinstance(event, JobEnded)}
    granted = {record.job: record.time_s for record in reversed(life.decided) if record.to_workers}
    jobs = tuple(
        RecordedJob(
            job=name,
            application=view.fingerprint or "",
            arrival_s=first[name] - started_s,
            granted_s=granted[name] - started_s if name in granted else None,
            end_s=ends[name] - started_s if name in ends else None,
            epochs=_epochs(view, ended=name in ends),
            view=view,
        )
        for name, view in sorted(last.items(), key=lambda item: first[item[0]])
    )
    families: dict[str, list[RecordedJob]] = {}
    for job in jobs:
        families.setdefault(job.application, []).append(job)
    return RecordedWorkload(
        jobs=jobs,
        applications={name: _application(name, several, gpu) for name, several in families.items()},
        cluster=_cluster(life, [job.view for job in jobs], gpu),
        most_workers=max(job.view.max_workers for job in jobs),
        started_s=started_s,
    )


def _epochs(view: JobView, *, ended: bool) -> int:
    """Return the number of epochs that the job trained for, or that it declares if it has not ended.

    An ended job's last heartbeat may be a second old, so its progress after the last full epoch is extrapolated.
    """
    progress = view.progress
    if progress is None or (progress.epochs is None and not progress.epoch_ends):
        raise InputError(f"job {view.job!r} of a recorded workload must have finished or declared an epoch")
    finished = float(len(progress.epoch_ends))
    if ended and progress.epoch_ends:
        finished = progress.done * finished / progress.epoch_ends[-1]
    declared = progress.epochs if progress.epochs is not None else finished
    return max(1, round((min(finished, declared) if ended else declared) * progress.stride))


def _application(name: str, jobs: Sequence[RecordedJob], gpu: str) -> Application:
    """Return the fitted profile for the jobs that train one model."""
    views = [job.view for job in jobs]
    seen: dict[str, list[Observation]] = {}
    for view in views:
        for kind, observations in view.observations.items():
            seen.setdefault(kind or gpu, []).extend(observations)
    told = next((view for view in views if view.init_batch_size is not None and view.goodput is not None), None)
    lengths = [p.epoch_ends[-1] / (len(p.epoch_ends) * p.stride) for v in views if (p := v.progress) and p.epoch_ends]
    if not name or told is None or told.init_batch_size is None or told.goodput is None or not lengths or not seen:
        names = ", ".join(job.job for job in jobs)
        raise InputError(f"jobs {names} of a recorded workload must have measured steps, and finished an epoch")
    fixed = told.max_batch_size is None
    bounds = told.atomic_bsz_range or (1, told.init_batch_size)
    local = bounds[0], min(bounds[1], told.max_batch_size or told.init_batch_size)
    first, most = told.init_batch_size, told.max_batch_size or told.init_batch_size
    return Application.fitted(
        name,
        batch_sizes=(first,) if first == most else (first, most),
        epochs=max(job.epochs for job in jobs),
        epoch=statistics.fmean(lengths),
        noise=_STILL if fixed else told.goodput.noise,
        step_times={kind: FittedTimes(fit(found, fixed_batch=fixed), local) for kind, found in seen.items()},
    )


def _cluster(life: Life, views: Sequence[JobView], gpu: str) -> str:
    """Return the largest recorded cluster, such as ``t4:2x4``, in workers; nodes that a unit spans count as one."""
    bundles = {tuple(sorted(view.bundle.items())) for view in views}
    if len(bundles) > 1:
        raise InputError(f"jobs of a recorded workload must have workers of one kind, but have {len(bundles)}")
    bundle = dict(bundles.pop())

    def room(cluster: Cluster) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        nodes = cluster.by_id()
        for place in find_places(views[0], cluster, len(nodes)) if spans_nodes(views[0], cluster) else ():
            if is_split(place):
                found.setdefault(nodes[next(iter(parts(place)))].gpu_type or gpu, []).append(1)
        for node in cluster.nodes:
            if node.slots(bundle):
                found.setdefault(node.gpu_type or gpu, []).append(node.slots(bundle))
        return found

    rooms = [room(event.cluster) for _, event in life.events if isinstance(event, NodesChanged)]
    largest = max(rooms, key=lambda found: sum(map(sum, found.values())), default={})
    unlike = [kind for kind, slots in largest.items() if len(set(slots)) > 1]
    if unlike or not largest:
        raise InputError(f"nodes of a recorded workload must hold equally many workers in each type, but got {largest}")
    return ",".join(f"{kind}:{len(slots)}x{slots[0]}" for kind, slots in sorted(largest.items()))
