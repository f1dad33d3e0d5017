"""User code that knows nothing of micro-steps: clipping, schedulers, AMP, GANs give what they give without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from elastic_ray.loop.api import current_session
from elastic_ray.monitoring import Monitor
from tests.loop.ranks import Ranks

SAMPLES, BATCH, EPOCHS = 24, 8, 3


def rows() -> torch.utils.data.TensorDataset:
    """Fixed rows."""
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    )


def net() -> nn.Module:
    """The same small model each time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def loader_of(micro: int | None) -> er.AdaptiveDataLoader:
    """Batches of 8; with `micro`, in pieces of so many samples."""
    loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3)
    if micro is not None:
        loader.autoscale_batch_size(SAMPLES, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    return loader


def weights(*models: nn.Module) -> Tensor:
    """All parameters, flat."""
    return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


def clipped_and_scheduled(micro: int | None, set_to_none: bool, per_epoch: bool) -> tuple[Tensor, list[float], int]:
    """Clip, step a scheduler with each batch and perhaps one with each epoch; rates seen at each epoch's end."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedulers: list[Any] = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)]
    if per_epoch:
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    wrapped = er.AdaptiveDataParallel(model, optimizer, schedulers)
    loader, rates = loader_of(micro), []
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=set_to_none)
            nn.functional.cross_entropy(wrapped(x), y).backward()
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.05)
            optimizer.step()
            schedulers[0].step()
        for scheduler in schedulers[1:]:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return weights(model), rates, current_session().progress.steps


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("world", [None, 2])
@pytest.mark.parametrize("per_epoch", [False, True])
def test_clipping_and_schedulers_see_optimizer_steps(
    ranks: Ranks, world: int | None, set_to_none: bool, per_epoch: bool
) -> None:
    plain, rates, steps = ranks.run(clipped_and_scheduled, None, True, per_epoch)
    found = ranks.run(clipped_and_scheduled, 2, set_to_none, per_epoch, world=world)
    assert steps == 9
    for result in found if world else [found]:
        torch.testing.assert_close(result[0], plain)
        assert result[1] == pytest.approx(rates)
        assert result[2] == steps


def broken_off_in_a_micro_step(_: int) -> tuple[float, int]:
    """Leave the pass after its first micro-step; the epoch's scheduler must step all the same."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scheduler)
    loader = loader_of(2)
    for _ in er.remaining_epochs_until(2):
        for x, y in loader:
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            break
        scheduler.step()
    return optimizer.param_groups[0]["lr"], scheduler.last_epoch


@pytest.mark.thorough
def test_scheduler_steps_after_pass_that_was_left_within_accumulation(ranks: Ranks) -> None:
    assert ranks.run(broken_off_in_a_micro_step, 0) == (0.25, 2)


def scaled(
    micro: int | None, init_scale: float, epochs: int = EPOCHS, monitor: Monitor | None = None
) -> dict[str, Any]:
    """AMP's usual lines, on the CPU; gradients overflow while the loss scale is above 2**16."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=4)
    wrapped = er.AdaptiveDataParallel(model, optimizer, grad_scaler=scaler, monitor=monitor)
    loader = loader_of(micro)
    for _ in er.remaining_epochs_until(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wrapped(x), y)
            if scaler.get_scale() > 2.0**16:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    noise = wrapped.noise_scale
    return {
        "weights": weights(model),
        "scale": scaler.get_scale(),
        "noise": None if noise is None else (noise.sqr, noise.var),
        "progress": wrapped.scale_invariant_steps,
        "steps": current_session().progress.steps,
        "state": scaler.state_dict(),
    }


@pytest.mark.thorough
def test_amp_without_overflow_is_training_without_amp(ranks: Ranks) -> None:
    plain = ranks.run(scaled, None, 1.0)
    for world, micro in ((None, 2), (2, None), (2, 2)):
        found = ranks.run(scaled, micro, 1024.0, world=world)
        for result in found if world else [found]:
            torch.testing.assert_close(result["weights"], plain["weights"])
            assert result["scale"] == 1024.0 * 4  # 9 steps without overflow, growth after each 4


def test_overflows_skip_whole_steps_alike_on_all_ranks(ranks: Ranks) -> None:
    alone = ranks.run(scaled, None, 2.0**20)
    assert alone["progress"] == 4  # four overflows, four steps, growth, another overflow
    assert torch.isfinite(alone["weights"]).all()
    for world, micro in ((None, 2), (2, None), (2, 2)):
        found = ranks.run(scaled, micro, 2.0**20, world=world)
        for result in found if world else [found]:
            assert (result["progress"], result["steps"]) == (4, 9)
            assert result["state"] == alone["state"]
            torch.testing.assert_close(result["weights"], alone["weights"])


@pytest.mark.parametrize(("world", "micro"), [(None, None), (None, 2), (2, None), (2, 2)])
def test_statistics_leave_out_steps_that_overflowed(ranks: Ranks, world: int | None, micro: int | None) -> None:
    # Overflows in steps 0-3, 8 and 13; alone without accumulation a step is halved where somebody asks for the noise.
    found = ranks.run(scaled, micro, 2.0**20, 6, Monitor(noise_every=1), world=world)
    for result in found if world else [found]:
        assert result["noise"] is not None
        assert all(0 < value < 10 for value in result["noise"])


def gan(micro: int | None, order: str) -> Tensor:
    """Two models and two optimizers; the generator's loss leaves gradients in the discriminator."""
    torch.manual_seed(5)
    g, d = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    opt_g, opt_d = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.Adam(d.parameters(), lr=0.01)
    wrapped_g, wrapped_d = er.AdaptiveDataParallel(g, opt_g), er.AdaptiveDataParallel(d, opt_d, scaling_rule="none")
    loss, loader = nn.functional.binary_cross_entropy_with_logits, loader_of(micro)

    def train_d(x: Tensor) -> None:
        opt_d.zero_grad()
        real = wrapped_d(x)
        loss(real, torch.ones_like(real)).backward()
        fake = wrapped_d(wrapped_g(x.flip(1)).detach())
        loss(fake, torch.zeros_like(fake)).backward()
        opt_d.step()

    def train_g(x: Tensor) -> None:
        opt_g.zero_grad()
        fake = wrapped_d(wrapped_g(x.flip(1)))
        loss(fake, torch.ones_like(fake)).backward()
        opt_g.step()

    for _ in er.remaining_epochs_until(EPOCHS):
        for x, _y in loader:
            for train in (train_d, train_g) if order == "d first" else (train_g, train_d):
                train(x)
    return weights(g, d)


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("order", ["d first", "g first"])
@pytest.mark.parametrize(("world", "micro"), [(None, None), (None, 2), (2, None), (2, 2)])
def test_gan_trains_as_with_gradients_added_up_by_hand(
    ranks: Ranks, order: str, world: int | None, micro: int | None
) -> None:
    wanted = gan_by_hand(world or 1, micro, order)
    found = ranks.run(gan, micro, order, world=world)
    for result in found if world else [found]:
        torch.testing.assert_close(result, wanted)


def gan_by_hand(world: int, micro: int | None, order: str) -> Tensor:
    """The same with torch alone: each micro-step's gradients at the parameters of its time, then two steps."""
    torch.manual_seed(5)
    models = {"g": nn.Linear(6, 6), "d": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))}
    g, d = models["g"], models["d"]
    optimizers = {
        "g": torch.optim.SGD(g.parameters(), lr=0.1),
        "d": torch.optim.Adam(d.parameters(), lr=0.01),
    }
    loss = nn.functional.binary_cross_entropy_with_logits
    for epoch in range(EPOCHS):
        indices = torch.from_numpy(IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:])
        for batch in indices.split(BATCH):
            shares = batch.view(world, -1)
            pieces = shares.split(micro or BATCH, dim=1)  # of each micro-step, over all ranks
            sums = {who: [torch.zeros_like(p) for p in models[who].parameters()] for who in models}
            for piece in pieces:
                x, _ = rows()[piece.reshape(-1)]
                for who in "dg" if order == "d first" else "gd":
                    fake = d(g(x.flip(1)) if who == "g" else g(x.flip(1)).detach())
                    total = loss(fake, torch.full_like(fake, float(who == "g")))
                    if who == "d":
                        total = total + loss(d(x), torch.ones(len(x), 1))
                    found = torch.autograd.grad(total / len(pieces), list(models[who].parameters()))
                    sums[who] = [a + b for a, b in zip(sums[who], found, strict=True)]
                    if piece is pieces[-1]:
                        for p, grad in zip(models[who].parameters(), sums[who], strict=True):
                            p.grad = grad
                        optimizers[who].step()
    return weights(g, d)
