"""What node types offer to a job, which nodes are chosen for given sizes, and what ends cost, by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.autoscaling.autoscaler import Autoscaler, AutoscalerConfig
from placement.autoscaling.fleet import build
from placement.autoscaling.objectives.base import Demand, NodeTypeOption, WantedSize, lasting, offers, work_left
from placement.autoscaling.objectives.by_size import BySize
from placement.autoscaling.objectives.cost_per_progress import Budget, CostPerProgress
from placement.autoscaling.objectives.utility_band import UtilityBand, _climb, _hull
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import Account, JobView, Progress
from placement.goodput.fitting import Observation
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.speeds import GoodputCache
from placement.goodput.step_time import ThroughputModel
from placement.policies import make_policy
from placement.policies.shared.base import Target
from placement.reasons import Cause, Reason
from tests.placement.fleets import FIRM, NOW, SPOT, Careless, candidate, here, job

SURE = {"firm": math.inf, "spot": math.inf, "big": math.inf}


def offered(view: JobView, *types: Any, lasts_h: dict[str, float] | None = None) -> dict[str, NodeTypeOption]:
    found = offers(view, types or (FIRM, SPOT), lasts_h or SURE, GoodputCache())
    return {each.kind.name: each for each in found}


def unknown(**facts: Any) -> JobView:
    """A job of which nothing is known, so that its rates are its workers."""
    return job(**{"goodput": None, "max_workers": 6, "most_workers": 3, **facts})


def test_prices_are_of_parts_and_of_whole_nodes() -> None:
    firm = offered(unknown())["firm"]
    assert firm.part_usd.tolist() == [1, 2, 3, 4, 5, 6] and firm.whole_usd.tolist() == [4, 4, 4, 4, 8, 8]
    assert firm.rate.tolist() == [1, 2, 3, 4, 5, 6] and (firm.known, firm.limit) == (False, 6)
    assert offered(unknown(most_workers=1))["firm"].limit == 2
    assert offered(unknown(min_workers=3))["firm"].rate.tolist() == [0, 0, 3, 4, 5, 6]


def test_held_jobs_are_offered_their_size_alone() -> None:
    held = offered(unknown(held_at=3))["firm"]
    assert held.rate.tolist() == [0, 0, 3] and held.limit == 3
    one = dataclasses.replace(FIRM, max_nodes=1)
    assert offered(unknown(held_at=5), one)["firm"].rate.tolist() == [0, 0, 0, 4], "as many as there may be"


def test_mixed_jobs_have_their_minimum_on_demand() -> None:
    mixed = offered(unknown(spot="mixed", min_workers=2, max_workers=9, most_workers=9))["spot"]
    assert mixed.part_usd.tolist() == [1, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75]
    assert mixed.whole_usd.tolist() == [4, 4, 4, 4, 5, 5, 5, 5, 6], "four fit onto the first node"
    one = dataclasses.replace(FIRM, max_nodes=1)
    few = offered(
        unknown(spot="mixed", min_workers=2, max_workers=9, most_workers=9), one, candidate("spot", spot=True)
    )
    assert len(few["spot"].rate) == 9
    assert "spot" not in offered(unknown(spot="mixed"), SPOT), "nothing for its minimum"
    dear = candidate("big", 9.0)
    assert offered(unknown(spot="mixed", min_workers=2), FIRM, dear, SPOT)["spot"].part_usd[1] == 2.0, "the cheapest"


def test_types_that_cannot_hold_a_job_are_not_offered() -> None:
    assert offered(unknown(min_workers=5), dataclasses.replace(FIRM, max_nodes=1)) == {}
    assert list(offered(unknown(min_workers=4), dataclasses.replace(FIRM, max_nodes=1))) == ["firm"]
    assert offered(unknown(), dataclasses.replace(FIRM, max_nodes=0)) == {}
    assert offered(unknown(bundle={"CPU": 5.0})) == {}
    found = offers(unknown(), (FIRM, SPOT), SURE, GoodputCache())
    assert [each.kind.name for each in found] == ["spot", "firm"], "the cheapest first"
    fast = offers(job(min_workers=3), (FIRM, candidate("big", 3.9)), SURE, GoodputCache())
    assert [each.kind.name for each in fast] == ["big", "firm"]


def test_losses_take_pauses_and_starts_of_work() -> None:
    view = unknown(resize_cost_s=20.0)
    kept = lasting(view, np.array([0.0, 1.0, 2.0]), SPOT, 0.1)  # 360 s; a start takes 50 s
    assert kept.tolist() == pytest.approx([1.0, 1 / (1 + 70 / 360), 1 / (1 + 90 / 360)])
    spot = offered(view, SPOT, lasts_h={"spot": 0.1})["spot"]
    assert spot.rate[[0, 5]].tolist() == pytest.approx([kept[1], 6 * kept[2]])
    mixed = offered(unknown(spot="mixed", min_workers=4, resize_cost_s=20.0), lasts_h={"spot": 0.1, "firm": math.inf})
    assert mixed["spot"].rate[[3, 5]].tolist() == pytest.approx([4.0, 6 * kept[1]]), "on demand nothing is lost"


def test_work_is_known_after_an_epoch_alone() -> None:
    assert work_left(job()) == 9000.0 * 64 and work_left(job(init_batch_size=None)) == 9000.0
    assert work_left(job(progress=None)) is None
    assert work_left(job(progress=Progress(done=5.0, epochs=3.0))) is None
    assert work_left(job(progress=Progress(done=5.0, epochs=3.0, usual_epoch=10.0))) == 25.0 * 64


@pytest.mark.parametrize(
    ("seen", "rates"),
    [
        # A quarter of a second for 16 samples, and the synchronisation of three: 0.07 s on a node, 0.11 s on two.
        ((1, 3), {2: 64 / (32 / 64 + 0.02), 4: 64 / (16 / 64 + 0.07), 8: 64 / (8 / 64 + 0.11)}),
        ((2, 6), {4: 64 / (16 / 64 + 0.12), 6: 64 / (11 / 64 + 0.41), 8: 64 / (8 / 64 + 0.41)}),
        ((1, 1), {2: 64 / (32 / 64 + 0.02), 8: 64 / (8 / 64 + 0.01)}),
        ((2, 8), {7: 64 / (10 / 64 + 0.51), 8: 64 / (8 / 64 + 0.61)}),
    ],
)
def test_beyond_what_was_measured_synchronisation_takes_no_longer(
    seen: tuple[int, int], rates: dict[int, float]
) -> None:
    times = ThroughputModel(alpha_c=0.0, beta_c=1 / 64, alpha_n=0.01, beta_n=0.1, alpha_r=0.02, beta_r=0.05, gamma=1.0)
    exact = GoodputModel(times, NoiseScale(sqr=1.0, var=1.0), 64)
    facts = {"max_batch_size": None, "atomic_bsz_range": None, "accumulation": False, "max_workers": 8}
    share = -(-64 // seen[1])
    measured = (Observation(*seen, share, 0, float(times.step_time(*seen, share, 0))),)
    offer = offered(job(goodput=exact, models={"T4": exact}, observations={"T4": measured}, **facts), FIRM)["firm"]
    assert {k: offer.rate[k - 1] for k in rates} == pytest.approx(rates, rel=1e-6)


def fleet(*sizes: tuple[JobView, int], types: Any = (FIRM, SPOT), **facts: Any) -> Any:
    """Nodes for these jobs and workers."""
    wants = {view.job: WantedSize(job=view.job, workers=n, gpu="T4", reason=Reason(Cause.UNUSED)) for view, n in sizes}
    views = [view for view, _ in sizes]
    given_ = {"static": (), "present": {}, "lasts_h": SURE, **facts}
    return build(wants, views, types, **given_)


def test_nodes_are_cheapest_unless_hardly_cheaper_than_present_ones() -> None:
    near, cheap = candidate("near", 3.7), candidate("cheap", 3.5)
    for other, there, chosen in ((near, 1, "firm"), (cheap, 1, "cheap"), (near, 0, "near")):
        found = fleet(
            (job(), 4),
            types=(FIRM, other),
            present={"firm": there},
            lasts_h=dict.fromkeys(["firm", other.name], math.inf),
        )
        assert [name for name, n in found.nodes.items() if n] == [chosen]
    two = fleet((job(), 8), types=(FIRM, near), present={"firm": 1}, lasts_h={"firm": math.inf, "near": math.inf})
    assert two.nodes == {"firm": 1, "near": 1}, "only one is there"


def test_open_nodes_are_filled_first_and_static_ones_free() -> None:
    static = FIRM.node("mine")
    assert fleet((job(), 4), static=[static]).nodes == {"firm": 0, "spot": 0}
    assert fleet((job(), 5), static=[static]).nodes == {"firm": 0, "spot": 1}
    assert fleet((job(), 4), static=[dataclasses.replace(static, draining=True)]).nodes["spot"] == 1
    assert fleet((job(), 4), static=[candidate("x", gpu_label="A100").node("x")]).nodes["spot"] == 1
    assert fleet((job(spot="avoid", label_selector=FIRM.labels), 4), static=[SPOT.node("s")]).nodes["firm"] == 1
    shared = fleet((job("a"), 3), (job("b", submitted_s=1.0), 2))
    assert shared.nodes == {"firm": 0, "spot": 2} and shared.users["spot"] == ("a", "b") and shared.users["firm"] == ()
    least = fleet(types=(dataclasses.replace(FIRM, min_nodes=2), SPOT))
    assert least.nodes == {"firm": 2, "spot": 0} and least.users == {"firm": (), "spot": ()}


def test_mixed_fleets_and_limits() -> None:
    mixed = job(spot="mixed", min_workers=2)
    assert fleet((mixed, 6)).nodes == {"firm": 1, "spot": 1}, "two more beside the minimum, and two on spot"
    assert fleet((mixed, 1)).nodes == {"firm": 1, "spot": 0}
    assert fleet((mixed, 6), static=[SPOT.node("s")]).nodes == {"firm": 1, "spot": 0}
    narrow = fleet(
        (job("a"), 9), types=(dataclasses.replace(SPOT, max_nodes=1), dataclasses.replace(FIRM, max_nodes=1))
    )
    assert narrow.nodes == {"spot": 1, "firm": 1} and narrow.short == {"a": 1}
    assert fleet((job("a"), 9), most=2).short == {"a": 1} and fleet((job("a"), 8), most=2).short == {}
    assert fleet((job("a"), 0), (job("b", submitted_s=1.0), 4)).nodes == {"firm": 0, "spot": 1}
    assert build({}, [job("a")], (FIRM,), (), {}, SURE).nodes == {"firm": 0}


@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=12))
def test_a_hull_is_the_least_concave_curve_above(values: list[float]) -> None:
    hull = _hull(np.array(values))
    end = int(np.argmax(values)) + 1
    assert len(hull) == end and (hull >= np.array(values[:end]) - 1e-9).all()
    assert (np.diff(hull, n=2) <= 1e-9).all()
    corners = [i for i in range(1, end - 1) if hull[i] - hull[i - 1] > hull[i + 1] - hull[i] + 1e-6]
    assert all(hull[i] == pytest.approx(values[i]) for i in [0, *corners, end - 1]), "a lower one would cut a value off"


def test_workers_go_where_speed_rises_most() -> None:
    speeds = {"a": np.array([0.0, 1.0, 1.9, 2.0]), "b": np.array([0.0, 0.5, 1.0, 1.8]), "c": np.array([0.0, 1.0])}
    order, totals = _climb(speeds, {"a": 1, "b": 1, "c": 1})
    assert order == [("a", 2), ("b", 2), ("b", 3), ("a", 3)]
    assert totals.tolist() == pytest.approx([2.5, 3.4, 4.05, 4.7, 4.8]), "the dip at b's two is skipped"


def banded(*views: JobView, low: float = 0.35, high: float = 0.65) -> dict[str, int]:
    types = (dataclasses.replace(FIRM, startup_s=0.0),)
    demand = Demand(
        jobs=views,
        offers={view.job: offers(view, types, SURE, GoodputCache()) for view in views},
        spent_usd={},
        gpus={view.job: "T4" if view.workers else None for view in views},
    )
    halves = {
        name: (dataclasses.replace(each, rate=np.sqrt(np.arange(1.0, 1 + len(each.rate))), known=True),)
        for name, (each,) in demand.offers.items()
    }
    wants = UtilityBand(low=low, high=high).decide(dataclasses.replace(demand, offers=halves), NOW)
    return {name: want.workers for name, want in wants.items()}


def test_a_cluster_inside_its_band_stays() -> None:
    """A speed of sqrt(k) on k workers: the utility is 1 / sqrt(k), and 0.5 on four."""
    assert banded(job(max_workers=16)) == {"a": 4}
    for workers, wanted in ((2, 4), (3, 3), (4, 4), (8, 8), (9, 4), (16, 4)):
        assert banded(job(max_workers=16).placed({"f0": workers})) == {"a": wanted}
    assert banded(job(max_workers=16), low=0.5, high=0.500001) == {"a": 4}
    assert banded(job(max_workers=16), low=0.75, high=1.0) == {"a": 1}, "0.875 is nearer to 1 than to 0.71"
    assert banded(job("a", max_workers=16), job("b", max_workers=16, submitted_s=1.0)) == {"a": 4, "b": 4}
    assert banded(job(held_at=3), job("b", max_workers=1, submitted_s=1.0)) == {"a": 3, "b": 1}


def demanded(view: JobView, rate: list[float], *, startup_s: float = 0.0, others: int = 0, **spent: float) -> Demand:
    """One node type, on which the job has these rates."""
    kind = dataclasses.replace(FIRM, startup_s=startup_s)
    (offer,) = offers(view, (kind,), SURE, GoodputCache())
    offer = dataclasses.replace(offer, kind=kind, rate=np.array(rate), known=True, limit=len(rate))
    offer = dataclasses.replace(offer, part_usd=offer.part_usd[: len(rate)], whole_usd=offer.whole_usd[: len(rate)])
    jobs = (view, *(job(f"o{i}", submitted_s=1.0) for i in range(others)))
    return Demand(
        jobs=jobs,
        offers={view.job: (offer,), **{each.job: () for each in jobs[1:]}},
        spent_usd=spent,
        gpus={view.job: "T4" if view.workers else None},
    )


def ends(view: JobView, rate: list[float], *, value: float = 0.0, **facts: Any) -> tuple[list[float], list[float]]:
    """Hours to the end and USD at each size; 10 h of work for a rate of 1."""
    view = dataclasses.replace(
        view, progress=Progress(done=100.0, epoch_ends=(100.0,), epochs=361.0), init_batch_size=1
    )
    demand = demanded(view, rate, **facts)
    found = CostPerProgress(value_usd_per_h=value)._forecast(view, demand.offers["a"][0], demand, NOW)
    return (found.time_s / 3600).tolist(), found.usd.tolist()


def test_the_end_counts_start_up_changes_and_progress_meanwhile() -> None:
    assert ends(job(), [1.0, 2.0]) == ([10.0, 5.0], [40.0, 20.0]), "alone it pays for the node"
    assert ends(job(), [1.0, 2.0], others=1) == ([10.0, 5.0], [10.0, 10.0])
    assert ends(job(), [1.0, 0.0])[0] == [10.0, math.inf]
    assert ends(job(), [1.0, 2.0], startup_s=1800.0)[0] == [10.5, 5.5]
    running = job(resize_cost_s=360.0).placed({"f0": 2})
    # Half an hour for a third one, in which two do 1 h of the work; each change takes a tenth.
    assert ends(running, [1.0, 2.0, 4.0], startup_s=1800.0)[0] == pytest.approx([10.1, 5.0, 0.5 + 0.1 + 9 / 4])
    assert ends(running, [1.0, 2.0, 4.0], startup_s=36000.0)[0][2] == pytest.approx(10.1), "it is done before that"


@pytest.mark.parametrize(
    ("limits", "workers", "met"),
    [
        ({}, 1, True),
        ({"deadline_s": NOW + 3600 * 5 * 1.1}, 2, True),
        ({"deadline_s": NOW + 3600 * 4.99 * 1.1}, 3, True),  # and a tenth to spare
        ({"deadline_s": NOW + 3600 * 2}, 4, False),
        ({"budget_usd": 12.1}, 3, True),
        ({"budget_usd": 11.9}, 2, True),
        ({"budget_usd": 9.9}, 1, False),
        ({"budget_usd": 14.1, "spent": 4.0}, 1, True),
        ({"budget_usd": 10.5, "deadline_s": NOW + 3600 * 9}, 2, True),
        ({"budget_usd": 10.5, "deadline_s": NOW + 3600 * 4}, 2, False),  # the fastest that the budget pays for
        ({"budget_usd": 1.0, "deadline_s": NOW + 3600 * 4}, 1, False),  # the cheapest
    ],
)
def test_deadlines_and_budgets_by_hand(limits: dict[str, float], workers: int, met: bool) -> None:
    """Rates of 1, 2, 2.5 and 10/3 for 10 h of work: 10, 10.2, 12 and 12.3 USD in 10, 5, 4 and 3 h."""
    spent = limits.pop("spent", 0.0)
    view = job(progress=Progress(done=100.0, epoch_ends=(100.0,), epochs=361.0), init_batch_size=1, **limits)
    rate = [1.0, 2.0, 2.5, 10 / 3]
    demand = demanded(view, rate, others=1, a=spent)
    offer = dataclasses.replace(demand.offers["a"][0], part_usd=np.array([1.0, 2.04, 3.0, 4.1]))
    want = CostPerProgress(hysteresis=0.0).decide(
        dataclasses.replace(demand, offers={**demand.offers, "a": (offer,)}), NOW
    )
    assert want["a"].workers == workers and (want["a"].note is None) is met


def test_the_value_of_an_hour_follows_what_was_saved() -> None:
    budget = Budget(usd_per_h=10.0)
    assert budget.value_usd_per_h(Account(), 0) == budget.value_usd_per_h(Account(), 1) == 10.0
    assert budget.value_usd_per_h(Account(), 4) == 2.5
    assert budget.value_usd_per_h(Account(hours=3.0, spent_usd=30.0, job_hours=6.0), 2) == 5.0, "two jobs on average"
    assert budget.value_usd_per_h(Account(hours=3.0, spent_usd=10.0), 0) == pytest.approx(10 * math.e)
    assert budget.value_usd_per_h(Account(hours=3.0, spent_usd=50.0), 0) == pytest.approx(10 / math.e)
    assert budget.value_usd_per_h(Account(hours=99.0), 0) == pytest.approx(500.0)
    assert budget.value_usd_per_h(Account(hours=1.0, spent_usd=999.0), 0) == pytest.approx(0.2)


def test_a_clock_set_ahead_costs_one_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement.autoscaling.autoscaler._ACCOUNT_H", 1e9)  # nothing fades
    scaler = Autoscaler([FIRM], make_policy("goodput"), Careless(), AutoscalerConfig())
    for at_s, hours in ((NOW, 0.0), (NOW + 1800.0, 0.5), (NOW + 9e9, 1.5), (NOW, 1.5), (NOW + 360.0, 1.6)):
        scaler.decide([], here(1), at_s)
        assert scaler.account.hours == pytest.approx(hours, abs=1e-6)
    assert scaler.account.spent_usd == pytest.approx(1.6 * 4.0)


def test_nodes_with_most_workers_are_kept() -> None:
    scaler = Autoscaler([FIRM], make_policy("goodput"), Careless(), AutoscalerConfig(linger_s=10.0))
    runs = job(min_workers=1, max_workers=1).placed({"f1": 1})
    for at_s in (NOW, NOW + 10.0):
        assert scaler.decide([runs], here(3), at_s).release == ()
    assert scaler.decide([runs], here(3), NOW + 10.1).release == ("f0", "f2")
    gone = Cluster(nodes=here(3).nodes[1:])
    assert scaler.decide([runs], gone, NOW + 20.0).release == ("f2",)


def test_decisions_count_nodes_and_their_price() -> None:
    scaler = Autoscaler([FIRM, SPOT], make_policy("goodput"), UtilityBand(), AutoscalerConfig())
    decision = scaler.decide([job(max_workers=4).placed({"f0": 4})], here(1, 1), NOW)
    assert decision.usd_per_h == 4.0 * decision.nodes["firm"] + decision.nodes["spot"]
    assert decision.bundles([FIRM, SPOT]) == (
        *((dict(FIRM.resources), dict(FIRM.labels)),) * decision.nodes["firm"],
        *((dict(SPOT.resources), dict(SPOT.labels)),) * decision.nodes["spot"],
    )


class Recorder:
    """A frugal policy that gives each job a size, and remembers what it was asked."""

    name = "recorder"

    def __init__(self, workers: int) -> None:
        self.workers, self.prices, self.nodes = workers, dict[str, float](), list[str]()

    def priced(self, prices: Mapping[str, float]) -> Recorder:
        self.prices = dict(prices)
        return self

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> dict[str, Target]:
        assert not any(each.workers for each in jobs), "as if all started"
        self.nodes = [each.node_id for each in cluster.nodes]
        return {each.job: Target(workers=self.workers, reason=Reason(Cause.UNUSED)) for each in jobs}


def test_frugal_policies_see_all_nodes_and_cheapest_prices() -> None:
    fast = candidate("fast", 12.0, gpu_label="A100", max_nodes=1)
    running, huge = unknown(most_workers=1).placed({"f0": 1}), job("b", goodput=None, bundle={"CPU": 99.0})
    demand = Demand(
        jobs=(running, huge),
        offers={
            view.job: offers(view, (FIRM, SPOT, fast), {**SURE, "fast": math.inf}, GoodputCache())
            for view in (running, huge)
        },
        spent_usd={},
        gpus={"a": "A100", "b": None},
    )
    policy = Recorder(2)
    wants = BySize(policy=policy).decide(demand, NOW)
    assert policy.prices == {"T4": 0.25, "A100": 3.0}
    assert sorted(policy.nodes) == ["fast-00000", *(f"{kind}-{i:05d}" for kind in ("firm", "spot") for i in range(4))]
    assert {name: (want.workers, want.gpu) for name, want in wants.items()} == {"a": (2, "A100")}
    assert BySize(policy=Recorder(9)).decide(demand, NOW)["a"].workers == 2, "what exploration allows"
