"""Several optimizers for one model: Muon beside AdamW, a GAN in one module; each is called once a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_ray as er
from tests.loop.changing import Change, Kill, run_job

BATCH, EPOCHS = 12, 2
Optimizers = list[torch.optim.Optimizer]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(96, 4, generator=generator), torch.randint(2, (96,), generator=generator))


def muon_and_adamw(model: nn.Module) -> Optimizers:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def sgd_and_adamw(model: nn.Module) -> Optimizers:
    first, *rest = model.parameters()
    return [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


def schedules(optimizers: Optimizers) -> list[torch.optim.lr_scheduler.LRScheduler]:
    return [
        torch.optim.lr_scheduler.ExponentialLR(each, rate) for each, rate in zip(optimizers, (0.9, 0.95), strict=True)
    ]


def one_step(model: Any, plain: nn.Module, optimizers: Optimizers, steppers: Any, x: Tensor, y: Tensor) -> None:
    for each in optimizers:
        each.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    for each in steppers:
        each.step()


def undisturbed(make: Callable[[nn.Module], Optimizers]) -> tuple[list[Tensor], list[Any]]:
    """The end of the same training, in a plain loop."""
    model = net()
    optimizers = make(model)
    steppers = [*optimizers, *schedules(optimizers)]
    for _ in range(EPOCHS):
        for x, y in DataLoader(data(), batch_size=BATCH):
            one_step(model, model, optimizers, steppers, x, y)
    return [p.detach() for p in model.parameters()], [each.state_dict() for each in optimizers]


def train(make: Callable[[nn.Module], Optimizers], strategy: str, **options: Any) -> tuple[list[Tensor], list[Any]]:
    model = net()
    optimizers = make(model)
    followers = schedules(optimizers)
    wrapped = er.AdaptiveDataParallel(
        model, optimizers, followers, scaling_rule="none", strategy=strategy, schedule="steps", **options
    )
    loader = er.AdaptiveDataLoader(data(), batch_size=BATCH, shuffle=False)
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, y in loader:
            one_step(wrapped, model, optimizers, [*optimizers, *followers], x, y)
    return [p.detach().clone() for p in model.parameters()], [each.state_dict() for each in optimizers]


def assert_same(found: Any, wanted: Any) -> None:
    for mine, theirs in zip(found[0], wanted[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        for group, other in zip(mine["param_groups"], theirs["param_groups"], strict=True):
            assert group["lr"] == pytest.approx(other["lr"])


@pytest.mark.parametrize("moment", ["vote", "publish"])
def test_ranks_agree_after_a_loss_between_two_updates(moment: str) -> None:
    """The step is drawn again for the optimizer whose update is lost, as for a GAN's second one."""
    found = run_job(lambda: train(sgd_and_adamw, "zero1"), [Kill(5, 2, moment), Change(9, (1, 3))], first=(1, 2))
    first, *others = [result for result, _ in found.results.values()]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for mine, theirs in zip(first, undisturbed(sgd_and_adamw)[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-2)


SCRIPTS = {
    "grows and shrinks": [Change(3, (1, 2, 3)), Change(9, (1, 3))],
    "loses one in a backward pass": [Kill(5, 2, "allreduce"), Change(9, (1, 3))],
    "loses one in the update": [Kill(5, 2, "optimizer_step"), Change(9, (1, 3))],
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("strategy", ["all_reduce", "zero1"])
@pytest.mark.parametrize("make", [muon_and_adamw, sgd_and_adamw])
def test_a_changing_group_trains_as_a_plain_loop(make: Any, strategy: str, script: str) -> None:
    found = run_job(lambda: train(make, strategy), SCRIPTS[script], first=(1, 2))
    assert len(found.groups) == 3
    assert not [text for kind, text, _ in found.told if kind == "warning"]
    wanted = undisturbed(make)
    assert found.results
    for result in found.results.values():
        assert_same(result, wanted)


class Gan(nn.Module):
    """Both networks in one module, as a LightningModule has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, *, judge: bool) -> Tensor:
        if judge:
            fake = self.generator(x).detach()
            return nn.functional.softplus(self.discriminator(fake) - self.discriminator(x + 1)).mean()
        return nn.functional.softplus(-self.discriminator(self.generator(x))).mean()


def _gan_step(model: Any, optimizers: Optimizers, x: Tensor) -> None:
    for optimizer, judge in zip(optimizers, (True, False), strict=True):
        for each in optimizers:
            each.zero_grad()
        model(x, judge=judge).backward()
        optimizer.step()


def _gan_optimizers(model: Gan) -> Optimizers:
    return [
        torch.optim.Adam(model.discriminator.parameters(), lr=0.01),
        torch.optim.SGD(model.generator.parameters(), lr=0.1, momentum=0.9),
    ]


def _train_gan(how: str) -> list[Tensor]:
    model: Any = Gan()
    if how == "sharded":  # the generator's pass leaves the discriminator gradients, which the next step drops
        er.fully_shard(model.discriminator)
        er.fully_shard(model.generator)
    wrapped, optimizers = model, _gan_optimizers(model)
    if how != "one":  # the generator's pass reduces gradients of both models
        model.discriminator = er.AdaptiveDataParallel(model.discriminator, optimizers[0], scaling_rule="none")
        model.generator = er.AdaptiveDataParallel(model.generator, optimizers[1], scaling_rule="none")
    else:
        wrapped = er.AdaptiveDataParallel(model, optimizers, scaling_rule="none")
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, _ in er.AdaptiveDataLoader(data(), batch_size=BATCH, shuffle=False):
            _gan_step(wrapped, optimizers, x)
    return [(p.full_tensor() if how == "sharded" else p).detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("how", ["one", "two", "sharded"])
def test_a_gan_in_one_module_or_two(script: str, how: str) -> None:
    model = Gan()
    optimizers = _gan_optimizers(model)
    for _ in range(EPOCHS):
        for x, _ in DataLoader(data(), batch_size=BATCH):
            _gan_step(model, optimizers, x)
    found = run_job(lambda: _train_gan(how), SCRIPTS[script], first=(1, 2) if how == "one" else (1, 2, 3))
    assert found.results
    for result in found.results.values():
        for mine, theirs in zip(result, model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-5)


def test_noise_and_measures_are_of_the_whole_model() -> None:
    def noise() -> Any:
        model = net()
        optimizers = muon_and_adamw(model)
        monitor = er.monitoring.Monitor(noise_every=1, variance_every=1, norms_every=1)
        wrapped = er.AdaptiveDataParallel(model, optimizers, monitor=monitor)
        for _ in er.remaining_epochs_until(1):
            for x, y in er.AdaptiveDataLoader(data(), batch_size=BATCH):
                one_step(wrapped, model, optimizers, optimizers, x, y)
        return wrapped.noise_scale, wrapped.measures

    for scale, measures in run_job(noise, first=(1, 2)).results.values():
        elements = sum(p.numel() for p in net().parameters())
        assert scale.sqr + scale.var == pytest.approx(elements)
        assert measures.noise == scale
        assert len(measures.variance.groups) == len(measures.norms.updates) == 2


def test_no_optimizer_applies_gradients_that_are_not_finite() -> None:
    def spoiled() -> Any:
        model = net()
        optimizers = sgd_and_adamw(model)
        wrapped = er.AdaptiveDataParallel(model, optimizers, scaling_rule="none", nonfinite="skip")
        for _ in er.remaining_epochs_until(1):
            for step, (x, y) in enumerate(er.AdaptiveDataLoader(data(), batch_size=BATCH, shuffle=False)):
                before = [p.detach().clone() for p in model.parameters()]
                one_step(wrapped, model, optimizers, optimizers, x * (torch.nan if step == 2 else 1), y)
                same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                assert same == (step == 2)

    run_job(spoiled, first=(1, 2))


def test_one_scaler_for_several_optimizers() -> None:
    def scaled() -> Any:
        model = net()
        optimizers = sgd_and_adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        wrapped = er.AdaptiveDataParallel(model, optimizers, grad_scaler=scaler, scaling_rule="none")
        for _ in er.remaining_epochs_until(1):
            for step, (x, y) in enumerate(er.AdaptiveDataLoader(data(), batch_size=BATCH, shuffle=False)):
                for each in optimizers:
                    each.zero_grad()
                loss = nn.functional.cross_entropy(wrapped(x), y) * (torch.inf if step == 2 else 1)
                scaler.scale(loss).backward()
                for each in optimizers:
                    scaler.unscale_(each)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                for each in optimizers:
                    scaler.step(each)
                scaler.update()
        return scaler.get_scale(), [p.detach().clone() for p in model.parameters()]

    (first, one), (second, other) = run_job(scaled, first=(1, 2)).results.values()
    assert first == second == 4.0 / 2 * 2  # halved in step 2, doubled three steps later
    assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(one, other, strict=True))


class ScheduleFree(torch.optim.Optimizer):
    """As schedulefree's SGD: z steps, the model holds a point between z and its mean; eval() shows the mean."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0, "training": True})

    def _switch(self, weight: float, *, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                group["training"] = training
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], weight)

    def train(self) -> None:
        self._switch(0.1, training=True)

    def eval(self) -> None:
        self._switch(1 - 1 / 0.9, training=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"]
            share = 1 / (group["k"] + 1)
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, share).add_(p.grad, alpha=group["lr"] * (0.9 * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def _train_schedule_free(strategy: str = "all_reduce") -> list[Tensor]:
    model = net()
    optimizer = ScheduleFree(model.parameters())
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
    for _ in er.remaining_epochs_until(EPOCHS):
        optimizer.train()
        for x, y in er.AdaptiveDataLoader(data(), batch_size=BATCH, shuffle=False):
            one_step(wrapped, model, [optimizer], [optimizer], x, y)
        optimizer.eval()
    return [p.detach().clone() for p in model.parameters()]


def test_a_schedule_free_optimizer_keeps_its_state_whole() -> None:
    model = net()
    optimizer = ScheduleFree(model.parameters())
    for _ in range(EPOCHS):
        optimizer.train()
        for x, y in DataLoader(data(), batch_size=BATCH):
            one_step(model, model, [optimizer], [optimizer], x, y)
        optimizer.eval()
    for result in run_job(_train_schedule_free, SCRIPTS["grows and shrinks"], first=(1, 2)).results.values():
        for mine, theirs in zip(result, model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-5)
    with pytest.raises(er.sync.StrategyError, match=r"ScheduleFree switches parameters.*'all_reduce'"):
        _train_schedule_free("zero1")


class Sam(torch.optim.SGD):
    """As davda54/sam: two gradients a step."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad)
        self.zero_grad()
        closure()
        super().step()


def test_sam_is_refused() -> None:
    model = net()
    optimizer = Sam(model.parameters(), lr=0.1)
    er.AdaptiveDataParallel(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.randn(4, 4)).square().mean()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="Sam takes two gradients a step"):
        optimizer.step(closure)
    Sam.first_step = Sam.second_step = Sam.step  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="Sam takes two gradients a step"):
        er.AdaptiveDataParallel(net(), Sam(net().parameters(), lr=0.1))


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    model = net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model[3].parameters())]
    with pytest.raises(ValueError, match=r"3\.weight is in optimizer 0 and in optimizer 1"):
        er.AdaptiveDataParallel(model, optimizers)


def test_parameters_of_no_optimizer_are_refused() -> None:
    model = net()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[3].parameters())]
    with pytest.raises(ValueError, match=r"2 are missing.*AdaptiveDataParallel\(model, \[optimizer, other\]\)"):
        er.AdaptiveDataParallel(model, optimizers)


@pytest.mark.parametrize("optimizers", [[], {}, [None]])
def test_what_is_no_optimizer_is_refused(optimizers: Any) -> None:
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, or a list of several, but got"):
        er.AdaptiveDataParallel(net(), optimizers)


def test_a_tensor_without_a_model_is_averaged() -> None:
    def train() -> Tensor:
        temperature = nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([temperature], lr=0.1)
        er.AdaptiveDataParallel(nn.ParameterList([temperature]), optimizer, scaling_rule="none")
        for _ in er.remaining_epochs_until(1):
            for x, _ in er.AdaptiveDataLoader(data(), batch_size=BATCH, shuffle=False):
                optimizer.zero_grad()
                (x - temperature).square().mean().backward()
                optimizer.step()
        return temperature.detach().clone()

    (alone,) = run_job(train).results.values()
    assert alone.abs().sum() > 0
    for found in run_job(train, [Change(2, (1, 2, 3)), Kill(5, 2, "backward")]).results.values():
        torch.testing.assert_close(found, alone)
