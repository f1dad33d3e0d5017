"""``throughput_efficiency`` and ``utility_cost``: their rules, prices, and stragglers."""

from __future__ import annotations

import dataclasses

import pytest

from placement.cluster.cluster import GPU_TYPE_LABEL, Cluster, Node
from placement.cluster.jobs import JobView, speeds
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.step_time import ThroughputModel
from placement.planning.plan import make_plan
from placement.policies import ThroughputEfficiencyPolicy, UtilityCostPolicy
from placement.policies.shared.base import Policy
from tests.placement.views import cluster, model, view

BOTH = pytest.mark.parametrize(
    "policy", [ThroughputEfficiencyPolicy(), UtilityCostPolicy()], ids=lambda policy: policy.name
)


def scaling() -> GoodputModel:
    """Each added worker adds a little less."""
    return GoodputModel(ThroughputModel(0.02, 1e-3, 0.02, 2e-3, 0.01, 2e-3, 1.5), NoiseScale(1.0, 500.0), 64)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.7])
def test_job_grows_while_an_added_worker_does_its_part(threshold: float) -> None:
    job = view("a", goodput=scaling(), max_workers=16)
    nodes = cluster(16)
    got = ThroughputEfficiencyPolicy(threshold=threshold).decide([job], nodes, 0.0)["a"].workers
    speed = speeds(job, [16])
    parts = [(speed[k + 1] - speed[k]) / (speed[k] / k) for k in range(1, 16)]
    stops = [k for k, part in enumerate(parts, start=1) if not part > threshold]
    assert got == (stops[0] if stops else 16)


@pytest.mark.parametrize("value", [0.5, 2.0, 8.0])
def test_a_job_grows_while_hours_saved_outweigh_their_cost(value: float) -> None:
    job = view("a", goodput=scaling(), max_workers=16)
    got = UtilityCostPolicy(value=value, price=1.0).decide([job], cluster(16), 0.0)["a"].workers
    hours = 1.0 / speeds(job, [16])[1:]
    for k in range(1, 16):
        saved, paid = value * (hours[k - 1] - hours[k]), (k + 1) * hours[k] - k * hours[k - 1]
        if not saved > paid:
            break
    else:
        k = 16
    assert got == k


def typed(**gpus: tuple[int, int]) -> Cluster:
    nodes = []
    for gpu, (count, slots) in gpus.items():
        amounts = {"CPU": float(slots)}
        nodes += [
            Node(node_id=f"{gpu}{i}", total=amounts, free=amounts, labels={GPU_TYPE_LABEL: gpu}) for i in range(count)
        ]
    return Cluster(nodes=tuple(nodes))


def test_dear_gpus_are_used_less() -> None:
    prices = {"dear": 8.0, "cheap": 0.5}
    policy = UtilityCostPolicy(value=2.0, prices=prices)
    job = view("a", goodput=scaling())
    sizes = {gpu: policy.decide([job], typed(**{gpu: (1, 8)}), 0.0)["a"].workers for gpu in prices}
    assert sizes["dear"] < sizes["cheap"]
    # On a cluster of both it pays for what it runs on.
    both = typed(dear=(1, 8), cheap=(1, 8))
    on = {gpu: dataclasses.replace(job, allocation={f"{gpu}0": 1}) for gpu in prices}
    got = {gpu: policy.decide([running], both, 0.0)["a"].workers for gpu, running in on.items()}
    assert got["dear"] < got["cheap"]


def test_prices_that_were_given_are_not_overwritten() -> None:
    assert UtilityCostPolicy().priced({"t4": 2.0}).prices == {"t4": 2.0}
    assert UtilityCostPolicy(prices={"t4": 1.0}).priced({"t4": 2.0}).prices == {"t4": 1.0}
    with pytest.raises(ValueError, match="prices\\['t4'\\] must be 0 USD or more"):
        UtilityCostPolicy(prices={"t4": -1.0})


# Stragglers
# ----------------------------------------------------------------------------------------------------------------------


def carried_out(policy: Policy, views: list[JobView], nodes: Cluster) -> list[JobView]:
    plan = make_plan(policy, views, nodes, 0.0)
    return [dataclasses.replace(v, allocation=plan.allocation.get(v.job, {})) for v in views]


@BOTH
def test_slow_node_is_left_and_others_keep_their_places(policy: Policy) -> None:
    nodes = cluster(4, 4, 4)
    views = carried_out(policy, [view(job, max_workers=4, goodput=model(1e4), slow_nodes={}) for job in "abc"], nodes)
    assert sorted(node for v in views for node in v.allocation) == ["n0", "n1", "n2"]
    hit = next(v for v in views if "n1" in v.allocation)
    seen = [dataclasses.replace(v, slow_nodes={"n1": 2.0}) if v is hit else v for v in views]
    after = {v.job: v.allocation for v in carried_out(policy, seen, nodes)}
    assert all("n1" not in places for places in after.values())
    assert sum(after[hit.job].values()) >= 1
    again = [dataclasses.replace(v, allocation=after[v.job]) for v in seen]
    assert {v.job: v.allocation for v in carried_out(policy, again, nodes)} == after


@BOTH
def test_a_little_slow_is_no_straggler(policy: Policy) -> None:
    job = view("a", allocation={"n0": 4}, slow_nodes={"n0": 1.2})
    assert "n0" in carried_out(policy, [job], cluster(4, 4))[0].allocation


@BOTH
def test_a_slow_node_is_better_than_none(policy: Policy) -> None:
    running = view("a", allocation={"n0": 2}, slow_nodes={"n0": 3.0})
    assert carried_out(policy, [running], cluster(4))[0].allocation
    two = [running, view("b", min_workers=4, submitted_s=1.0, allocation={"n1": 4})]
    assert all(v.allocation for v in carried_out(policy, two, cluster(4, 4)))


def test_bad_values_say_what_would_be_right() -> None:
    with pytest.raises(ValueError, match="slow_nodes of job 'a' must hold factors of 1 or more"):
        view("a", slow_nodes={"n0": 0.5})
    for policy in (ThroughputEfficiencyPolicy, UtilityCostPolicy):
        with pytest.raises(ValueError, match="slow_factor must be above 1"):
            policy(slow_factor=1.0)
