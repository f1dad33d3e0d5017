"""Reasons: what people read of a decision names its cause first, in few words, and `explain` has the figures."""

from __future__ import annotations

import dataclasses
import re
import string

import pytest

from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobHeartbeat, NodesChanged, TimePassed
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, Progress
from placement.cluster.sizes import AllowedSizes, MemoryNeed
from placement.planning.constraints import Constraints
from placement.planning.plan import make_plan
from placement.planning.tenants import Tenant
from placement.policies import GoodputPolicy
from placement.reasons import MOST_WORDS, Cause, Reason
from tests.placement.views import AT_ONCE, cluster, view

SHARES = Constraints(tenants=(Tenant(name="vision", weight=1.0), Tenant(name="speech", weight=3.0)))


def length(epochs: int) -> Progress:
    """One epoch is over, of so many."""
    return Progress(epochs=epochs, epoch_ends=(10.0,), done=10.0)


def brain(*views: JobView, nodes: Cluster) -> AllocatorCore:
    core = AllocatorCore(GoodputPolicy(), AT_ONCE)
    core.handle(NodesChanged(cluster=nodes), 0.0)
    for each in views:
        core.handle(JobHeartbeat(view=each), 1.0)
    return core


def placed(core: AllocatorCore, each: JobView) -> JobView:
    return each.placed(core.snapshot().jobs[each.job].target)


def reason(core: AllocatorCore, job: str = "a") -> str:
    return str(core.snapshot().jobs[job].reason)


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_says_itself_in_few_words(cause: Cause) -> None:
    """Facts of one word each: names, counts and times are; a bundle or a user's sentence may have more, and is cut."""
    fields = [spec for _, name, spec, _ in string.Formatter().parse(cause.words) if name is not None]
    facts: list[str | float] = [0.5 if spec and spec[-1] in "g%f" else "x" for spec in fields]
    assert 0 < len(Reason(cause, tuple(facts)).words.split()) <= MOST_WORDS


def test_long_sentences_are_cut_and_whole_in_explain() -> None:
    said = Reason(Cause.POLICY, ("mine", " ".join("words" for _ in range(40))))
    assert len(str(said).split()) == MOST_WORDS and str(said).endswith("...")
    assert len(said.explained.split()) == 41


def test_a_node_that_drains_or_goes_is_the_cause() -> None:
    nodes = cluster(2, 2)
    core = brain(view("a", max_workers=4), nodes=nodes)
    core.handle(NodesChanged(cluster=nodes.draining({"n1"})), 2.0)
    assert reason(core) == "node n1 drains"
    assert core.log[-1].reason.cause is Cause.DRAIN and "4 -> 2 workers" in core.log[-1].reason.figures
    gone = brain(view("a", max_workers=4), nodes=nodes)
    gone.handle(NodesChanged(cluster=cluster(2)), 2.0)
    assert reason(gone) == "node n1 left the cluster"


def test_jobs_with_less_left_go_first_and_say_so() -> None:
    long = view("long", progress=length(3000), max_workers=4, allocation={"n0": 3}, stop_cost_s=1.0)
    short = [view(f"s{i}", progress=length(4), max_workers=1, submitted_s=1.0) for i in range(3)]
    found = GoodputPolicy().decide([long, *short], cluster(3), 10.0)
    assert found["long"].workers == 0
    assert re.fullmatch(r"3 jobs with less left go first \(yours: \d+m\d\ds\)", str(found["long"].reason))


def test_who_takes_workers_is_named_with_its_gain() -> None:
    core = brain(view("a"), nodes=cluster(8))
    core.handle(JobHeartbeat(view=placed(core, view("a"))), 2.0)
    core.handle(JobHeartbeat(view=view("b", submitted_s=1.0)), 3.0)
    record = next(each for each in core.log if each.job == "a" and each.from_workers > each.to_workers)
    won = record.from_workers - record.to_workers
    assert str(record.reason) == f"job b gets {won} workers to start with"
    assert f"b 0 -> {won}, speed 0.00 -> " in record.reason.figures
    assert "its weight is" in record.reason.figures and "weight" not in str(record.reason)


def test_growth_says_what_it_pays() -> None:
    core = brain(view("a"), nodes=cluster(4))
    core.handle(JobHeartbeat(view=placed(core, view("a"))), 2.0)
    core.handle(NodesChanged(cluster=cluster(8)), 3.0)
    core.handle(TimePassed(), 60.0)
    said = core.log[-1].reason
    assert (core.log[-1].from_workers, core.log[-1].to_workers, said.cause) == (4, 8, Cause.GROWTH)
    assert str(said).startswith("growth pays: ") and str(said).endswith(" s of pause")


def test_what_holds_a_job_at_its_size() -> None:
    assert reason(brain(view("a", held_at=3), nodes=cluster(8))) == "held at 3 by its user"
    assert reason(brain(view("a", held_at=6), nodes=cluster(4))) == "held at 6 by its user, of which 4 fit now"
    core = brain(view("a"), nodes=cluster(4))
    core.handle(JobHeartbeat(view=dataclasses.replace(placed(core, view("a")), paused="the lab moves")), 2.0)
    assert reason(core) == "the lab moves"


def test_a_job_that_needs_memory_says_so() -> None:
    whole = AllowedSizes(memory=MemoryNeed(available_bytes=50, sharded_bytes=100))
    core = brain(view("b", min_workers=2), view("a", sizes=whole, min_workers=4, submitted_s=1.0), nodes=cluster(5))
    assert reason(core) == "memory bound: needs at least 4 x 1 CPU, 3 fit"


def test_tenants_share_and_quota_are_causes() -> None:
    jobs = [view("a", tenant="vision"), view("b", tenant="speech", submitted_s=1.0)]
    found = make_plan(GoodputPolicy(), jobs, cluster(8), 0.0, SHARES)
    assert str(found.reasons["a"]) == "tenant 'vision' has its share, weight 1"
    bound = Constraints(tenants=(Tenant(name="vision", quota={"CPU": 2}),))
    found = make_plan(GoodputPolicy(), jobs[:1], cluster(8), 0.0, bound)
    assert str(found.reasons["a"]) == "quota: tenant 'vision' may use 2 CPU at most"
    assert "workers" in found.reasons["a"].figures, "what the policy says of its size is behind it"


def test_a_preempted_job_names_those_before_it() -> None:
    low = view("low", max_workers=4, allocation={"n0": 4}, stop_cost_s=1.0)
    high = view("high", priority=7, min_workers=4, max_workers=4, submitted_s=1.0)
    found = make_plan(GoodputPolicy(), [low, high], cluster(4), 0.0)
    assert "low" not in found.allocation
    assert str(found.reasons["low"]) == "jobs of higher priority go first (yours: 0)"
    assert "waits: needs at least 1 x 1 CPU" in found.reasons["low"].figures


def test_a_job_that_fits_nowhere_says_why() -> None:
    core = brain(view("a", bundle={"GPU": 2.0}), nodes=cluster(4))
    said = core.snapshot().jobs["a"].reason
    assert str(said) == "no node fits: one worker needs 2 GPU, but the largest node has 0"
    assert said.figures.endswith("or add a node with GPU")
    waits = dataclasses.replace(said, cause=Cause.AUTOSCALER)
    assert str(waits).startswith("waits for an autoscaler: one worker needs 2 GPU")
