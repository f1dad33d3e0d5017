"""Gradient statistics with torch: the same for any cut of a batch, preconditioned as the optimizer is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from elastic_ray.batch.noise_scale import estimate, estimate_groups
from elastic_ray.batch.statistics import (
    BucketPreconditioner,
    PairNorms,
    SuccessiveGradients,
    is_adam_like,
    preconditioner,
    squared_norm,
)
from placement.goodput.model import NoiseScale

torch.set_num_threads(1)
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params),
    "nadam": lambda params: torch.optim.NAdam(params),
    "radam": lambda params: torch.optim.RAdam(params),
    "adamax": lambda params: torch.optim.Adamax(params),
    "rmsprop": lambda params: torch.optim.RMSprop(params),
    "rmsprop_centered": lambda params: torch.optim.RMSprop(params, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params),
}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4))


def flat_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([grad.reshape(-1) for grad in grads])


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, 20, generator=generator)
    return x, torch.randint(0, 4, (size,), generator=generator)


def norms(model: nn.Module, replicas: int, micro: int, precond: Tensor | None) -> tuple[Tensor, Tensor]:
    """(a, b) as a job of that shape computes them: each replica on its share, then averages over replicas."""
    x, y = batch(64)
    local, means = [], []
    for xs, ys in zip(x.chunk(replicas), y.chunk(replicas), strict=True):
        grads = [flat_gradient(model, *mb) for mb in zip(xs.chunk(micro), ys.chunk(micro), strict=True)]
        local.append(torch.stack([squared_norm(grad, precond) for grad in grads]).mean())
        means.append(torch.stack(grads).mean(0))
    reduced = torch.stack(means).mean(0)
    return torch.stack(local).mean(), squared_norm(reduced, precond)


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("replicas, micro", [(8, 1), (4, 2), (2, 4)])
def test_replicas_times_micro_batches_equal_one_process(replicas: int, micro: int, preconditioned: bool) -> None:
    model = net()
    precond = None
    if preconditioned:
        precond = torch.rand(sum(p.numel() for p in model.parameters())) * 100
    spread, alone = norms(model, replicas, micro, precond), norms(model, 1, 8, precond)
    for got, want in zip(spread, alone, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=0)
    several, one = (
        estimate(mean_sq_norm=float(a), sq_norm_of_mean=float(b), samples=8, scale=2.0) for a, b in (spread, alone)
    )
    assert several.sqr == pytest.approx(one.sqr, rel=1e-3)
    assert several.var == pytest.approx(one.var, rel=1e-3)


def test_squared_norm_is_one_number_on_the_device_in_float32() -> None:
    flat = torch.full((1000,), 300.0, dtype=torch.float16)  # 300^2 overflows half precision
    result = squared_norm(flat)
    assert (result.shape, result.dtype) == (torch.Size([]), torch.float32)
    assert float(result) == pytest.approx(9e7)
    assert float(squared_norm(torch.ones(4), torch.full((4,), 0.5))) == 1.0


# --- preconditioning ---


def trained(name: str, steps: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(64)
        nn.functional.cross_entropy(model(x + step), y).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_preconditioner_is_laid_out_like_the_bucket(name: str) -> None:
    model, optimizer = trained(name, 10)
    params = list(reversed(list(model.parameters())))
    flat = preconditioner(optimizer, params)
    assert flat is not None
    assert flat.shape == (sum(p.numel() for p in params),)
    assert torch.isfinite(flat).all()
    assert (flat > 0).all()
    pieces = [preconditioner(optimizer, [param]) for param in params]
    assert torch.equal(flat, torch.cat([piece for piece in pieces if piece is not None]))
    assert is_adam_like(optimizer)


def test_preconditioner_is_what_adam_divides_by() -> None:
    """With beta1 = 0 Adam's step is lr x precond x gradient."""
    param = nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.Adam([param], lr=0.5, betas=(0.0, 0.99))
    for _ in range(7):
        param.grad = torch.randn(6, generator=torch.Generator().manual_seed(1)) + 2
        before = param.detach().clone()
        optimizer.step()
    precond = preconditioner(optimizer, [param])
    assert precond is not None
    assert param.grad is not None
    torch.testing.assert_close(before - param.detach(), 0.5 * precond * param.grad)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fresh_state_is_the_identity(name: str) -> None:
    model, optimizer = trained(name, 2)
    assert preconditioner(optimizer, list(model.parameters())) is None


def test_plain_and_unlike_optimizers_have_none() -> None:
    model = net()
    x, y = batch(8)
    for optimizer in (
        torch.optim.SGD(model.parameters(), momentum=0.9),
        torch.optim.Adadelta(model.parameters()),
    ):
        for _ in range(6):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert not is_adam_like(optimizer)
        assert preconditioner(optimizer, list(model.parameters())) is None


def test_a_coordinate_that_never_had_a_gradient_does_not_drown_the_others() -> None:
    param = nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.Adam([param])
    for _ in range(10):
        param.grad = torch.ones(100)
        param.grad[0] = 0.0
        optimizer.step()
    precond = preconditioner(optimizer, [param])
    assert precond is not None
    assert float(precond[0]) <= 1.1e3 * float(precond[1])


def test_mixed_buckets_hold_ones_for_parameters_without_state() -> None:
    model, optimizer = trained("adam", 10)
    stranger = nn.Parameter(torch.zeros(3))
    flat = preconditioner(optimizer, [stranger, *model.parameters()])
    assert flat is not None
    assert flat[:3].tolist() == [1.0, 1.0, 1.0]
    assert flat[3:].min() > 1.0


def test_preconditioner_is_kept_between_refreshes() -> None:
    model, optimizer = trained("adam", 10)
    bucket = BucketPreconditioner(interval=4)
    compute = lambda: preconditioner(optimizer, list(model.parameters()))  # noqa: E731
    first = bucket.at(8, compute)
    x, y = batch(8)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert bucket.at(11, compute) is first
    assert bucket.at(12, compute) is not first
    again = bucket.at(13, compute)
    bucket.invalidate()
    assert bucket.at(13, compute) is not again


# --- successive gradients ---


def feed(pairs: SuccessiveGradients, gradients: list[Tensor], **changes: object) -> list[PairNorms]:
    taken = []
    for step, flat in enumerate(gradients):
        pairs.add(step, 0, flat, batch_size=16, **changes)  # type: ignore[arg-type]
        taken.append(pairs.take())
    return [norm for norm in taken if norm is not None]


def test_pairs_are_unbiased_on_gaussian_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(200, generator=generator)
    taken = feed(
        SuccessiveGradients(every=2),
        [mean + 3.0 * torch.randn(200, generator=generator) / 4 for _ in range(4000)],
    )
    assert len(taken) == 2000
    estimates = [norm.estimates(init_batch_size=8) for norm in taken]
    groups = [groups[0] for groups in estimates if groups is not None]
    assert sum(g.sqr for g in groups) / 2000 == pytest.approx(float(mean @ mean), rel=0.02)
    assert sum(g.var for g in groups) / 2000 == pytest.approx(200 * 9 / 8, rel=0.02)


def test_only_consecutive_steps_of_one_batch_size_pair() -> None:
    one = torch.ones(4)
    pairs = SuccessiveGradients(every=4)
    assert [pairs.wants(step) for step in range(6)] == [True, True, False, False, True, True]
    assert len(feed(pairs, [one] * 9)) == 2
    pairs = SuccessiveGradients(every=4)
    pairs.add(0, 0, one, batch_size=16)
    pairs.add(1, 0, one, batch_size=32)  # the batch changed
    assert pairs.take() is None
    pairs.add(4, 0, one, batch_size=16)
    pairs.add(9, 0, one, batch_size=16)  # steps in between are missing
    assert pairs.take() is None
    pairs.add(12, 0, one, batch_size=16)
    pairs.reset()
    pairs.add(13, 0, one, batch_size=16)
    assert pairs.take() is None


def test_buckets_add_up_per_group_and_the_kept_copy_is_its_own() -> None:
    pairs = SuccessiveGradients(groups=2, every=2)
    flat = torch.tensor([1.0, 2.0])
    for bucket, group in ((0, 0), (1, 1), (2, 1)):
        pairs.add(0, bucket, flat, batch_size=16, group=group)
    flat.copy_(torch.tensor([3.0, 0.0]))  # engines reuse their buckets
    for bucket, group in ((0, 0), (1, 1), (2, 1)):
        pairs.add(1, bucket, flat, batch_size=16, group=group, precond=torch.tensor([2.0, 1.0]))
    norm = pairs.take()
    assert norm is not None
    assert norm.sums.tolist() == [[8.0, 36.0, 12.0], [16.0, 72.0, 24.0]]
    # 4 (1, 3) . (1, 3): scale 2 of each; sqr = dot, var = half the squared difference x scale.
    assert norm.estimates(8) == (NoiseScale(sqr=12, var=20), NoiseScale(sqr=24, var=40))


@pytest.mark.parametrize("on_device", [False, True])
def test_the_loss_scale_is_divided_out_also_when_it_changes_in_between(on_device: bool) -> None:
    pairs = SuccessiveGradients(every=2)
    scale = torch.tensor(1024.0)
    flat = torch.tensor([1.0, 2.0])
    pairs.add(0, 0, flat * 1024, batch_size=16, grad_scale=scale if on_device else 1024.0)
    scale.fill_(512.0)  # as GradScaler.update does
    pairs.add(1, 0, flat * 512, batch_size=16, grad_scale=scale if on_device else 512.0)
    norm = pairs.take()
    assert norm is not None
    assert norm.sums.tolist() == [[5.0, 5.0, 5.0]]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflowed_gradient_leaves_no_estimate(bad: float) -> None:
    ok, overflowed = torch.ones(4), torch.tensor([1.0, bad, 1.0, 1.0])
    for gradients in ([ok, overflowed], [overflowed, ok]):
        (norm,) = feed(SuccessiveGradients(every=2), gradients)
        assert norm.estimates(8) is None
    a = float(squared_norm(overflowed))
    assert estimate_groups(mean_sq_norms=[a], sq_norms_of_mean=[1.0], samples=2, scale=1.0) is None


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="every must be 2 or more"):
        SuccessiveGradients(every=1)
    with pytest.raises(ValueError, match="groups must be 1 or more"):
        SuccessiveGradients(groups=0)
    with pytest.raises(ValueError, match="interval must be 1 or more"):
        BucketPreconditioner(interval=0)
