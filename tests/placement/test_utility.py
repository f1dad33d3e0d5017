"""Utilities of jobs: what they accept, and how many workers are worth their cost in allocator and autoscaler."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import elastic_ray as er
from placement.autoscaling.objectives.base import Demand, offers, within_utilities
from placement.autoscaling.objectives.cost_per_progress import CostPerProgress
from placement.cluster.jobs import Bill, JobView, Progress
from placement.cluster.node_types import NodeType
from placement.cluster.utility import Utility
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.speeds import GoodputCache
from placement.goodput.step_time import ThroughputModel
from placement.planning.plan import make_plan
from placement.policies import POLICIES, UtilityCostPolicy, make_policy
from tests.placement.views import cluster, view

# A fixed batch of 64: a step takes 1 s on one worker, its part of that on k, and 0.02 s of
# synchronisation for each worker beyond the second.
MODEL = GoodputModel(ThroughputModel(0.0, 1 / 64, 0.0, 0.02, 0.0, 0.02, 1.0), NoiseScale(sqr=1.0, var=1.0), 64)
HALFWAY = Progress(done=1800.0, epoch_ends=(900.0, 1800.0), epochs=4.0)  # 1800 iterations are left: half an hour alone
LINE = Utility(((0.0, 10.0), (3600.0, 0.0)))  # 10 USD an hour


def job(utility: Utility | None = LINE, usd_per_h: float = 1.0, **kwargs: Any) -> JobView:
    fields = {"goodput": MODEL, "max_batch_size": None, "atomic_bsz_range": None, "accumulation": False}
    fields |= {"progress": HALFWAY, "resize_cost_s": 0.0, "most_workers": 8, "submitted_s": 1000.0}
    bill = Bill(worker_usd_per_h=usd_per_h)
    return view("a", utility=utility, bill=bill, **{**fields, **kwargs})


def by_hand(utility: Utility, usd_per_h: float, most: int = 8) -> int:
    """The best size by trying all: an end after t hours brings its value less k x t x price."""
    worth = {}
    for k in range(1, most + 1):
        left_s = 1800.0 * (math.ceil(64 / k) / 64 + 0.02 * max(k - 2, 0))
        worth[k] = float(utility.at(np.array(left_s))) - k * usd_per_h * left_s / 3600.0
    return max(worth, key=lambda k: (worth[k], -k))


def planned(found: JobView, name: str = "goodput", now_s: float = 1000.0) -> tuple[int, str]:
    plan = make_plan(make_policy(name), [found], cluster(8), now_s)
    return sum(plan.allocation["a"].values()), str(plan.reasons["a"])


@pytest.mark.parametrize("usd_per_h", [0.0, 1.0, 5.0, 20.0, 1000.0])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_policy_gives_workers_beyond_their_worth(name: str, usd_per_h: float) -> None:
    workers, _ = planned(job(usd_per_h=usd_per_h), name)
    assert workers <= by_hand(LINE, usd_per_h)


def test_dear_workers_are_few_and_the_reason_says_so() -> None:
    assert [planned(job(usd_per_h=usd))[0] for usd in (0.0, 5.0, 1000.0)] == [by_hand(LINE, x) for x in (0, 5, 1000)]
    workers, why = planned(job(usd_per_h=1000.0))
    assert workers == 2, "two take half as long as one, for the same money"
    assert why == "utility: more than 2 workers cost more than they gain"
    assert planned(job(utility=None, usd_per_h=1000.0))[0] > 2


def test_hurry_without_worth_buys_no_workers() -> None:
    patient = Utility(((0.0, 5.0), (86400.0, 5.0), (90000.0, 0.0)))
    assert planned(job(patient))[0] == 1
    late = 1000.0 + 88200.0  # its value falls by now
    assert planned(job(patient), now_s=late)[0] > 1


def test_a_length_that_is_unknown_limits_nothing() -> None:
    free = planned(job(usd_per_h=1000.0, progress=Progress(done=9.0, epochs=4.0)))[0]
    assert free == planned(job(utility=None, usd_per_h=1000.0, progress=Progress(done=9.0, epochs=4.0)))[0] > 1


def test_a_deadline_outranks_the_cost() -> None:
    workers, _ = planned(job(usd_per_h=1000.0, deadline_s=1000.0 + 800.0))
    assert workers >= 3, "three workers need 636 s, two 900 s"


def test_a_size_about_as_good_is_kept() -> None:
    best, _ = planned(job(usd_per_h=2.0))
    kept, _ = planned(job(usd_per_h=2.0, allocation={"n0": best + 1}))
    assert kept == best + 1
    assert planned(job(usd_per_h=1000.0, allocation={"n0": 4}))[0] == 2


def test_the_policy_compares_utility_gained_with_cost() -> None:
    found = {}
    for usd in (1.0, 5.0, 30.0):
        policy = UtilityCostPolicy(value=1e9, price=usd)  # a job's own utility counts, not the policy's value
        asked = dataclasses.replace(job(), bill=None)
        found[usd] = policy.decide([asked], cluster(8), 1000.0)["a"].workers
    assert found == {usd: by_hand(LINE, usd) for usd in found}


@pytest.mark.parametrize("usd_per_h", [0.5, 5.0, 30.0])
def test_the_autoscaler_wants_what_is_worth_its_cost(usd_per_h: float) -> None:
    kind = NodeType(name="t", resources={"CPU": 1.0}, usd_per_h=usd_per_h, max_nodes=8, startup_s=0.0)
    asked = dataclasses.replace(job(), bill=None)
    options = offers(asked, [kind], {"t": 1e9}, GoodputCache())
    demand = Demand(jobs=(asked,), offers={"a": options}, spent_usd={}, gpus={"a": None})
    assert CostPerProgress().decide(demand, 1000.0)["a"].workers == by_hand(LINE, usd_per_h)
    (bounded,) = within_utilities(demand, 1000.0).offers["a"]
    assert bounded.limit == min(options[0].limit, by_hand(LINE, usd_per_h))
    urgent = dataclasses.replace(asked, deadline_s=2000.0)
    dated = dataclasses.replace(demand, jobs=(urgent,))
    assert within_utilities(dated, 1000.0).offers == demand.offers, "a deadline outranks it"


pairs = st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), min_size=2, max_size=6)


@given(pairs, st.floats(0, 2e6), st.floats(0, 2e6))
def test_a_later_end_is_never_worth_more(drawn: list[tuple[float, float]], a: float, b: float) -> None:
    times = sorted({time_s for time_s, _ in drawn})
    values = sorted((value for _, value in drawn), reverse=True)[: len(times)]
    if len(times) < 2 or values[0] == values[-1] or any(y - x < 1e-3 for x, y in itertools.pairwise(times)):
        return
    utility = Utility(tuple(zip(times, values, strict=True)))
    early, late = utility.at(np.array([min(a, b), max(a, b)]))
    assert late <= early + 1e-6 * max(abs(early), 1.0)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ([(0, 1), (10, 2)], ValueError, "utility must never grow with time, but got 1 at 0 s and 2 at 10 s"),
        ([(10, 2), (0, 1)], ValueError, "utility must have rising times, but got 0 s after 10 s"),
        ([(10, 2), (10, 1)], ValueError, "utility must have rising times, but got 10 s after 10 s"),
        ([(-1, 2), (10, 1)], ValueError, "utility must have times of 0 s or more, but got -1 s"),
        ([(0, 2), (10, 2)], ValueError, "utility must fall with time"),
        ([(0, 2)], ValueError, "utility must be two or more pairs"),
        ([(0, float("nan")), (1, 0)], ValueError, "utility must be two or more pairs .* finite"),
        ([1, 2], TypeError, r"utility must be pairs of \(seconds after submission, value \[USD\]\)"),
        ([(0, True), (1, 0)], TypeError, "utility must be pairs"),
        ("10,3600", TypeError, "utility must be pairs"),
    ],
)
def test_other_utilities_are_refused_by_name(given: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        er.SchedulingConfig(utility=given)


def test_pairs_are_kept_as_given() -> None:
    assert er.SchedulingConfig(utility=[(3600, 50), (7200, 0)]).utility == ((3600.0, 50.0), (7200.0, 0.0))
