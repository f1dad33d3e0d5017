"""``goodput``: workers go where they speed training up most, fairly, and only if the change pays back."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster
from placement.jobs import JobView, speeds
from placement.policies.base import Admission, Target, admit, count, held_reason
from placement.room import Room

_NEVER = 1e-9  # a size at which the job makes no progress; its logarithm loses against every real size
_TINY = 1e-9  # gains below this are rounding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GoodputPolicy:
    """Maximises the sum over jobs of log speed(workers), less what changes cost.

    speed is the job's goodput relative to its own smallest size (``placement.jobs.speeds``). The logarithm
    makes the result proportionally fair (Nash's bargaining solution): it does not depend on each job's unit
    of speed, doubling a slow job is worth as much as doubling a fast one, and since log falls without bound
    nobody starves; equal jobs get equal shares, jobs that scale better get more.

    From k0 to k workers a job pays, with d = ``resize_cost_s`` and H = ``horizon_s``,

        cost(k0 -> k) = -log(1 - d / H) if k != k0, and log(1 + hysteresis) on top if k < k0,

    so a change must win back the time it takes within the horizon, and workers are taken from a running job
    only for a gain beyond the hysteresis. That cost obeys the triangle inequality, so what was optimal stays
    so once it is carried out. The optimum is approached by giving workers in the order of gain per dominant
    resource share along each job's concave hull, once from everybody's minimum and once from the present
    sizes; the better one wins.

    Attributes:
        horizon_s: time within which a change must pay back [s].
        hysteresis: relative gain that is worth taking a worker away from a running job for.
    """

    horizon_s: float = 60.0
    hysteresis: float = 0.05

    def __post_init__(self) -> None:
        if not self.horizon_s > 0:
            raise ValueError(f"horizon_s must be above 0 seconds, but got {self.horizon_s}")
        if not self.hysteresis >= 0:
            raise ValueError(f"hysteresis must be 0 or more, but got {self.hysteresis}")

    @property
    def name(self) -> str:
        """See ``Policy``."""
        return "goodput"

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """See ``Policy``."""
        admission = admit(jobs, cluster)
        targets = {job: Target(workers=0, reason=f"goodput: {why}") for job, why in admission.waiting.items()}
        growing = {view.job: view for view in sorted(jobs, key=lambda v: v.arrival) if _may_grow(view, admission)}
        curves = _curves(growing, cluster)
        present = {job: min(view.workers, len(curves[job]) - 1) for job, view in growing.items()}
        counts = self._settle(growing, curves, present, admission)
        for view in jobs:
            if view.job in growing:
                reason = self._reason(view, curves[view.job], counts[view.job])
                targets[view.job] = Target(workers=counts[view.job], reason=reason)
            elif view.job in admission.floors:
                workers = admission.floors[view.job]
                targets[view.job] = Target(workers=workers, reason=f"goodput: {_stays(view, workers)}")
        return targets

    def _settle(
        self,
        jobs: Mapping[str, JobView],
        curves: Mapping[str, NDArray[np.float64]],
        present: Mapping[str, int],
        admission: Admission,
    ) -> dict[str, int]:
        """Decide until the decision would not change itself: greedy is near the optimum, not always at it."""
        chosen = dict(present)
        for _ in range(10):
            worth = {job: self._worth(view, curves[job], chosen[job]) for job, view in jobs.items()}
            options = [self._fill(jobs, worth, admission.floors, admission.room.copy())]
            raised = _raised(jobs, chosen, admission)
            if raised is not None:
                options.insert(0, self._fill(jobs, worth, *raised))
            best = max(options, key=lambda counts: round(sum(worth[job][n] for job, n in counts.items()), 9))
            if best == chosen:
                break
            chosen = best
        return chosen

    def _worth(self, view: JobView, curve: NDArray[np.float64], present: int) -> NDArray[np.float64]:
        """log speed(k) less cost(present -> k), for every k."""
        worth = np.log(np.maximum(curve, _NEVER))
        if present > 0:
            cost = -math.log(1.0 - min(view.resize_cost_s / self.horizon_s, 0.99))
            worth[present + 1 :] -= cost
            worth[:present] -= cost + math.log1p(self.hysteresis)
        return worth

    def _fill(
        self,
        jobs: Mapping[str, JobView],
        worth: Mapping[str, NDArray[np.float64]],
        start: Mapping[str, int],
        room: Room,
    ) -> dict[str, int]:
        """Grow from ``start`` until nothing that fits gains anything, best gain per share first."""
        counts = {job: start[job] for job in jobs}
        order = {job: rank for rank, job in enumerate(jobs)}
        heap: list[tuple[float, int, str, int]] = []

        def offer(job: str, limit: int | None = None) -> None:
            step = _best_step(worth[job], counts[job], limit)
            if step is not None:
                gain, more = step
                heapq.heappush(heap, (-gain / room.share(jobs[job]), order[job], job, more))

        for job in counts:
            offer(job)
        while heap:
            _, _, job, more = heapq.heappop(heap)
            if room.add(jobs[job], more):
                counts[job] += more
                offer(job)
            else:
                offer(job, limit=int(room.slots(jobs[job]).sum()))
        return counts

    def _reason(self, view: JobView, curve: NDArray[np.float64], workers: int) -> str:
        """The decision for one job as a sentence."""
        before = view.workers
        scale = "assumed, no model yet" if view.goodput is None else "fitted"
        if workers == before:
            text = f"stays at {count(workers)}, speed {curve[workers]:.2f}"
        elif before == 0:
            text = f"starts with {count(workers)}, speed {curve[workers]:.2f}"
        else:
            old = f"{curve[before]:.2f} to {curve[workers]:.2f}" if before < len(curve) else f"to {curve[workers]:.2f}"
            text = f"{before} -> {count(workers)} changes its speed from {old}"
        if workers + 1 < len(curve):
            text += f", one more would add {curve[workers + 1] - curve[workers]:.2f}"
        return f"goodput: {text} ({scale}); a resize costs {view.resize_cost_s:.3g} s"


def _may_grow(view: JobView, admission: Admission) -> bool:
    """Admitted, not held, and something is left for it beside everybody's minimum."""
    admitted = view.job in admission.floors and view.held_at is None
    return admitted and view.useful_workers > view.min_workers and bool(admission.room.slots(view).any())


def _stays(view: JobView, workers: int) -> str:
    if view.held_at is not None:
        return held_reason(view, workers)
    if workers == view.useful_workers:
        return f"{count(workers)} {'is' if workers == 1 else 'are'} the most it can use now"
    return f"{count(workers)}, its minimum, since nothing is left beside the minimums of all jobs"


def _curves(jobs: Mapping[str, JobView], cluster: Cluster) -> dict[str, NDArray[np.float64]]:
    """Speed per size of every job on the empty cluster, at least up to its minimum."""
    empty = Room(cluster)
    return {job: speeds(view, empty.slots(view).tolist()) for job, view in jobs.items()}


def _raised(
    jobs: Mapping[str, JobView], present: Mapping[str, int], admission: Admission
) -> tuple[dict[str, int], Room] | None:
    """The present sizes as a starting point, with the room that they leave; None if they do not fit."""
    room = admission.room.copy()
    counts: dict[str, int] = {}
    for job, view in jobs.items():
        floor = admission.floors[job]
        counts[job] = max(present[job], floor)
        if counts[job] > floor and not room.add(view, counts[job] - floor):
            return None
    return counts, room


def _best_step(worth: NDArray[np.float64], present: int, limit: int | None) -> tuple[float, int] | None:
    """The next step along the upper concave hull: gain per worker and workers; None if nothing gains."""
    end = len(worth) if limit is None else min(len(worth), present + 1 + limit)
    if end <= present + 1:
        return None
    gains = (worth[present + 1 : end] - worth[present]) / np.arange(1, end - present)
    best = int(np.argmax(gains))
    return (float(gains[best]), best + 1) if gains[best] > _TINY else None
