"""The noise scale does not depend on who computes the gradients, and rates follow the batch in `step` only."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.batch.limits import BatchChoice
from elastic_ray.batch.scaling_rules import RULES, held_back
from elastic_ray.data.order import IndexOrder
from elastic_ray.loop.api import current_session
from elastic_ray.membership.messages import BatchProposal
from elastic_ray.sync.preconditioners import LEAST_PART, WARM_STEPS
from elastic_ray.sync.statistics.noise_scale import SmoothedNoise, estimate
from placement.goodput.model import NoiseScale
from tests.loop.ranks import Ranks

SAMPLES, BATCH = 96, 8
STEPS = SAMPLES // BATCH  # an epoch
MAKERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def rows() -> torch.utils.data.TensorDataset:
    """Noisy rows."""
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    )


def net() -> nn.Module:
    """The same small model each time, in float64 so that sums in another order differ little."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases."""
    return [{"params": [p for p in model.parameters() if p.dim() == kind]} for kind in (2, 1)]


def measured(maker: str, micro: int, steps: int) -> list[tuple[NoiseScale | None, list[float]]]:
    """Noise scale after each of `steps` steps, and the gains at 1, 2, 4."""
    model = net()
    optimizer = MAKERS[maker](two_groups(model))
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3)
    loader.autoscale_batch_size(SAMPLES, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    found = []
    for _ in er.remaining_epochs_until(math.ceil(steps / STEPS)):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x.double()), y).backward()
            optimizer.step()
            if current_session().ledger.outermost.is_last_micro:
                found.append((wrapped.noise_scale, [wrapped.gain(scale) for scale in (1, 2, 4)]))
    return found[:steps]


@pytest.mark.thorough
@pytest.mark.parametrize("maker", list(MAKERS))
def test_replicas_and_micro_steps_measure_the_same_noise(ranks: Ranks, maker: str) -> None:
    steps = 11
    alone = ranks.run(measured, maker, 2, steps)  # 4 micro-steps of 2
    for world, micro in ((4 // 2, 2), (4, 2)):  # 2 replicas x 2 micro-steps; 4 replicas
        for result in ranks.run(measured, maker, micro, steps, world=world):
            for (late, gains), (now, wanted) in zip(result[1:], alone, strict=False):  # learnt one step later
                assert late.sqr == pytest.approx(now.sqr, rel=1e-4)
                assert late.var == pytest.approx(now.var, rel=1e-4)
                assert gains == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("maker", list(MAKERS))
def test_noise_scale_is_one_that_gradients_by_hand_give(ranks: Ranks, maker: str) -> None:
    found = ranks.run(measured, maker, 2, STEPS)
    wanted = noise_by_hand(maker)
    for (noise, _), expected in zip(found, wanted, strict=True):
        assert noise.sqr == pytest.approx(expected.sqr, rel=1e-3)
        assert noise.var == pytest.approx(expected.var, rel=1e-3)


def noise_by_hand(maker: str) -> list[NoiseScale | None]:
    """From the gradients of four pieces of each batch, in the optimizer's units once it is warm."""
    model = net()
    optimizer = MAKERS[maker](two_groups(model))
    smoothed, noises = SmoothedNoise(), []
    for number, batch in enumerate(torch.from_numpy(IndexOrder(samples=SAMPLES).epoch_order(3, 0)[:]).split(BATCH)):
        by_piece = []
        for piece in batch.split(2):
            optimizer.zero_grad()
            x, y = rows()[piece]
            nn.functional.cross_entropy(model(x.double()), y).backward()
            by_piece.append({p: p.grad.clone() for p in model.parameters()})
        means = {p: torch.stack([grads[p] for grads in by_piece]).mean(0) for p in model.parameters()}
        warm = number >= WARM_STEPS and maker == "adam"
        units = {p: _denominator(optimizer, p) if warm else torch.ones_like(p) for p in model.parameters()}
        if number == WARM_STEPS and maker == "adam":
            smoothed = SmoothedNoise()
        estimates = [
            estimate(
                mean_sq_norm=sum(
                    float((grads[p] / units[p]).square().sum()) for grads in by_piece for p in group["params"]
                )
                / 4,
                sq_norm_of_mean=sum(float((means[p] / units[p]).square().sum()) for p in group["params"]),
                samples=4,
                scale=1.0,
            )
            for group in optimizer.param_groups
        ]
        # Samples are drawn without replacement.
        estimates = [NoiseScale(sqr=each.sqr + each.var * BATCH / SAMPLES, var=each.var) for each in estimates]
        smoothed = smoothed.add(estimates, 1.0)
        noises.append(smoothed.whole())
        for p, mean in means.items():
            p.grad = mean
        optimizer.step()
    return noises


def _denominator(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> torch.Tensor:
    state = optimizer.state[p]
    size = torch.sqrt(state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))) + 1e-8
    return torch.maximum(size, size.square().mean().sqrt() * LEAST_PART)


# -- learning rates ------------------------------------------------------------------------------------------


def rates(rule: str, grows_at: int) -> dict[str, Any]:
    """Rates inside and outside of `optimizer.step`, the step's scale, and the noise, step by step.

    Rank 0 asks for batches of twice the size in step `grows_at`.
    """
    model = net()
    optimizer = torch.optim.SGD(two_groups(model), lr=0.1)
    optimizer.param_groups[1]["lr"] = 0.03
    inside: list[list[float]] = []
    original = optimizer.step

    def spy(closure: Any = None) -> Any:
        inside.append([group["lr"] for group in optimizer.param_groups])
        return original(closure)

    optimizer.step = spy
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule=rule)
    loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3)
    loader.autoscale_batch_size(SAMPLES)
    session = current_session()
    outside, scales, noise, sizes, progress = [], [], [], [], []
    for _ in er.remaining_epochs_until(2):
        for x, y in loader:
            if session.progress.steps == grows_at and session.rank == 0:
                wish = BatchChoice(atomic_bsz=2 * BATCH // session.world_size)
                session.membership.post(BatchProposal(generation=session.membership.generation, batch=wish))
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x.double()), y).backward()
            noise.append(wrapped._tracker.by_group)
            progress.append(session.ledger.epochs_done)
            optimizer.step()
            outside.append([group["lr"] for group in optimizer.param_groups])
            scales.append(loader.current_batch_size / BATCH)
            sizes.append(len(x))
    return {
        "inside": inside, "outside": outside, "scales": scales, "noise": noise, "sizes": sizes, "progress": progress
    }  # fmt: skip


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "adam"])  # it needs Adam, and corrects its bias
def test_rates_follow_the_rule_inside_step_and_only_there(ranks: Ranks, rule: str) -> None:
    results = ranks.run(rates, rule, 4, world=2)
    assert results[0]["inside"] == results[1]["inside"]
    for result in results:
        assert result["scales"] == [1.0] * 5 + [2.0] * (len(result["scales"]) - 5)  # from the step after the wish
        assert result["sizes"][:7] == [4] * 5 + [8] * 2
        assert result["outside"] == [[0.1, 0.03]] * len(result["outside"])
        held: tuple[float, ...] = ()
        for number, inside in enumerate(result["inside"]):
            noise, progress = result["noise"][number], result["progress"][number]
            factors = RULES[rule]().factors(result["scales"][number], noise, progress)
            if rule in ("adascale", "adamscale"):
                factors = held = held_back(factors, held)
            assert inside == pytest.approx([0.1 * factors[0], 0.03 * factors[1]])
        grown = {"linear": 2.0, "sqrt": 2.0**0.5, "legw": 2.0**0.5 / 2, "none": 1.0}
        if rule in grown:
            # legw: two of two warm-up epochs are over at the end only
            number = next(i for i, p in enumerate(result["progress"]) if p >= 1.0)
            assert result["inside"][number][0] == pytest.approx(0.1 * grown[rule], rel=0.1)
        else:
            assert 0.1 < result["inside"][-1][0] <= 0.2


def grown_alone(_: int) -> tuple[list[int], float]:
    """One process changes its batch within an epoch; samples stay exact."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH)
    loader.autoscale_batch_size(SAMPLES, local_bsz_bounds=(1, 16), gradient_accumulation=True)
    session, seen = current_session(), []
    for _epoch in er.remaining_epochs_until(1):
        for (index,) in loader:
            step = session.ledger.outermost
            if session.progress.steps in (2, 3):
                wish = BatchChoice(atomic_bsz=5, accum_steps=session.progress.steps - 2)
                session.membership.post(BatchProposal(generation=1, batch=wish))
            seen += index.tolist()
            assert len(index) <= 8
            optimizer.zero_grad()
            wrapped(torch.randn(len(index), 6).double()).square().mean().backward()
            optimizer.step()
            assert step is not None
    return seen, wrapped.scale_invariant_steps


def test_batch_changes_within_an_epoch_without_losing_a_sample(ranks: Ranks) -> None:
    seen, _ = ranks.run(grown_alone, 0)
    assert sorted(seen) == list(range(SAMPLES))
