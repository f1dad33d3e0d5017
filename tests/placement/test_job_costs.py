"""What each job has cost, as the autoscaler counts it: by the jobs' own clocks, and not beyond their end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from placement.autoscaling.autoscaler import Autoscaler
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.cluster.node_types import NodeType
from placement.policies import make_policy
from tests.placement.views import view

NOW = 1000.0
FOUR = NodeType(name="four", resources={"CPU": 4.0}, usd_per_h=4.0, max_nodes=4)
HERE = Cluster(nodes=(FOUR.node("f0"),))


def autoscaler() -> Autoscaler:
    return Autoscaler([FOUR], make_policy("goodput"))


def running(workers: int, **fields: Any) -> JobView:
    return view("a", max_workers=workers, allocation={"f0": workers}, **fields)


def test_jobs_pay_their_part_of_their_nodes() -> None:
    scaler, on_it = autoscaler(), running(2)
    for attained_s in (0.0, 3600.0, 2 * 3600.0):
        scaler.decide([dataclasses.replace(on_it, attained_s=attained_s)], HERE, NOW)
    assert scaler.spent_usd == {"a": pytest.approx(2.0)}
    bill = scaler.bill("a")
    assert bill is not None and bill.usd == pytest.approx(2.0) and scaler.bill("b") is None
    assert scaler.discard("a") == pytest.approx(2.0) and scaler.spent_usd == {}


def test_unit_that_spans_nodes_pays_what_it_holds() -> None:
    """Six CPUs of eight, for which no node is large enough."""
    both = Cluster(nodes=(FOUR.node("f0"), FOUR.node("f1")))
    unit = view("a", bundle={"CPU": 6.0}, unit=6, max_workers=1, allocation={"f0*4+f1*2": 1})
    scaler = autoscaler()
    for attained_s in (0.0, 3600.0):
        scaler.decide([dataclasses.replace(unit, attained_s=attained_s)], both, NOW)
    assert scaler.spent_usd == {"a": pytest.approx(6.0)}


def test_jobs_pay_by_their_own_clock_not_set_one() -> None:
    scaler, on_it = autoscaler(), running(4)
    for now_s, attained_s in ((0.0, 0.0), (1.0, 4.0), (36_000.0, 8.0), (3.0, 12.0)):
        scaler.decide([dataclasses.replace(on_it, attained_s=attained_s)], HERE, NOW + now_s)
    assert scaler.spent_usd == {"a": pytest.approx(3 * 4.0 / 3600.0)}


def test_job_whose_controller_was_started_anew_keeps_its_cost() -> None:
    scaler, on_it = autoscaler(), running(4)
    for attained_s in (4 * 3600.0, 0.0, 4 * 3600.0):
        scaler.decide([dataclasses.replace(on_it, attained_s=attained_s)], HERE, NOW)
    assert scaler.spent_usd == {"a": pytest.approx(8.0)}


@pytest.mark.parametrize("waits", [False, True])
def test_a_new_autoscaler_continues_the_bill_at_paid_prices(waits: bool) -> None:
    first, on_it = autoscaler(), running(4)
    for attained_s in (0.0, 4 * 3600.0):
        first.decide([dataclasses.replace(on_it, attained_s=attained_s)], HERE, NOW)
    now = view("a", max_workers=4) if waits else on_it
    told = dataclasses.replace(now, attained_s=8 * 3600.0, bill=first.bill("a"))
    dear = Autoscaler([dataclasses.replace(FOUR, usd_per_h=12.0)], make_policy("goodput"))
    dear.resume(first.account)
    dear.decide([told], HERE, NOW)
    # An hour at 4 USD, and the hour since at the present price, or the last known one where it has no node by now.
    assert dear.spent_usd == {"a": pytest.approx(4.0 + (4.0 if waits else 12.0))}
    assert dear.account.hours == first.account.hours


def test_ended_jobs_cost_does_not_return_with_old_views() -> None:
    scaler = autoscaler()
    views = [running(4, attained_s=4 * 3600.0)]
    scaler.decide(views, HERE, NOW)
    assert scaler.discard("a") == pytest.approx(4.0)
    scaler.decide(views, HERE, NOW + 1.0)  # begun before the job's end
    assert scaler.spent_usd == {}
    again = [running(4)]
    scaler.decide(again, HERE, NOW + 2.0)
    assert scaler.spent_usd == {"a": 0.0}, "of the same name, with nothing spent"


def test_a_job_ending_while_counted_charges_no_successor() -> None:
    scaler = autoscaler()
    old = running(4, attained_s=4 * 3600.0)

    class Ends(list[JobView]):
        """Views of which the job is forgotten, by another thread, once they are being read."""

        def __iter__(self) -> Iterator[JobView]:
            scaler.discard("a")
            return super().__iter__()

    scaler._count_costs(Ends([old]), HERE)
    assert scaler.spent_usd == {"a": pytest.approx(4.0)}
    again = [running(4)]
    for i in (1, 2):
        scaler.decide(again, HERE, NOW + i)
    assert scaler.spent_usd == {"a": 0.0}
