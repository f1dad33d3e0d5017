"""``utility_band``: enough workers to keep the cluster's utility within a band."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping

import numpy as np

from placement.autoscaling.objectives.base import Demand, NodeTypeOption, WantedSize, option_on
from placement.goodput.step_time import Floats
from placement.reasons import Cause, Reason
from placement.text import count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UtilityBand:
    """Objective that implements Pollux's rule for the size of a cluster (OSDI 2021, section 4.2.3).

        utility(n) = sum over jobs of speed-up_j / n

    with n workers distributed to maximise the sum; perfect scaling is a speed-up of k on k workers. While the utility
    at the current size is within [low, high], the size is kept. Otherwise, the new size is the one with a utility
    closest to the middle of the band. Goodput includes statistical efficiency, so jobs grow as larger batches become
    effective.
    """

    name = "utility_band"
    low: float = 0.35  # utility below which the cluster shrinks
    high: float = 0.65  # utility above which it grows

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high <= 1:
            raise ValueError(f"low and high must satisfy 0 < low < high <= 1, but got {self.low} and {self.high}")

    def decide(self, demand: Demand, now_s: float) -> Mapping[str, WantedSize]:
        """Return the wanted size of each job, keyed by job name; see ``Objective.decide``."""
        jobs = {view.job: view for view in demand.jobs if demand.offers[view.job]}
        chosen = {job: option_on(demand.offers[job], demand.gpus[job]) for job in jobs}
        speeds = {job: _speeds(offer, jobs[job].min_workers) for job, offer in chosen.items()}
        least = {
            job: len(speed) - 1 if jobs[job].held_at is not None else jobs[job].min_workers
            for job, speed in speeds.items()
        }
        sizes, totals = _climb(speeds, least)
        present = sum(view.workers for view in jobs.values())
        start = sum(least.values())
        utility = totals / np.maximum(np.arange(start, start + len(totals)), 1)
        at = present - start
        if 0 <= at < len(utility) and self.low <= utility[at] <= self.high:
            n, why = present, "inside"
        else:
            at = int(np.argmin(np.abs(utility - (self.low + self.high) / 2)))
            n, why = start + at, "nearest to"
        wants = least | dict(sizes[: n - start])
        figures = f"{count(n)} of all jobs, band {self.low:g} to {self.high:g}"
        return {
            job: WantedSize(
                job=job,
                workers=wants[job],
                gpu=chosen[job].kind.gpu_type,
                reason=Reason(Cause.BAND, (float(utility[at]), why, count(wants[job])), figures),
            )
            for job in jobs
        }


def _speeds(offer: NodeTypeOption, least: int) -> Floats:
    """Return the speed-up on 0..n workers within exploration limits, normalised to ``least`` on ``least`` workers."""
    rate = offer.rate[: max(offer.limit, least)]
    speed: Floats = np.concatenate([[0.0], rate * (least / rate[least - 1] if rate[least - 1] > 0 else 1.0)])
    return speed


def _climb(speeds: Mapping[str, Floats], least: Mapping[str, int]) -> tuple[list[tuple[str, int]], Floats]:
    """Add one worker at a time to the job with the largest gain, skipping sizes where speed dips.

    Returns (job, its new number of workers) for each worker beyond the minimums, and the sum of speed-ups after each.
    """
    hulls = {job: _hull(speed[least[job] :]) for job, speed in speeds.items()}
    heap = [(-float(hull[1] - hull[0]), job, 1) for job, hull in hulls.items() if len(hull) > 1]
    heapq.heapify(heap)
    order: list[tuple[str, int]] = []
    totals = [sum(float(hull[0]) for hull in hulls.values())]
    while heap:
        gain, job, more = heapq.heappop(heap)
        order.append((job, least[job] + more))
        totals.append(totals[-1] - gain)
        if more + 1 < len(hulls[job]):
            heapq.heappush(heap, (-float(hulls[job][more + 1] - hulls[job][more]), job, more + 1))
    return order, np.array(totals)


def _hull(values: Floats) -> Floats:
    """Return the least concave curve above these values at 0, 1, 2..., which ends at their maximum."""
    values = values[: int(np.argmax(values)) + 1]
    points = [0]
    for i in range(1, len(values)):
        while len(points) > 1 and (values[i] - values[points[-2]]) * (points[-1] - points[-2]) >= (
            values[points[-1]] - values[points[-2]]
        ) * (i - points[-2]):
            points.pop()
        points.append(i)
    hull: Floats = np.interp(np.arange(len(values)), points, values[points])
    return hull
