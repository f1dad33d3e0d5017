"""The gradient noise scale of a sharded model is that of the same model in whole replicas."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.batch.limits import BatchChoice
from elastic_ray.loop.api import current_session
from elastic_ray.membership.messages import BatchProposal
from elastic_ray.monitoring.monitor import Monitor
from tests.loop.changing import Change, Kill, Outcome, run_job
from tests.sync.sharded_parameters.sharded import CLOSE, SAMPLES, Net, data, sharded_net

MAKERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    # Learning with so small an eps makes much of rounding, so the rate is small.
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-5, eps=1e-8),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """How it is trained."""

    optimizer: str = "adamw"
    batch: int = 12
    micro: int | None = None
    losses: int = 1
    clip: bool = False
    dead: bool = False
    rule: str = "none"
    wish: int | None = None
    shard_size: int | None = None
    epochs: int = 3


@dataclasses.dataclass
class Found:
    """What one worker knows: noise by step and group, variance, progress, parameters, and its rank."""

    noise: dict[int, list[tuple[float, float]]]
    variance: Any
    progress: float
    rank: int
    parameters: Any


def train(case: Case, *, sharded: bool) -> Found:
    """In three groups of parameters, two of which share the blocks."""
    model = sharded_net(shard_size=case.shard_size) if sharded else Net()
    blocks = [[p for p in model.blocks.parameters() if (p.dim() > 1) == is_weight] for is_weight in (True, False)]
    rest = [p for name, p in model.named_parameters() if "blocks" not in name]
    optimizer = MAKERS[case.optimizer]([{"params": each} for each in (*blocks, rest)])
    monitor = Monitor(noise_every=1, variance_every=1)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule=case.rule, monitor=monitor)
    loader = er.AdaptiveDataLoader(data(), batch_size=case.batch, seed=3, drop_last=True)
    if case.micro is not None or case.wish is not None:
        loader.autoscale_batch_size(SAMPLES, local_bsz_bounds=(1, case.micro or 48), gradient_accumulation=True)
    session, noise = current_session(), {}
    for _ in er.remaining_epochs_until(case.epochs):
        for x, y in loader:
            if case.dead:
                x[:, 5:] *= 0.0  # columns of one layer never have a gradient
            step = er.get_context().get_global_step()
            if case.wish is not None and step == 2:
                wish = BatchChoice(atomic_bsz=case.wish, accum_steps=0)
                session.membership.post(BatchProposal(generation=session.membership.generation, batch=wish))
            optimizer.zero_grad()
            out = wrapped(x)
            for part in range(case.losses):
                loss = nn.functional.cross_entropy(out, (y + part) % 3)
                loss.backward(retain_graph=part + 1 < case.losses)
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            if session.ledger.outermost.is_last_micro:
                noise[step] = [(each.sqr, each.var) for each in wrapped._tracker.by_group if each is not None]
    rank = er.get_context().get_world_rank()
    return Found(noise, wrapped.measures.variance, wrapped.scale_invariant_steps, rank, model.state_dict())


def run(case: Case, *, sharded: bool, workers: int = 2, script: Any = ()) -> Outcome:
    """Train while the group changes."""
    return run_job(lambda: train(case, sharded=sharded), script, first=tuple(range(1, workers + 1)))


def near(found: list[tuple[float, float]], wanted: list[tuple[float, float]], *, rel: float = 1.5e-2) -> None:
    """One noise scale by group is another but for rounding: of shards, denominators are kept in bfloat16."""
    assert len(found) == len(wanted)
    for (sqr, var), (exact_sqr, exact_var) in zip(found, wanted, strict=True):
        assert var == pytest.approx(exact_var, rel=rel)
        # It is the difference of two numbers of var's size, in float32.
        assert sqr == pytest.approx(exact_sqr, rel=rel, abs=1e-3 * exact_var)


@pytest.mark.matrix(every=9)
@pytest.mark.parametrize("optimizer", list(MAKERS))
@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (2, {}),
        (4, {"batch": 14}),  # 3 or 4 samples each
        (2, {"micro": 3}),
        (1, {}),
        (1, {"micro": 3}),
        (2, {"losses": 2}),
        (2, {"clip": True}),
        (3, {"dead": True}),
        (4, {"batch": 14, "shard_size": 2}),
        (6, {"micro": 2, "shard_size": 2}),
    ],
    ids=[
        *("2", "unequal", "accumulated", "pairs", "alone", "two losses", "clipped", "dead columns"),
        *("two shard groups", "three shard groups"),
    ],
)
def test_it_is_that_of_replicas(optimizer: str, workers: int, options: dict[str, Any]) -> None:
    case = Case(optimizer, **options)
    wanted = run(case, sharded=False, workers=workers).results[1]
    results = run(case, sharded=True, workers=workers).results
    assert len(wanted.noise[max(wanted.noise)]) == 3, "there is something to compare"
    for found in results.values():
        assert found.noise.keys() == wanted.noise.keys()
        for step, noise in wanted.noise.items():
            near(found.noise[step], noise)
        assert found.noise == results[1].noise, "all ranks know the same"
        assert found.variance.groups == pytest.approx(wanted.variance.groups, rel=2e-3)


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["adascale", "adamscale"])
def test_an_adaptive_batch_is_followed_live_as_with_replicas(rule: str) -> None:
    case = Case("sgd", rule=rule, wish=8, epochs=4)
    script = [Change(4, (1, 2, 3, 4)), Change(8, (1, 2, 4))]
    found, wanted = run(case, sharded=True, script=script), run(case, sharded=False, script=script)
    assert found.groups == wanted.groups == [(1, 2), (1, 2, 3, 4), (1, 2, 4)]
    whole = wanted.results[1]
    assert whole.progress > len(whole.noise) * 1.05, "the batch has grown"
    for own in found.results.values():
        assert own.noise.keys() <= whole.noise.keys()
        assert own.progress == pytest.approx(whole.progress, rel=1e-3)
    for name, value in whole.parameters.items():
        torch.testing.assert_close(found.results[1].parameters[name], value, rtol=0, atol=10 * CLOSE)


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["vote", "backward"])
def test_a_loss_loses_no_statistics_and_joiners_have_them(moment: str) -> None:
    case = Case()
    script = [Kill(7, 1, moment), Change(11, (2, 3, 4))]
    found, wanted = run(case, sharded=True, workers=3, script=script), run(case, sharded=False, workers=3)
    assert found.groups[-1] == (2, 3, 4)
    survivor, joiner = found.results[2], found.results[4]
    assert min(joiner.noise) == 12
    near(joiner.noise[12], survivor.noise[12], rel=1e-9)
    # Two workers measure with fewer samples, but of the same noise: what was known before still counts.
    exact = wanted.results[2].noise[12]
    for (_, var), (_, whole) in zip(joiner.noise[12], exact, strict=True):
        assert var == pytest.approx(whole, rel=0.6)
