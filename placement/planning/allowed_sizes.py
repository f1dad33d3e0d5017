"""Jobs that cannot train with every number of workers; kept for every policy, which need not know of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from placement.planning.problem import Plan, Problem, Solver

# What a job gives back may let others grow into sizes of theirs that are not allowed either; more than two are rare.
_SIZE_ROUNDS = 4


def in_allowed_sizes(problem: Problem, solve: Solver) -> Plan:
    """Ask, and again with jobs limited to the next allowed size below, until all sizes are allowed.

    What is left of that after some rounds is cut down where it stands.
    """
    views = {view.job: view for view in problem.views}
    for _ in range(_SIZE_ROUNDS):
        plan = solve(dataclasses.replace(problem, views=list(views.values())))
        limits = _limits(problem, plan)
        if not limits:
            return plan
        for job, most in limits.items():
            view = views[job]
            if most:
                views[job] = dataclasses.replace(
                    view,
                    min_workers=min(view.min_workers, most),
                    max_workers=min(view.max_workers, most),
                    held_at=None if view.held_at is None else min(view.held_at, most),
                    wished=None if view.wished is None else min(view.wished, most),
                )
    return _cut(problem, plan, _limits(problem, plan))


def _limits(problem: Problem, plan: Plan) -> dict[str, int]:
    """By job whose size is not allowed, the next one below that is; 0 for none."""
    found: dict[str, int] = {}
    for view in problem.views:
        workers = sum(plan.allocation.get(view.job, {}).values())
        if workers and not view.sizes.allow(workers):
            found[view.job] = view.sizes.at_most(workers)
    return found


def _cut(problem: Problem, plan: Plan, limits: Mapping[str, int]) -> Plan:
    """The plan with so many workers of these jobs; those on nodes with the fewest of them go first."""
    allocation = {job: dict(place) for job, place in plan.allocation.items()}
    reasons = dict(plan.reasons)
    sizes = {view.job: view.sizes for view in problem.views}
    for job, most in limits.items():
        place = allocation[job]
        reasons[job] = f"only {sum(place.values())} workers find room, and of {sizes[job]} that leaves {most}"
        for node, workers in sorted(place.items(), key=lambda item: (item[1], item[0])):
            less = min(workers, sum(place.values()) - most)
            place[node] -= less
        allocation[job] = {node: workers for node, workers in place.items() if workers}
    return dataclasses.replace(
        plan, allocation={job: place for job, place in allocation.items() if place}, reasons=reasons
    )
