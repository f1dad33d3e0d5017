"""Adam's moments follow the batch: updates are those of half-lives in samples, and all options come back."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

import elastic_ray as er
from elastic_ray.adaptation import Policy, PolicyView, SetBatch
from elastic_ray.batch.scaling_rules import Adam
from elastic_ray.data.order import IndexOrder
from elastic_ray.loop.api import current_session
from elastic_ray.run.current import set_session
from tests.loop.changing import Change, Kill, run_job
from tests.loop.ranks import Ranks

SAMPLES, FIRST, EPOCHS = 48, 4, 3
SIZES = {0: 4, 1: 16, 2: 4}
RATE, BETAS, EPS, DECAY = 0.02, (0.9, 0.95), 1e-3, 0.1


Trained: TypeAlias = tuple[Tensor, list[float], Any, list[tuple[float, int]]]


class ThereAndBack(Policy):
    """Takes four times the batch in the second epoch; a batch counts one step after it was asked for."""

    def after_step(self, view: PolicyView) -> Any:
        done = view.samples // SAMPLES
        return SetBatch(SIZES[min(done, 2)])


def data() -> Tensor:
    return torch.linspace(-2, 2, SAMPLES, dtype=torch.float64)[:, None] + 0.5


def net() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-0.7, 0.6, p.numel(), dtype=torch.float64).reshape(p.shape) + 0.1 * number)
    return model


def loss_of(model: Any, x: Tensor) -> Tensor:
    return (model(x) - x.sin()).square().mean()


def train(
    strategy: str | None = None,
    scaler: bool = False,
    several: bool = False,
    least: float = 0.0,
) -> Trained:
    """Parameters, the scale of each step, the optimizer's options at the end, and each step as it was drawn first."""
    model = net()
    parts = [list(model[0].parameters()), list(model[2].parameters())] if several else [list(model.parameters())]
    optimizers = [torch.optim.AdamW(part, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY) for part in parts]
    amp = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7) if scaler else None
    wrapped = er.AdaptiveDataParallel(
        model,
        optimizers if several else optimizers[0],
        grad_scaler=amp,
        scaling_rule=Adam(by_noise=False, least_beta2=least),
        strategy=strategy,
        policy=ThereAndBack(),
    )
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(data()), batch_size=FIRST, seed=3)
    loader.autoscale_batch_size(16)
    scales, first = dict[int, float](), dict[int, tuple[float, int]]()
    for _ in er.remaining_epochs_until(EPOCHS):
        for (x,) in loader:
            at = er.get_context().get_global_step()
            scales[at] = loader.current_batch_size / FIRST
            step = current_session().ledger.step
            assert step is not None
            first.setdefault(at, (scales[at], step.count))
            wrapped.zero_grad()
            loss = loss_of(wrapped, x)
            (amp.scale(loss) if amp else loss).backward()
            for optimizer in optimizers:
                amp.step(optimizer) if amp else optimizer.step()
            if amp:
                amp.update()
    options = [{k: v for k, v in group.items() if k != "params"} for each in optimizers for group in each.param_groups]
    found = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return found, [scales[step] for step in sorted(scales)], options, [first[step] for step in sorted(first)]


def by_hand(steps: list[tuple[float, int]], least: float = 0.0) -> Tensor:
    """AdamW whose moments decay by their beta for each initial batch, with the product of all as their bias.

    What v holds of the noise, 1 / scale at each batch, multiplies the rate and eps as far as it is another's.
    """
    model = net()
    params = list(model.parameters())
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    left1, left, noise, x = 1.0, 1.0, 0.0, data()
    (beta1, beta2), at = BETAS, iter(steps)
    for epoch in range(EPOCHS):
        order, position = torch.from_numpy(IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:]), 0
        while position < SAMPLES:
            scale, count = next(at)
            batch = order[position : position + count]
            position += count
            decay1, decay = beta1**scale, max(beta2**scale, least)
            left1, left = left1 * decay1, left * decay
            noise = decay * noise + (1 - decay) / scale
            lag = (scale * noise / (1 - left)) ** 0.5
            lag = lag if abs(lag - 1) > 1e-3 else 1.0
            rate, eps = RATE * scale**0.5 * lag, EPS / scale**0.5 * lag
            gradients = torch.autograd.grad(loss_of(model, x[batch]), params)
            for p, m, v, g in zip(params, first, second, gradients, strict=True):
                m.lerp_(g, 1 - decay1)
                v.mul_(decay).addcmul_(g, g, value=1 - decay)
                with torch.no_grad():
                    p.mul_(1 - RATE * DECAY * scale)
                    p.sub_(rate * (m / (1 - left1)) / ((v / (1 - left)).sqrt() + eps))
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def trained(how: dict[str, Any]) -> Trained:
    return train(**how)


def check(found: Trained) -> None:
    parameters, scales, options, steps = found
    assert {1.0, 4.0} == set(scales) and scales[-1] == 1.0
    torch.testing.assert_close(parameters, by_hand(steps), rtol=1e-9, atol=1e-12)
    for group in options:
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (RATE, BETAS, EPS, DECAY)


@pytest.mark.parametrize(
    "how", [{}, {"scaler": True}, {"several": True}, {"strategy": "zero1"}], ids=["plain", "amp", "several", "tiles"]
)
@pytest.mark.parametrize("world", [None, 2])
def test_updates_have_half_lives_in_samples(ranks: Ranks, world: int | None, how: dict[str, Any]) -> None:
    set_session(None)
    found = ranks.run(trained, how, world=world)
    for each in [found] if world is None else found:
        check(each)
    set_session(None)


@pytest.mark.parametrize("strategy", [None, "zero1"])
@pytest.mark.parametrize(
    "script", [[Change(14, (1, 2, 3)), Change(17, (2, 3))], [Kill(14, 2, "publish", after=(1, 3))]]
)
def test_and_however_the_group_changes(script: list[Any], strategy: str | None) -> None:
    first = (1, 2, 3) if isinstance(script[0], Kill) else (1, 2)
    if isinstance(script[0], Kill) and strategy is None:
        script = [Kill(14, 2, "backward")]
    results = run_job(lambda: train(strategy), script, first=first).results
    parameters = [each[0] for each in results.values()]
    _, scales, _, first = max(results.values(), key=lambda each: len(each[1]))  # there from the first step
    # A step whose update is in the tiles is drawn again with its samples, and not made again; others are made anew.
    anew = {} if strategy and isinstance(script[0], Kill) else dict(enumerate(scales))
    made = [
        (anew.get(at, scale), round(count * anew.get(at, scale) / scale)) for at, (scale, count) in enumerate(first)
    ]
    torch.testing.assert_close(parameters[0], by_hand(made), rtol=1e-9, atol=1e-12)
    for other in parameters:
        assert torch.equal(other, parameters[0])


def test_second_moments_remember_enough_steps() -> None:
    set_session(None)
    parameters, _, _, steps = train(least=0.9)
    torch.testing.assert_close(parameters, by_hand(steps, least=0.9), rtol=1e-9, atol=1e-11)
    set_session(None)


def test_sgd_has_no_second_moments() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"scaling_rule='adam' needs an optimizer of Adam's kind.*but got SGD"):
        er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), scaling_rule="adam")
    set_session(None)
