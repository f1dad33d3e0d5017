"""What the allocator tells Prometheus of the cluster."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest

from placement.allocator.config import AllocatorConfig
from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobHeartbeat, NodesChanged
from placement.allocator.metrics import (
    DECISION_SECONDS,
    DECISIONS,
    INSTRUMENTS,
    JOBS,
    NODES_AVOIDED,
    NODES_MISSING,
    NODES_WANTED,
    PERIOD_S,
    SLOT_PRICE,
    SLOTS,
    AllocatorMetrics,
    cluster_samples,
)
from placement.allocator.slot_use import SlotUse, slot_uses
from placement.allocator.snapshot import CoreSnapshot, JobState, Trigger
from placement.autoscaling.autoscaler import ScalingDecision
from placement.cluster.cluster import GPU_TYPE_LABEL, MARKET_LABEL, SPOT, Cluster, Node
from placement.cluster.node_record import NodeFailure, NodeRecord
from placement.cluster.node_types import NodeType
from placement.instruments import Instrument, Sample
from placement.policies import GoodputPolicy
from tests.observe.metrics.panels import metrics_of, queries
from tests.placement.views import AT_ONCE, cluster, view


def snapshot(nodes: Iterable[Node] = (), jobs: Iterable[JobState] = ()) -> CoreSnapshot:
    states = {job.view.job: job for job in jobs}
    return CoreSnapshot(policy="goodput", settled=True, cluster=Cluster(nodes=tuple(nodes)), jobs=states, log=())


def state(job: str, has: dict[str, int], target: dict[str, int], **kwargs: Any) -> JobState:
    return JobState(view=view(job, allocation=has, **kwargs), target=target, reason="", heard_s=0)


def values(samples: Iterable[Sample], instrument: Instrument) -> dict[tuple[str, ...], float]:
    return {each.labels: each.value for each in samples if each.instrument is instrument}


def gpu_node(name: str, gpus: float, free: float, *, draining: bool = False) -> Node:
    total, labels = {"CPU": 64.0, "GPU": gpus}, {GPU_TYPE_LABEL: "T4"}
    return Node(node_id=name, total=total, free={"CPU": 64.0, "GPU": free}, draining=draining, labels=labels)


def test_workers_that_do_not_train_yet_are_starting() -> None:
    nodes = [gpu_node("a", 4, 4), gpu_node("b", 4, 3)]
    jobs = [state("j", {"a": 1}, {"a": 2, "b": 2}, bundle={"GPU": 1.0})]
    assert slot_uses(nodes, jobs)["a"] == SlotUse(used=1, starting=1, idle=2)
    assert slot_uses(nodes, jobs, {"j": 2})["b"] == SlotUse(used=1, starting=1, idle=1, other=1)
    assert slot_uses(nodes, jobs, {"j": 0, "other": 9})["a"] == SlotUse(starting=2, idle=2)


def test_slots_by_state_and_type_sum_to_all() -> None:
    nodes = [
        gpu_node("a", 4, 3),
        gpu_node("b", 4, 4, draining=True),
        Node(node_id="c", total={"CPU": 8.0}, free={"CPU": 8.0}),
    ]
    bundle = {"CPU": 1.0, "GPU": 1.0}
    jobs = [
        state("runs", {"a": 1, "b": 1}, {"a": 2}, bundle=bundle),
        state("starts", {}, {"c": 3}),
        state("elsewhere", {"gone": 2}, {"gone": 2}),
    ]
    found = values(cluster_samples(snapshot(nodes, jobs)), SLOTS)
    assert {key: value for key, value in found.items() if value} == {
        ("used", "T4"): 2,
        ("starting", "T4"): 1,
        ("idle", "T4"): 1,
        ("draining", "T4"): 3,
        ("other", "T4"): 1,
        ("starting", "none"): 3,
        ("idle", "none"): 5,
    }
    assert len(found) == 10, "a state without slots is there as well"


def test_jobs_by_phase_also_where_there_is_none() -> None:
    paused = state("p", {}, {})
    paused = dataclasses.replace(paused, view=dataclasses.replace(paused.view, paused="by hand"))
    jobs = [state("w", {}, {}), state("s", {}, {"n": 1}), state("r", {"n": 1}, {"n": 1}), paused]
    phases = [("waiting",), ("starting",), ("running",), ("paused",)]
    assert values(cluster_samples(snapshot(jobs=jobs)), JOBS) == dict.fromkeys(phases, 1)
    assert values(cluster_samples(snapshot()), JOBS) == dict.fromkeys(phases, 0)


def test_nodes_wanted_by_type_and_market() -> None:
    types = [
        NodeType(name="spot", resources={"CPU": 4}, labels={MARKET_LABEL: SPOT}),
        NodeType(name="stays", resources={"CPU": 4}),
    ]
    decision = ScalingDecision(
        nodes={"spot": 3},
        add={"spot": 2},
        release=(),
        leaving=(),
        reasons={},
        wants={},
        notes={},
        usd_per_h=1.0,
    )
    samples = cluster_samples(snapshot(), decision, types)
    assert values(samples, NODES_WANTED) == {("spot", "spot"): 3, ("stays", "on-demand"): 0}
    assert values(samples, NODES_MISSING) == {("spot", "spot"): 2, ("stays", "on-demand"): 0}


def test_nodes_that_are_avoided_by_whom() -> None:
    record = NodeRecord()
    for job, node in (("a", "n0"), ("b", "n0"), ("a", "n1")):
        failure = NodeFailure(node=node, worker="w1", cause="OSError", age_s=0.0, starting=node == "n1")
        record.receive(view(job, tenant=job, node_failures=(failure,)), 0.0)
    core = dataclasses.replace(snapshot(), node_failures=record.rows(1.0))
    assert values(cluster_samples(core), NODES_AVOIDED) == {("all",): 1, ("some",): 1}
    assert values(cluster_samples(snapshot()), NODES_AVOIDED) == {("all",): 0, ("some",): 0}


def test_a_thousand_jobs_are_a_few_series() -> None:
    jobs = [state(f"job {n}", {"n0": 1}, {"n0": 1}) for n in range(1000)]
    assert len(cluster_samples(snapshot([*cluster(1000).nodes], jobs))) < 20


def test_hostile_prices_and_names() -> None:
    nodes = [Node(node_id="n", total={"CPU": 1}, free={"CPU": 1}, labels={GPU_TYPE_LABEL: '<b>"\n' * 99})]
    samples = cluster_samples(snapshot(nodes), prices={"T4": math.nan, "A100": math.inf, "": 1.5})
    assert values(samples, SLOT_PRICE) == {("none",): 1.5}
    assert all(len(label) <= 128 and label.isprintable() for each in samples for label in each.labels)


class Written:
    """Takes samples as the writer does."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def __call__(self, samples: Iterable[Sample]) -> None:
        self.samples += samples


def test_a_real_core_tells_its_decisions_and_prices() -> None:
    """Five jobs that scale want more than eight CPUs: a slot has a price."""
    core, written = AllocatorCore(GoodputPolicy(), AT_ONCE), Written()
    assert core.decided_for is None
    metrics = AllocatorMetrics(written)
    core.handle(NodesChanged(cluster=cluster(4, 4)), 0.0)
    for n in range(5):
        core.handle(JobHeartbeat(view=view(f"j{n}", most_workers=8)), 1.0)
        metrics.decided(core.decided_for, 0.002)
    metrics.tick(0.0, core, None)
    metrics.tick(PERIOD_S / 2, core, None)
    counts = collections.Counter(each.instrument.name for each in written.samples)
    assert counts[DECISIONS.name] == counts[DECISION_SECONDS.name] == 5
    assert counts[SLOT_PRICE.name] == 1, "the second tick was too soon"
    assert values(written.samples, DECISIONS) == {("arrival",): 1}
    assert values(written.samples, SLOT_PRICE)[("none",)] > 0
    assert values(written.samples, SLOTS)[("starting", "none")] == 8


def test_without_a_writer_nothing_is_asked() -> None:
    metrics = AllocatorMetrics(None)
    metrics.decided(Trigger.ARRIVAL, 0.1)
    metrics.tick(0.0, None, None)


def test_metrics_that_fail_harm_no_decision(caplog: pytest.LogCaptureFixture) -> None:
    def broken(samples: Iterable[Sample]) -> None:
        raise RuntimeError("no room")

    class Core:
        recorded = 0
        prices: ClassVar[dict[str, float]] = {}

        def snapshot(self, after: int = 0) -> CoreSnapshot:
            raise KeyError("gone")

    metrics = AllocatorMetrics(broken)
    metrics.decided(Trigger.ARRIVAL, 0.1)
    metrics.tick(0.0, Core(), None)
    assert [each.message for each in caplog.records] == [
        "metrics of the allocator are not complete: RuntimeError: no room"
    ]


def test_every_metric_of_the_allocator_has_a_panel() -> None:
    shown = {name for panel in queries().values() for each in panel for name in metrics_of(each)}
    assert {each.name for each in INSTRUMENTS} <= shown


def test_the_switch_must_be_a_switch() -> None:
    with pytest.raises(TypeError, match="metrics must be True or False, but got 'yes'"):
        AllocatorConfig(metrics="yes")
