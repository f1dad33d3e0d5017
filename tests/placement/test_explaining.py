"""`AllocatorCore.explain`: the reason, the next worker's worth, and that asking changes nothing."""

from __future__ import annotations

import pytest

from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobHeartbeat, NodesChanged
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.policies import POLICIES, GoodputPolicy, make_policy
from tests.placement.views import AT_ONCE, cluster, model, node, view


def running(*views: JobView, cpus: int = 4, policy: str = "goodput") -> AllocatorCore:
    core = AllocatorCore(make_policy(policy), AT_ONCE)
    core.handle(NodesChanged(cluster=cluster(cpus)), 0.0)
    for each in views:
        core.handle(JobHeartbeat(view=each), 1.0)
    return core


def test_a_job_that_could_use_more_says_its_gain() -> None:
    answer = running(view("a")).explain("a")
    assert answer.nodes == {"n0": 4}
    assert "4 workers" in answer.reason
    assert answer.speed_with_one_more is not None and answer.speed_with_one_more > answer.speed > 1
    assert answer.taker == "a"
    assert "room for one more worker would go to it: growth pays: " in str(answer)


def test_a_job_at_its_largest_size_says_so() -> None:
    answer = running(view("a", max_workers=2)).explain("a")
    assert (answer.speed_with_one_more, answer.taker) == (None, None)
    assert "largest useful size" in str(answer) and "nobody's size" in str(answer)


def test_the_next_worker_may_be_anothers() -> None:
    slow = view("slow", goodput=model(noise=0.01, sync_s=5.0))
    answer = running(view("fast"), slow).explain("slow")
    assert answer.taker == "fast"
    assert answer.speed_with_one_more is not None and answer.speed_with_one_more < answer.speed


def test_a_waiting_job_tells_what_it_waits_for() -> None:
    answer = running(view("a", min_workers=4), view("b", min_workers=2, submitted_s=1.0)).explain("b")
    assert answer.nodes == {} and answer.speed == 0.0
    assert "waits: needs at least 2 x 1 CPU" in answer.reason


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_asking_changes_nothing_under_any_policy(name: str) -> None:
    core = running(view("a"), view("b", submitted_s=1.0), policy=name)
    before = core.snapshot()
    assert core.explain("a").job == "a"
    assert core.snapshot() == before


def test_imagined_node_is_of_kind_that_job_can_use() -> None:
    """With labels of another node the job could not take the room, and nobody would be said to."""
    nodes = (node("n0", 2, labels={"zone": "b"}), node("n1", 2, labels={"zone": "a"}))
    for wanted in ({"zone": "a"}, {"zone": "b"}):
        core = AllocatorCore(make_policy("goodput"), AT_ONCE)
        core.handle(NodesChanged(cluster=Cluster(nodes=nodes)), 0.0)
        core.handle(JobHeartbeat(view=view("a", label_selector=wanted)), 1.0)
        assert core.explain("a").taker == "a", wanted
    waits = AllocatorCore(make_policy("goodput"), AT_ONCE)
    waits.handle(NodesChanged(cluster=Cluster(nodes=nodes)), 0.0)
    waits.handle(JobHeartbeat(view=view("a", label_selector={"zone": "c"})), 1.0)
    assert waits.explain("a").taker is None, "no node like it is there: it takes no part in decisions"


def test_snapshot_says_by_day_clock_when_jobs_were_heard() -> None:
    core = AllocatorCore(make_policy("goodput"), AT_ONCE)
    core.handle(NodesChanged(cluster=cluster(4)), 1000.0, 10.0)
    core.handle(JobHeartbeat(view=view("a")), 1001.0, 11.0)
    core.handle(JobHeartbeat(view=view("b")), 1005.0, 15.0)
    heard = {name: job.heard_s for name, job in core.snapshot().jobs.items()}
    assert heard == {"a": 1001.0, "b": 1005.0}


def test_unknown_jobs_are_named() -> None:
    with pytest.raises(KeyError, match="must be one of"):
        AllocatorCore(GoodputPolicy(), AT_ONCE).explain("nobody")
