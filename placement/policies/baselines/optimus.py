"""``optimus``: workers go one by one to the job whose remaining time drops the most."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, oracle_of, speeds
from placement.cluster.packing import FreeResources
from placement.policies.shared.base import Admission, Target, admit, climb, held
from placement.policies.shared.stable_placement import WorstFitPlacer
from placement.reasons import Cause, Reason
from placement.text import count

_NEVER_S = 1e12  # step time of a size at which the job makes no progress


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimusPolicy:
    """Policy that greedily minimises the sum of remaining times (Peng et al., "Optimus", EuroSys 2018).

    Every job first gets its minimum, in order of submission. Then one worker at a time goes to the job with the largest
    (T(k) - T(k + 1)) x remaining steps, as long as this is positive (section 4.1). T(k), the step time on k workers,
    comes from the oracle if a simulation provides one, else from the fitted model. Without an oracle, the remaining
    steps come from declared epochs and measured progress; if they are unknown for any job, they count as equal for all.
    ``JobView.weight`` multiplies the time that a worker saves.
    """

    name = "optimus"
    rigid: bool = dataclasses.field(default=True, init=False)

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target size, and the reason for it, for each job, keyed by job name; see ``Policy.decide``."""
        told = any(oracle_of(view) is not None for view in jobs)
        admission = _in_order(jobs, cluster) if told else admit(jobs, cluster)
        targets = {job: Target(workers=0, reason=why) for job, why in admission.waiting.items()}
        curves = _remaining_times(jobs, cluster, admission)

        def score(view: JobView, workers: int) -> float | None:
            times = curves[view.job]
            saved = times[workers] - times[workers + 1] if workers + 1 < len(times) else 0.0
            return float(saved) * view.weight if saved > 0 else None

        counts = climb(jobs, admission, score)
        places = _places(jobs, counts, cluster) if told else {}
        for view in jobs:
            if view.job in counts:
                workers = counts[view.job]
                said = held(view, workers) or _reason(curves[view.job], workers)
                nodes = places.get(view.job)
                targets[view.job] = Target(workers=workers, reason=said, nodes=nodes)
        return targets


def _in_order(jobs: Sequence[JobView], cluster: Cluster) -> Admission:
    """Admit minimums in order of submission, as published."""
    admission = Admission(empty=FreeResources(cluster), room=FreeResources(cluster), floors={}, waiting={})
    for view in sorted(jobs, key=lambda view: view.arrival):
        if admission.room.add(view, view.min_workers):
            admission.floors[view.job] = view.min_workers
        else:
            admission.waiting[view.job] = Reason(Cause.EARLIER)
    return admission


def _remaining_times(jobs: Sequence[JobView], cluster: Cluster, admission: Admission) -> dict[str, NDArray[np.float64]]:
    """Return the remaining time [s] of each admitted job on 0..n workers; entry 0 stands for never."""
    empty = FreeResources(cluster)
    admitted = [view for view in jobs if view.job in admission.floors]
    rates = {view.job: _rates(view, empty) for view in admitted if oracle_of(view) is None}
    work = {view.job: _remaining_s(view) for view in admitted if oracle_of(view) is None}
    equal = any(each is None for each in work.values())
    times: dict[str, NDArray[np.float64]] = {}
    for view in admitted:
        oracle = oracle_of(view)
        if oracle is not None:
            steps = np.array([_NEVER_S, *oracle.step_s[: view.max_workers]])
            times[view.job] = steps * oracle.remaining_steps
        else:
            remaining_s = work[view.job]
            times[view.job] = np.minimum(1.0 / rates[view.job], _NEVER_S) * (1.0 if equal else remaining_s or 1.0)
    return times


def _rates(view: JobView, empty: FreeResources) -> NDArray[np.float64]:
    return np.maximum(speeds(view, empty.slots(view).tolist()), 1.0 / _NEVER_S)


def _remaining_s(view: JobView) -> float | None:
    """Return the time to the end [s] at the job's smallest size, from declared epochs and progress; None if unknown."""
    told = view.progress
    if told is None or told.epochs is None or view.goodput is None or told.done <= 0:
        return None
    finished = len(told.epoch_ends)
    per_epoch = told.epoch_ends[-1] / finished if finished else told.done
    missing = max(told.epochs * per_epoch - told.done, per_epoch * 0.1)
    rate, _, _ = view.goodput.best(
        1, view.min_workers, max_batch_size=None, atomic_bsz_range=view.atomic_bsz_range, accumulation=True
    )
    return missing * view.goodput.init_batch_size / rate if rate > 0 else None


def _places(jobs: Sequence[JobView], counts: Mapping[str, int], cluster: Cluster) -> dict[str, Mapping[str, int]]:
    """Return nodes for the counts: unchanged jobs keep theirs; others get the roomiest nodes, smallest job first."""
    placer = WorstFitPlacer(cluster)
    placed: dict[str, Mapping[str, int]] = {}
    waiting: list[JobView] = []
    for view in jobs:
        kept = placer.keep(view) if view.job in counts and counts[view.job] == view.workers else None
        if kept:
            placed[view.job] = kept
        elif counts.get(view.job):
            waiting.append(view)
    for view in sorted(waiting, key=lambda view: (counts[view.job], view.arrival)):
        nodes = placer.spread(view, counts[view.job])
        if nodes is not None:
            placed[view.job] = nodes
    return placed


def _reason(times: NDArray[np.float64], workers: int) -> str:
    text = f"{times[workers]:.4g} s are left with {count(workers)}"
    if workers + 1 < len(times):
        text += f", one more would save {times[workers] - times[workers + 1]:.3g} s"
    return text
