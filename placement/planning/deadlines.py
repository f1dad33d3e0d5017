"""Deadlines: how many workers meet one, and which can be guaranteed (Gu et al., "ElasticFlow", ASPLOS 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from placement.cluster.cluster import Cluster
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView
from placement.goodput.remaining import seconds_to_end
from placement.planning.problem import Problem, by_precedence, secured
from placement.reasons import Cause, Reason, count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SatisfactoryShare:
    """Share of workers that a deadline requires."""

    # the minimum satisfactory share: the fewest workers that meet it; None if no number does, or if it is not known yet
    workers: int | None
    why_not: str = ""  # a sentence if it is None


def minimum_satisfactory_share(view: JobView, slots: Sequence[int], now_s: float) -> SatisfactoryShare:
    """Return the fewest workers with which the job's estimated remaining time meets its deadline.

        remaining work x M0 / goodput(k) <= deadline - now,    less the cost of a change for more than it has

    with the remaining work as ``seconds_to_end`` has it.

    Args:
        slots: how many of its workers fit on each node of the empty cluster.
        now_s: present time [s since the epoch].
    """
    assert view.deadline_s is not None, f"job {view.job} has no deadline"
    left_s = view.deadline_s - now_s
    if left_s <= 0:
        return SatisfactoryShare(workers=None, why_not="has passed")
    takes_s = seconds_to_end(view, slots)
    if takes_s is None:
        return SatisfactoryShare(workers=None, why_not="not known yet how long the job takes")
    takes_s[view.workers :] += view.resize_cost_s
    enough = np.flatnonzero(takes_s[view.min_workers - 1 :] <= left_s)
    if not len(enough):
        return SatisfactoryShare(
            workers=None, why_not=f"cannot be met, not with {max(len(takes_s), view.min_workers)} workers either"
        )
    workers = view.min_workers + int(enough[0])
    return SatisfactoryShare(workers=view.sizes.at_least(workers) or workers)


def guarantee(
    views: Sequence[JobView], cluster: Cluster, before: Collection[str], now_s: float, refused: Mapping[str, str]
) -> tuple[Problem, dict[str, Reason]]:
    """Give each job whose deadline can be met the minimum of workers that meets it.

    Jobs come in the order of precedence of their minimums: after jobs that may not be stopped and those of
    higher priority, before the others of their own; those that had a guarantee before come first. What does not fit
    beside the others' shares gets no guarantee and runs as well as it can.

    Args:
        before: jobs whose deadline the last decision guaranteed.
        now_s: present time [s since the epoch].
        refused: jobs that get no guarantee, and why.

    Returns the jobs with these minimums, and what to add to the reason of each job with a deadline.
    """
    dated = {view.job for view in views if view.deadline_s is not None}
    if not dated:
        return Problem(views=views, cluster=cluster), {}
    empty, room = FreeResources(cluster), FreeResources(cluster)
    order = by_precedence(Problem(views=views, cluster=cluster, guaranteed=frozenset(dated)))
    safe = {view.job for view in order if secured(view) and room.add(view, view.min_workers)}
    raised: dict[str, JobView] = {}
    notes: dict[str, Reason] = {}
    for view in sorted(order, key=lambda v: (-v.priority, v.job not in dated, v.job not in before)):
        has = view.min_workers if view.job in safe else 0
        if view.job in dated:
            need = _need(view, empty.slots(view).tolist(), now_s, refused)
            if need.workers is not None and room.add(view, need.workers - has):
                raised[view.job] = dataclasses.replace(view, min_workers=need.workers)
                notes[view.job] = Reason(Cause.DEADLINE, (count(need.workers),))
                continue
            why = need.why_not or f"{count(need.workers or 0)} would meet it, but not beside what others are promised"
            notes[view.job] = Reason(Cause.NO_DEADLINE, (why,), "it runs as well as it can")
        room.add(view, view.min_workers - has)
    problem = Problem(
        views=[raised.get(view.job, view) for view in views], cluster=cluster, guaranteed=frozenset(raised)
    )
    return problem, notes


def _need(view: JobView, slots: Sequence[int], now_s: float, refused: Mapping[str, str]) -> SatisfactoryShare:
    if view.job in refused:
        return SatisfactoryShare(workers=None, why_not=refused[view.job])
    if view.held_at is not None:
        return SatisfactoryShare(workers=None, why_not="its user holds it at a size")
    return minimum_satisfactory_share(view, slots, now_s)
