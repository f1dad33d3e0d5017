"""All that may be done with a model in a group, with predictions: what a choice is made from (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from elastic_ray.sync.choosing.candidates import PLAIN, Candidate, candidates, what_is_done
from elastic_ray.sync.choosing.choice import Option
from elastic_ray.sync.choosing.cost import predict
from elastic_ray.sync.choosing.links import LinkTable
from elastic_ray.sync.plan import SyncPlan, lower
from elastic_ray.sync.profile import ModelProfile, Topology
from elastic_ray.sync.spec import Strategy


def with_rows(profile: ModelProfile, rows: Mapping[str, int]) -> ModelProfile:
    """The profile with touched rows of tables, by their names."""
    params = (dataclasses.replace(each, rows=rows.get(each.name, each.rows)) for each in profile.params)
    return dataclasses.replace(profile, params=tuple(params))


def consider(
    profile: ModelProfile,
    topology: Topology,
    links: LinkTable,
    present: Strategy,
    now_s: float,
    *,
    exact: bool,
    works: Callable[[SyncPlan], bool] = lambda plan: True,
) -> tuple[Option, ...]:
    """Options, of which exactly one does what is done at present.

    What a step takes at present, less what synchronisation is predicted to take of it, is the compute of all options.

    Args:
        profile: the model, with the touched rows of its tables.
        topology: the group.
        links: of that group.
        present: the strategy in force.
        now_s: a step under it [s].
        exact: only strategies whose step is that of plain data-parallel training.
        works: whether a plan can be carried out.
    """
    plan = lower(present, profile, topology)
    done = what_is_done(plan)
    compute_s = max(0.0, now_s - _sync_s(plan, profile, links, topology, now_s))
    found = list(candidates(profile, topology, exact=exact, works=works))
    if not any(what_is_done(each.plan) == done for each in found):
        found.append(Candidate(strategy=present, plan=plan))
    options = []
    for each in found:
        here = what_is_done(each.plan) == done
        try:
            seconds = compute_s + predict(each.plan, profile, links, topology).sync_s
        except KeyError:  # of an operation that was not measured
            if not here:
                continue
            seconds = now_s
        plain = each is found[0] and each.strategy.default == PLAIN
        options.append(Option(strategy=each.strategy, predicted_s=seconds, plain=plain, present=here))
    return tuple(options)


def _sync_s(plan: SyncPlan, profile: ModelProfile, links: LinkTable, topology: Topology, now_s: float) -> float:
    """What synchronisation takes at present; all of the step where it cannot be told."""
    try:
        return predict(plan, profile, links, topology).sync_s
    except KeyError:
        return now_s
