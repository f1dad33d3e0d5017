"""Deadlines: shares worked out by hand, what is promised, and what is said where nothing can be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobHeartbeat, NodesChanged
from placement.cluster.jobs import JobView, Progress
from placement.planning.constraints import minimum_satisfactory_share
from placement.planning.plan import make_plan
from placement.policies import POLICIES, make_policy
from tests.placement.dated import HALFWAY, dated
from tests.placement.views import AT_ONCE, cluster, view

every = pytest.mark.parametrize("name", sorted(POLICIES))


def plan(name: str, *jobs: JobView, cpus: int = 8, **more: Any) -> Any:
    return make_plan(make_policy(name), jobs, cluster(cpus), 1000.0, **more)


def sizes(found: Any) -> dict[str, int]:
    return {job: sum(place.values()) for job, place in found.allocation.items()}


@pytest.mark.parametrize(("left_s", "workers"), [(101.0, 1), (100.0, 1), (99.0, 2), (50.0, 2), (26.0, 4), (13.0, 8)])
def test_the_fewest_workers_that_meet_it(left_s: float, workers: int) -> None:
    assert minimum_satisfactory_share(dated("a", 1000.0 + left_s), [8], 1000.0) == workers


def test_a_change_takes_time_and_staying_takes_none() -> None:
    job = dated("a", 1050.0, resize_cost_s=5.0, allocation={"n0": 2})
    assert minimum_satisfactory_share(job, [8], 1000.0) == 2
    fewer = dataclasses.replace(job, allocation={"n0": 1})
    assert minimum_satisfactory_share(fewer, [8], 1000.0) == 3  # 38 s with the change


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (dated("a", 999.0), "has passed"),
        (dated("a", 1012.0), "cannot be met, not with 8 workers either"),
        (dated("a", 1100.0, goodput=None), "not known yet how long the job takes"),
        (dated("a", 1100.0, progress=None), "not known yet how long the job takes"),
        (dated("a", 1100.0, progress=Progress(done=9.0, epochs=4.0)), "not known yet how long the job takes"),
        (dated("a", 1050.0, held_at=1), "its user holds it at a size"),
    ],
)
def test_what_cannot_be_promised_runs_best_and_is_told(job: JobView, why: str) -> None:
    found = plan("goodput", job)
    assert found.guaranteed == frozenset()
    assert found.allocation
    assert f"deadline: {why}; it runs as well as it can" in found.reasons["a"].explained


@every
def test_the_share_is_kept_beside_any_number_of_others(name: str) -> None:
    others = [view(f"o{i}", min_workers=2, max_workers=8, submitted_s=float(i)) for i in range(4)]
    urgent = dated("urgent", 1026.0, submitted_s=9.0)
    found = plan(name, *others, urgent)
    assert sizes(found)["urgent"] >= 4
    assert found.guaranteed == {"urgent"}
    assert "deadline: 4 workers or more meet it" in found.reasons["urgent"].words
    again = [dataclasses.replace(v, allocation=found.allocation.get(v.job, {})) for v in (*others, urgent)]
    assert plan(name, *again, guaranteed=found.guaranteed).allocation == found.allocation


@every
def test_a_newcomer_is_promised_only_what_is_left(name: str) -> None:
    first = dated("first", 1020.0, submitted_s=5.0, allocation={"n0": 5})
    newcomer = dated("new", 1026.0, submitted_s=1.0)
    found = plan(name, first, newcomer, guaranteed={"first"})
    assert sizes(found)["first"] >= 5
    assert found.guaranteed == {"first"}
    assert "4 workers would meet it, but not beside what others are promised" in found.reasons["new"].words
    assert sizes(found)["new"] >= 1  # it is not dropped


def test_a_higher_priority_comes_before_a_promise() -> None:
    found = plan("fifo", dated("late", 1026.0), view("high", priority=1, min_workers=6, max_workers=6))
    assert sizes(found) == {"high": 6, "late": 2}
    assert found.guaranteed == frozenset()


def test_the_core_remembers_what_it_promised() -> None:
    """A job whose length becomes known later does not take what another one was promised, though it came earlier."""
    core = AllocatorCore(make_policy("goodput"), AT_ONCE)
    core.handle(NodesChanged(cluster=cluster(8)), 1000.0)
    early = dated("early", 1026.0, submitted_s=1.0, progress=None)
    late = dated("late", 1020.0, submitted_s=2.0)
    for job in (early, late):
        core.handle(JobHeartbeat(view=job), 1000.0)
    targets = {job: dict(state.target) for job, state in core.snapshot().jobs.items()}
    assert sum(targets["late"].values()) >= 5
    known = dataclasses.replace(early, progress=HALFWAY, allocation=targets["early"], submitted_s=0.5)
    core.handle(JobHeartbeat(view=known), 1000.0)
    state = core.snapshot().jobs
    assert sum(state["late"].target.values()) >= 5
    assert "not beside what others are promised" in state["early"].reason.words
    assert "deadline: 6 workers or more meet it" in str(core.explain("late"))  # 64 samples are not five equal parts
