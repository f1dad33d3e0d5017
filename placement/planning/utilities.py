"""Utilities of jobs: how many workers are worth their cost, under every policy."""

from __future__ import annotations

import dataclasses

import numpy as np

from placement.cluster.cluster import Allocation
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView
from placement.goodput.remaining import seconds_to_end
from placement.goodput.step_time import Floats
from placement.planning.problem import Problem
from placement.reasons import Cause, Reason, count


def paying_size(view: JobView, slots: list[int], now_s: float) -> int | None:
    """Return the most workers that are worth their cost by the job's utility; None where it does not tell.

    The price is that of the job's bill. Where nobody knows prices workers cost nothing, and those count that end the
    job before its value falls.
    """
    left_s = seconds_to_end(view, slots) if view.held_at is None else None
    if view.utility is None or left_s is None:
        return None
    stays = np.arange(1, len(left_s) + 1) == view.workers
    left_s = left_s + np.where(stays, 0.0, view.resize_cost_s)
    usd_per_h: Floats = np.arange(1.0, len(left_s) + 1) * (0.0 if view.bill is None else view.bill.worker_usd_per_h)
    age_s = max(now_s - view.submitted_s, 0.0)
    return view.utility.best_size(age_s, left_s, usd_per_h, view.min_workers, view.workers)


def limit_by_utility(problem: Problem, now_s: float) -> Problem:
    """Return the problem with jobs limited to the workers that are worth their cost."""
    if all(view.utility is None for view in problem.views):
        return problem
    empty, views = FreeResources(problem.cluster), []
    for view in problem.views:
        best = paying_size(view, empty.slots(view).tolist(), now_s)
        if best is not None and best < view.max_workers:
            view = dataclasses.replace(view, max_workers=best)
        views.append(view)
    return dataclasses.replace(problem, views=views)


def utility_notes(problem: Problem, limited: Problem, allocation: Allocation) -> dict[str, Reason]:
    """Return the reasons of jobs that have all that is worth its cost, and could have more."""
    return {
        less.job: Reason(Cause.UTILITY, (count(less.max_workers),))
        for view, less in zip(problem.views, limited.views, strict=True)
        if less.max_workers < view.useful_workers and sum(allocation.get(less.job, {}).values()) == less.max_workers
    }
