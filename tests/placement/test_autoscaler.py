"""The autoscaler: what every objective promises, known values, launches that fall back, deadlines and budgets."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from placement.autoscaling.autoscaler import Autoscaler, AutoscalerConfig, ScalingDecision
from placement.autoscaling.fleet import build
from placement.autoscaling.objectives import OBJECTIVES, WantedSize, make_objective
from placement.autoscaling.objectives.base import offers
from placement.autoscaling.objectives.cost_per_progress import CostPerProgress
from placement.autoscaling.objectives.utility_band import UtilityBand
from placement.cluster.cluster import Allocation, Cluster
from placement.cluster.jobs import JobView, speeds
from placement.cluster.node_types import NodeType
from placement.cluster.sizes import AllowedSizes, MemoryNeed
from placement.errors import InputError
from placement.goodput.fitting import Observation
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.speeds import GoodputCache
from placement.goodput.step_time import ThroughputModel
from placement.planning.plan import make_plan
from placement.policies import make_policy
from placement.reasons import MOST_WORDS
from placement.text import count
from tests.placement.fleets import FIRM, NOW, SPOT, UNUSED, Careless, candidate, here, job
from tests.placement.views import model, node

CONFIG = AutoscalerConfig(linger_s=100.0, launch_timeout_s=50.0, retry_s=500.0)
every = pytest.mark.parametrize("name", sorted(OBJECTIVES))


def autoscaler(
    types: Sequence[NodeType] = (FIRM, SPOT), objective: Any = "utility_band", policy: str = "goodput"
) -> Autoscaler:
    made = OBJECTIVES[objective]() if isinstance(objective, str) else objective
    return Autoscaler(types, make_policy(policy), made, CONFIG)


# What every objective promises
# ----------------------------------------------------------------------------------------------------------------------


@st.composite
def jobs(draw: st.DrawFn) -> list[JobView]:
    found = []
    for i in range(draw(st.integers(0, 4))):
        least = draw(st.integers(1, 3))
        found.append(
            job(
                f"j{i}",
                min_workers=least,
                max_workers=draw(st.integers(least, 12)),
                goodput=draw(st.sampled_from([None, model(), model(noise=1.0), model(sync_s=0.5)])),
                spot=draw(st.sampled_from(["avoid", "prefer", "mixed"])),
                submitted_s=float(i),
                priority=draw(st.integers(0, 1)),
            )
        )
    return found


def placed(views: Sequence[JobView], allocation: Allocation) -> list[JobView]:
    return [each.placed(allocation.get(each.job, {})) for each in views]


MANY = [
    job("j0", max_workers=1, goodput=None, spot="avoid"),
    job("j1", max_workers=8, spot="prefer", submitted_s=1.0),
    job("j2", max_workers=3, spot="avoid", submitted_s=2.0, priority=1),
    job("j3", max_workers=5, spot="avoid", submitted_s=3.0),
]
TIGHT = [
    job("j0", max_workers=1, goodput=None, spot="avoid"),
    job("j1", max_workers=2, goodput=None, spot="avoid", submitted_s=1.0, priority=1),
    job("j2", min_workers=2, max_workers=2, goodput=None, spot="mixed", submitted_s=2.0, priority=1),
    job("j3", max_workers=1, goodput=None, spot="avoid", submitted_s=3.0),
]


@pytest.mark.matrix(every=1)
@every
@settings(max_examples=8)
@example(views=MANY, firm=0, spot=0)  # without the nodes that are not used, another one is not either
@example(views=TIGHT, firm=1, spot=1)  # without the empty spot node, the mixed job would start in another's place
@given(views=jobs(), firm=st.integers(0, 4), spot=st.integers(0, 4))
def test_no_objective_asks_for_unused_node_or_strands_job(
    name: str, views: list[JobView], firm: int, spot: int
) -> None:
    policy, there = make_policy("goodput"), here(firm, spot)
    running = placed(views, make_plan(policy, views, there, NOW).allocation)
    scaler = Autoscaler((FIRM, SPOT), policy, OBJECTIVES[name](), dataclasses.replace(CONFIG, linger_s=0.0))
    scaler.decide(running, there, NOW - 1.0)  # the first look gives nothing up
    decision = scaler.decide(running, there, NOW)
    assert all(0 <= decision.nodes[each.name] <= each.max_nodes for each in (FIRM, SPOT))
    stay = tuple(dataclasses.replace(n, draining=n.node_id in decision.leaving + decision.release) for n in there.nodes)
    grown = Cluster(nodes=(*stay, *_fresh(decision)))
    plan = make_plan(policy, running, grown, NOW).allocation
    used = {node for place in plan.values() for node in place}
    assert all(node.node_id in used for node in _fresh(decision)), "a node that no job would use"
    shrunk = tuple(dataclasses.replace(n, draining=n.node_id in decision.release) for n in there.nodes)
    after = make_plan(policy, running, Cluster(nodes=shrunk), NOW).allocation
    assert all(each.job in after for each in running if each.workers), "a running job is stranded"
    assert set(decision.add) <= set(decision.reasons)
    said = [*decision.reasons.values(), *(want.reason for want in decision.wants.values())]
    assert all(0 < len(each.words.split()) <= MOST_WORDS for each in said), "cut in a listing"
    assert len(decision.bundles((FIRM, SPOT))) == sum(decision.nodes.values())


def _fresh(decision: ScalingDecision) -> list[Any]:
    types = {each.name: each for each in (FIRM, SPOT)}
    return [types[name].node(f"{name}~{i}") for name, n in decision.add.items() for i in range(n)]


@every
def test_what_was_asked_for_and_came_is_not_changed(name: str) -> None:
    """A cluster that follows the decisions comes to rest, with all that every job should have."""
    scaler, policy = autoscaler(objective=name), make_policy("goodput")
    views, firm, spot, seen = [job("a", max_workers=6), job("b", max_workers=3, submitted_s=1.0)], 0, 0, []
    for i in range(40):
        now_s = NOW + 60.0 * i
        there = here(firm, spot)
        views = placed(views, make_plan(policy, views, there, now_s).allocation)
        decision = scaler.decide(views, there, now_s)
        firm, spot = decision.nodes["firm"], decision.nodes["spot"]
        seen.append((firm, spot))
    assert len(set(seen[-15:])) == 1, seen
    assert all(each.workers >= each.min_workers for each in views)


@every
def test_without_jobs_nothing_is_kept_but_the_minimum(name: str) -> None:
    scaler = autoscaler([dataclasses.replace(FIRM, min_nodes=1), SPOT], objective=name)
    assert scaler.decide([], here(3, 1), NOW).release == ()  # just made: it may have yet to hear of those who use them
    assert len(scaler.decide([], here(3, 1), NOW + 101.0).release) == 3
    assert scaler.decide([], here(1, 0), NOW + 111.0).nodes == {"firm": 1, "spot": 0}


@every
def test_spot_averse_jobs_get_on_demand_nodes_mixed_both(name: str) -> None:
    avoiding = autoscaler(objective=name).decide([job(spot="avoid")], here(), NOW)
    assert set(avoiding.add) == {"firm"}
    mixed = autoscaler(objective="utility_band").decide([job(spot="mixed", min_workers=4, max_workers=8)], here(), NOW)
    assert mixed.add["firm"] == 1 and mixed.add.get("spot", 0) >= 1
    assert set(autoscaler(objective=name).decide([job()], here(), NOW).add) == {"spot"}


@every
def test_job_fitting_from_six_workers_gets_nodes_for_six(name: str) -> None:
    need = MemoryNeed(available_bytes=20, sharded_bytes=60)
    wants = job(min_workers=6, max_workers=8, goodput=None, sizes=AllowedSizes(memory=need))
    decision = autoscaler([FIRM], name).decide([wants], here(), NOW)
    assert decision.add == {"firm": 2} and decision.wants["a"].workers >= 6


class Stingy:
    """A policy that gives every job one worker, and an objective that wants no worker for any."""

    name = "stingy"

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> dict[str, int]:
        return {each.job: 1 if cluster.nodes else 0 for each in jobs}


def test_node_the_allocator_would_not_use_is_not_requested() -> None:
    scaler = Autoscaler([FIRM], Stingy(), CostPerProgress(value_usd_per_h=1e6), CONFIG)
    decision = scaler.decide([job()], here(), NOW)
    assert decision.wants["a"].workers > 4 and decision.add == {"firm": 1}


def test_no_node_that_running_job_needs_is_given_up() -> None:
    scaler = autoscaler([FIRM], Careless())
    for now_s in (NOW, NOW + 101.0):
        decision = scaler.decide([job().placed({"f0": 4})], here(2), now_s)
    assert decision.release == ("f1",)


def test_what_is_to_be_replaced_stays_until_its_replacement() -> None:
    scaler = autoscaler()
    running = [job(max_workers=8, min_workers=1).placed({"f0": 4, "f1": 4})]
    decision = scaler.decide(running, here(2, 1), NOW)
    assert decision.add == {"spot": 1} and decision.release == () and decision.leaving == ("f0", "f1")
    assert scaler.decide(running, here(2, 2), NOW + 50.0).release == ()
    assert scaler.decide(running, here(2, 2), NOW + 101.0).release == ("f0", "f1")


# Time
# ----------------------------------------------------------------------------------------------------------------------


def test_spot_that_never_comes_is_replaced_by_on_demand() -> None:
    scaler, views = autoscaler(), [job(max_workers=4)]
    assert scaler.decide(views, here(), NOW).add == {"spot": 1}
    assert scaler.decide(views, here(), NOW + 99.0).add == {"spot": 1}
    fallback = scaler.decide(views, here(), NOW + 100.0)
    assert fallback.add == {"firm": 1}
    assert str(fallback.reasons["spot"]) == "no more for now: 1 x spot did not come in 100 s"
    assert fallback.reasons["spot"].figures == "asked again in 500 s; 0 -> 0 nodes"
    running = [views[0].placed({"f0": 4})]
    assert scaler.decide(running, here(1), NOW + 300.0).nodes == {"firm": 1, "spot": 0}
    again = scaler.decide(running, here(1), NOW + 600.0)
    assert again.add == {"spot": 1} and again.release == ()  # first there, then away
    both = scaler.decide(running, here(1, 1), NOW + 660.0)
    assert both.nodes["spot"] == 1
    done = scaler.decide(running, here(1, 1), NOW + 800.0)
    assert done.release == ("f0",) and done.nodes == {"firm": 0, "spot": 1}


def test_a_refusal_by_the_provider_falls_back_at_once() -> None:
    scaler = autoscaler()
    scaler.decide([job(max_workers=4)], here(), NOW)
    scaler.refuse("spot", "InsufficientInstanceCapacity", NOW + 1.0)
    decision = scaler.decide([job(max_workers=4)], here(), NOW + 1.0)
    assert (
        decision.add == {"firm": 1} and str(decision.reasons["spot"]) == "no more for now: InsufficientInstanceCapacity"
    )


def test_the_sentences_of_sizes_and_nodes() -> None:
    """Each cause in words; what it costs, and what it changes, is in the figures."""
    least = autoscaler([FIRM], "cost_per_progress").decide([job(), job("b", submitted_s=1.0)], here(), NOW)
    want = least.wants["a"].reason
    assert re.fullmatch(r"least cost: \d+ workers? on firm", str(want))
    assert re.fullmatch(r"\S+ USD in \S+ h, an hour is worth 0 USD", want.figures)
    assert str(least.reasons["firm"]) == f"job a (+1): {want}"
    assert least.reasons["firm"].figures == f"{want.figures}; 0 -> {count(least.add['firm'], 'node')}"
    held = autoscaler([FIRM], "cost_per_progress").decide([job(held_at=3)], here(), NOW)
    assert str(held.reasons["firm"]) == "job a: held at 3 by its user"
    blind = autoscaler([FIRM], "cost_per_progress").decide([job(goodput=None, deadline_s=NOW - 1.0)], here(), NOW)
    assert re.fullmatch(r"tries \d+ workers?, no model yet", str(blind.wants["a"].reason))
    assert blind.note("a") == "its deadline has passed"
    band = autoscaler([FIRM], UtilityBand(low=0.01, high=1.0)).decide([job().placed({"f0": 2})], here(1), NOW)
    assert re.fullmatch(r"utility \d\.\d\d is inside its band: 2 workers", str(band.wants["a"].reason))
    assert band.wants["a"].reason.figures == "2 workers of all jobs, band 0.01 to 1"
    spends = autoscaler([FIRM], "budget").decide([job()], here(), NOW).wants["a"].reason
    assert "; budget of 10 USD/h, " in spends.figures and str(spends).startswith("least cost: ")
    scaler = autoscaler([FIRM])
    scaler.decide([], here(1), NOW)
    idle = scaler.decide([], here(1), NOW + 101.0)
    assert idle.reasons["firm"].explained == "no job needs them; 1 -> 0 nodes"


def test_a_sentence_of_a_wanted_size_is_a_reason() -> None:
    with pytest.raises(TypeError, match=r"reason must be a placement.reasons.Reason, but got 'mine'"):
        WantedSize(job="a", workers=1, gpu="T4", reason="mine")


def test_nodes_linger_before_they_are_given_up() -> None:
    scaler = autoscaler([FIRM])
    small = job(max_workers=4).placed({"f0": 4})
    assert scaler.decide([job(max_workers=8).placed({"f0": 4, "f1": 4})], here(2), NOW).release == ()
    assert scaler.decide([small], here(2), NOW + 50.0).release == ()
    assert scaler.decide([small], here(2), NOW + 101.0).release == ("f1",)


# Known values
# ----------------------------------------------------------------------------------------------------------------------


def test_the_band_takes_the_size_nearest_its_middle() -> None:
    alone = job(max_workers=16)
    per_node = [4] * 4
    speed = speeds(alone, per_node)
    utility = speed[1:] / np.arange(1, len(speed))
    wanted = 1 + int(np.argmin(np.abs(utility - 0.9)))
    assert 1 < wanted < 16
    decision = autoscaler([FIRM], UtilityBand(low=0.85, high=0.95)).decide([alone], here(), NOW)
    assert decision.wants["a"].workers == wanted


def test_least_money_is_smallest_size_and_dear_time_fastest() -> None:
    sizes = [
        autoscaler([FIRM], CostPerProgress(value_usd_per_h=value)).decide([job()], here(), NOW).wants["a"].workers
        for value in (0.0, 5.0, 50.0, 1e6)
    ]
    assert sizes[0] <= 4 and sizes == sorted(sizes) and sizes[-1] > sizes[0]


def test_worthless_time_keeps_the_fewest_workers_a_job_needs() -> None:
    decision = autoscaler([FIRM], CostPerProgress(value_usd_per_h=0.0)).decide([job(min_workers=3)], here(), NOW)
    assert decision.wants["a"].workers >= 3 and "inf" not in decision.wants["a"].reason.explained


@pytest.mark.parametrize("limits", [{}, {"budget_usd": 5.0}, {"deadline_s": NOW + 10.0}])
def test_job_progressing_at_no_size_has_its_fewest_workers(limits: dict[str, float]) -> None:
    waiting = job(min_workers=3, **limits)
    demand = autoscaler([FIRM])._demand([waiting], here(), [FIRM], {"firm": np.inf})
    still = dataclasses.replace(demand.offers["a"][0], rate=np.zeros(16))
    want = CostPerProgress().decide(dataclasses.replace(demand, offers={"a": (still,)}), NOW)["a"]
    assert want.workers == 3 and str(want.reason) == "no size is known to make progress: 3 workers"
    assert bool(want.note) == bool(limits) and "inf" not in want.reason.explained + repr(want.note)


def test_cost_per_progress_is_price_and_value_by_goodput() -> None:
    scaler = CostPerProgress(value_usd_per_h=20.0, hysteresis=0.0)
    running = job().placed({"f0": 4})
    demand = autoscaler([FIRM])._demand(
        [running], here(1), [dataclasses.replace(FIRM, startup_s=0.0)], {"firm": np.inf}
    )
    offer = demand.offers["a"][0]
    score = (offer.whole_usd + 20.0) / offer.rate
    assert scaler.decide(demand, NOW)["a"].workers == 1 + int(np.argmin(score))


@pytest.mark.parametrize("field", ["deadline_s", "budget_usd"])
def test_what_cannot_be_met_is_said_with_best_available(field: str) -> None:
    limit = {"deadline_s": NOW + 1.0} if field == "deadline_s" else {"budget_usd": 1e-6}
    decision = autoscaler([FIRM], "cost_per_progress").decide([job(**limit)], here(), NOW)
    what = field.partition("_")[0]
    (note,) = decision.notes["a"]
    assert re.fullmatch(rf"its {what} cannot be met: at best \d+ workers? on firm", str(note))
    figures = {"deadline": "due in 0.000278 h", "budget": "1e-06 USD left"}[what]
    assert re.fullmatch(rf"{figures}; \S+ USD in \S+ h more", note.figures)
    assert decision.wants["a"].reason.words.startswith("best to be had: ")
    assert decision.explained("a").endswith(note.explained)


def test_deadline_is_met_cheaply_a_budget_used_for_speed() -> None:
    scaler = CostPerProgress()

    def want(**limits: Any) -> WantedSize:
        return autoscaler([FIRM], scaler).decide([job(**limits)], here(), NOW).wants["a"]

    free = want()
    tight = want(deadline_s=NOW + 0.5 * 3600.0)
    rich = want(budget_usd=1000.0)
    assert free.note is tight.note is rich.note is None
    aims = [each.reason.words.partition(":")[0] for each in (free, tight, rich)]
    assert aims == ["least cost", "least cost by its deadline", "soonest within its budget"]
    assert free.workers <= tight.workers <= rich.workers and rich.workers > free.workers


def test_a_job_of_unknown_length_cannot_plan_its_deadline() -> None:
    decision = autoscaler([FIRM], "cost_per_progress").decide([job(progress=None, deadline_s=NOW + 9.0)], here(), NOW)
    assert decision.note("a") == "its deadline cannot be planned for: its length is not known yet"
    without = autoscaler([FIRM], "cost_per_progress").decide([job(progress=None, goodput=None)], here(), NOW)
    assert "a" not in without.notes, "it has none"


def test_what_the_limits_do_not_allow_is_said() -> None:
    decision = autoscaler([dataclasses.replace(FIRM, max_nodes=1)], "utility_band").decide(
        [job("a", max_workers=4, min_workers=4), job("b", max_workers=4, min_workers=4, submitted_s=1.0)], here(), NOW
    )
    assert decision.nodes == {"firm": 1}
    assert decision.note("b") == "4 of 4 workers find no node within the limits of the node types"


def test_all_types_together_have_a_limit_too() -> None:
    scaler = Autoscaler((FIRM, SPOT), make_policy("goodput"), "utility_band", CONFIG, most_nodes=1)
    decision = scaler.decide([job("a", max_workers=4), job("b", spot="avoid", submitted_s=1.0)], here(), NOW)
    assert decision.nodes == {"firm": 0, "spot": 1}
    assert "find no node within the limits" in decision.note("b")


def test_expected_losses_make_spot_nodes_dearer() -> None:
    lasting, fleeting = candidate("lasting", 1.0, spot=True), candidate("fleeting", 0.95, spot=True, lasts_h=0.1)
    hours = {"lasting": 12.0, "fleeting": 0.1}
    rates = {c.kind.name: c.rate for c in offers(job(), (lasting, fleeting), hours, GoodputCache())}
    assert (rates["fleeting"] < rates["lasting"]).all()
    want = {"a": WantedSize(job="a", workers=8, gpu="T4", reason=UNUSED)}
    fleet = build(want, [job()], (lasting, fleeting), (), {}, hours)
    assert fleet.nodes == {"lasting": 2, "fleeting": 0} and fleet.users["lasting"] == ("a",)


def test_small_rests_go_to_small_nodes() -> None:
    large, small = candidate("large", 4.0), candidate("small", 1.1, cpus=1.0)
    want = {"a": WantedSize(job="a", workers=5, gpu="T4", reason=UNUSED)}
    fleet = build(want, [job()], (large, small), (), {}, {"large": np.inf, "small": np.inf})
    assert fleet.nodes == {"large": 1, "small": 1}


# Bad input
# ----------------------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match="must name one or more"):
        autoscaler([])
    with pytest.raises(InputError, match="firm occurs more than once"):
        autoscaler([FIRM, FIRM])
    with pytest.raises(ValueError, match=r"objective must be one of budget, cost_per_progress, .* but got 'cheap'"):
        make_objective("cheap")
    with pytest.raises(InputError, match="0 <= min <= max, but got 5 and 4"):
        candidate("x", min_nodes=5)
    with pytest.raises(ValueError, match="linger_s must be 0 seconds or more, but got -1"):
        AutoscalerConfig(linger_s=-1.0)
    with pytest.raises(ValueError, match="low < high"):
        UtilityBand(low=0.7, high=0.6)


def test_account_has_what_known_nodes_cost_by_the_hour() -> None:
    scaler, stranger = autoscaler([FIRM, SPOT]), node("stranger", 64.0)
    nodes = Cluster(nodes=(*here(2, 1).nodes, stranger))
    scaler.decide([job()], nodes, NOW)
    scaler.decide([job()], nodes, NOW + 360.0)
    account = scaler.account
    assert account.hours == pytest.approx(0.1, rel=0.01) and account.job_hours == pytest.approx(0.1, rel=0.01)
    assert account.spent_usd == pytest.approx(0.1 * (2 * FIRM.usd_per_h + SPOT.usd_per_h), rel=0.01)


def test_a_job_stays_where_hardly_worse_and_leaves_otherwise() -> None:
    """Four sizes on one node cost the same an hour: the fastest is best."""
    running = job(max_workers=4, resize_cost_s=0.0).placed({"f0": 3})
    demand = autoscaler([FIRM])._demand([running], here(1), [FIRM], {"firm": np.inf})

    def wanted(fastest: float, hysteresis: float) -> int:
        offer = dataclasses.replace(
            demand.offers["a"][0],
            kind=dataclasses.replace(FIRM, startup_s=0.0),
            rate=np.array([1.0, 2.0, 3.0, fastest]),
        )
        objective = CostPerProgress(value_usd_per_h=0.0, hysteresis=hysteresis)
        return objective.decide(dataclasses.replace(demand, offers={"a": (offer,)}), NOW)["a"].workers

    assert (wanted(3.15, 0.1), wanted(3.15, 0.0), wanted(3.45, 0.1), wanted(3.0, 0.1)) == (3, 4, 4, 3)


def test_job_changes_types_only_where_more_than_hardly_better() -> None:
    fast = candidate("fast", gpu_label="A100")
    running = job(max_workers=2, resize_cost_s=0.0).placed({"f0": 2})
    demand = autoscaler([FIRM])._demand([running], here(1), [FIRM], {"firm": np.inf})
    offer = demand.offers["a"][0]

    def wanted(rate: float, hysteresis: float) -> str | None:
        own = dataclasses.replace(offer, kind=dataclasses.replace(FIRM, startup_s=0.0), rate=np.array([1.0, 2.0]))
        other = dataclasses.replace(own, kind=dataclasses.replace(fast, startup_s=0.0), rate=np.array([1.0, rate]))
        objective = CostPerProgress(value_usd_per_h=0.0, hysteresis=hysteresis)
        offers = {"a": (own, other)}
        return objective.decide(dataclasses.replace(demand, offers=offers), NOW)["a"].gpu

    assert [wanted(2.1, 0.1), wanted(2.3, 0.1), wanted(2.1, 0.0), wanted(1.9, 0.1)] == ["T4", "A100", "A100", "T4"]


def test_job_of_unknown_length_counts_hour_at_present_speed() -> None:
    """While new nodes start, it continues as it is, so that this hour is work that its present size does."""
    running = job(max_workers=4, progress=None, resize_cost_s=0.0).placed({"f0": 1})
    demand = autoscaler([FIRM])._demand([running], here(1), [FIRM], {"firm": np.inf})
    kind = dataclasses.replace(FIRM, startup_s=0.0)
    offer = dataclasses.replace(demand.offers["a"][0], kind=kind, rate=np.array([2.0, 4.0, 5.0, 6.0]))
    want = CostPerProgress(value_usd_per_h=1e6).decide(dataclasses.replace(demand, offers={"a": (offer,)}), NOW)["a"]
    assert want.workers == 4 and "in 0.333 h for every hour on its present size" in want.reason.figures


def test_running_jobs_are_given_nodes_before_those_that_wait() -> None:
    waits, runs = job("a", max_workers=4), job("b", max_workers=4).placed({"f0": 1})
    wants = {each.job: WantedSize(job=each.job, workers=4, gpu="T4", reason=UNUSED) for each in (waits, runs)}
    fleet = build(wants, [waits, runs], [dataclasses.replace(FIRM, max_nodes=1)], (), {"firm": 1}, {"firm": np.inf})
    assert fleet.short == {"a": 4} and fleet.users["firm"] == ("b",)
    first = dataclasses.replace(waits, priority=1)
    fleet = build(wants, [runs, first], [dataclasses.replace(FIRM, max_nodes=1)], (), {"firm": 1}, {"firm": np.inf})
    assert fleet.short == {"b": 4}, "a priority comes before that"


def test_untried_sizes_are_offered_at_the_largest_tried_synchronisation() -> None:
    """The model was fitted to 1 and 2 workers, between which the time grows as if each more cost as much."""
    steep = GoodputModel(ThroughputModel(0.02, 1e-3, 0.02, 0.5, 0.02, 0.5, 1.5), NoiseScale(sqr=1.0, var=1e6), 64)
    seen = tuple(Observation(1, k, 64, 0, float(steep.step_time(1, k, 64, 0))) for k in (1, 2))
    tried = job(goodput=steep, models={"T4": steep}, observations={"T4": seen}, max_workers=4)
    (known,) = offers(dataclasses.replace(tried, observations={}), [FIRM], {"firm": np.inf}, GoodputCache())
    (hoped,) = offers(tried, [FIRM], {"firm": np.inf}, GoodputCache())
    assert hoped.rate[:2] == pytest.approx(known.rate[:2], rel=0.01)
    assert (hoped.rate[2:] > 1.2 * known.rate[2:]).all() and (np.diff(hoped.rate[1:]) > 0).all()
