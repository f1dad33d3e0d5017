"""Which heartbeats call for a decision, and by what trigger; and what the allocator remembers of a job (pure)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from placement.allocator.significance import KnownJob, trigger_of
from placement.allocator.snapshot import Trigger
from placement.cluster.node_record import NodeFailure
from placement.goodput.model import GoodputModel
from placement.reasons import Cause, Reason
from tests.placement.views import model, view

HERE = view("a", min_workers=1, submitted_s=5.0, tenant="t")
FAILED = NodeFailure(node="n1", worker="w1", cause="killed", age_s=1.0)


@pytest.mark.parametrize(
    ("change", "trigger"),
    [
        ({"bundle": {"CPU": 2.0}}, Trigger.LIMITS),
        ({"min_workers": 2}, Trigger.LIMITS),
        ({"max_workers": 7}, Trigger.LIMITS),
        ({"held_at": 3}, Trigger.LIMITS),
        ({"paused": "by hand"}, Trigger.LIMITS),
        ({"wished": 2}, Trigger.LIMITS),
        ({"label_selector": {"zone": "a"}}, Trigger.LIMITS),
        ({"submitted_s": 6.0}, Trigger.LIMITS),
        ({"priority": 1}, Trigger.LIMITS),
        ({"tenant": "other"}, Trigger.LIMITS),
        ({"preemptible": False}, Trigger.LIMITS),
        ({"deadline_s": 100.0}, Trigger.LIMITS),
        ({"whole_nodes": True}, Trigger.LIMITS),
        ({"tenant_weight": 2.0}, Trigger.LIMITS),
        ({"budget_usd": 3.0}, Trigger.LIMITS),
        ({"stop_cost_s": 3.0}, Trigger.LIMITS),
        ({"growth_limit": 3}, Trigger.LIMITS),
        ({"slow_nodes": {"n1": 2.0}}, Trigger.NODES),
        ({"node_failures": (FAILED,)}, Trigger.NODES),
        ({"weight": 1.2}, Trigger.WEIGHT),
        ({"weight": 0.8}, Trigger.WEIGHT),
        ({"weight": 1.05}, None),
        ({"weight": 0.95}, None),
        ({"fingerprint": "net"}, Trigger.MODEL),
        ({"goodput": None}, Trigger.MODEL),
        ({"init_batch_size": 32}, Trigger.MODEL),
        ({"max_batch_size": 2048}, Trigger.MODEL),
        ({"held_batch": 128}, Trigger.MODEL),
        ({"atomic_bsz_range": (8, 256)}, Trigger.MODEL),
        ({"accumulation": False}, Trigger.MODEL),
        ({"allocation": {"n1": 2}}, None),
        ({"attained_s": 60.0, "restarts": 3, "most_workers": 4}, None),
    ],
)
def test_heartbeat_is_news_where_a_decision_depends_on_it(change: dict[str, Any], trigger: Trigger | None) -> None:
    """A new place of the workers is none: it is what the last decision asked for."""
    after = dataclasses.replace(HERE, **change)
    assert trigger_of(HERE, after) is trigger
    back = Trigger.WEIGHT if "weight" in change and trigger else trigger
    assert trigger_of(after, HERE) is back, "and so is its end"


def test_the_same_again_is_no_news() -> None:
    assert trigger_of(HERE, HERE) is None
    assert trigger_of(HERE, dataclasses.replace(HERE)) is None
    costs = dataclasses.replace(HERE, stop_cost_s=3.0, growth_limit=4)
    assert trigger_of(costs, dataclasses.replace(costs, stop_cost_s=9.0, growth_limit=5)) is None
    slow = dataclasses.replace(HERE, slow_nodes={"n1": 2.0}, node_failures=(FAILED,))
    later = dataclasses.replace(FAILED, age_s=9.0)
    assert trigger_of(slow, dataclasses.replace(slow, slow_nodes={"n1": 3.0}, node_failures=(later,))) is None


def test_job_without_a_model_is_news_by_its_sizes() -> None:
    before = dataclasses.replace(HERE, goodput=None)
    assert trigger_of(before, dataclasses.replace(before)) is None
    assert trigger_of(before, dataclasses.replace(before, max_batch_size=2048)) is Trigger.MODEL
    assert trigger_of(before, HERE) is Trigger.MODEL


@pytest.mark.parametrize(("other", "news"), [(model(noise=101.0), False), (model(sync_s=0.5), True)])
def test_a_model_is_news_where_it_changes_workers_worth(other: GoodputModel, news: bool) -> None:
    after = dataclasses.replace(HERE, goodput=other)
    assert trigger_of(HERE, after) is (Trigger.MODEL if news else None)


def test_job_remembers_its_reason_and_since_when_nothing_fits() -> None:
    known = KnownJob.arrived(HERE, 3.0)
    assert (known.target, known.reason, known.heard_s, known.waits) == ({}, Reason(Cause.ARRIVED), 3.0, True)
    placed = KnownJob.arrived(dataclasses.replace(HERE, allocation={"n1": 2}), 3.0)
    assert (placed.reason, placed.waits) == (Reason(Cause.CAME), False)
    assert not KnownJob.arrived(dataclasses.replace(HERE, paused="by hand"), 3.0).waits
    none = Reason(Cause.IMPOSSIBLE, ("no node has 9 GPUs",))
    assert not known.judge(none, 10.0) and known.reason == none
    assert not known.judge(none, 15.0)
    assert not known.must_report_impossible(19.0, 10.0), "not at once, and counted from the first"
    assert known.must_report_impossible(20.0, 10.0) and not known.must_report_impossible(99.0, 10.0), "once"
    assert known.judge(None, 30.0), "some node can again"
    assert not known.judge(None, 31.0)
    assert not known.judge(none, 40.0)
    assert known.must_report_impossible(50.0, 10.0), "it is reported anew"
