"""Gradient statistics with torch: the same for any cut of a batch, preconditioned as the optimizer is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_ray.sync.preconditioners import (
    LEAST_PART,
    BucketPreconditioner,
    is_adam_like,
    preconditioner,
    squared_norm,
)
from elastic_ray.sync.statistics.noise import NoiseTracker
from elastic_ray.sync.statistics.noise_scale import estimate, estimate_groups

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


def test_squared_norm_is_one_float32_number_on_the_device() -> None:
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


def elements(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> Tensor:
    """What the gradient's elements are multiplied with: each by itself."""
    found = preconditioner(optimizer, params)
    assert found is not None
    size = sum(p.numel() for p in params)
    return torch.stack([found.squared_norm(each) for each in torch.eye(size)]).sqrt()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_preconditioner_is_laid_out_like_the_bucket(name: str) -> None:
    model, optimizer = trained(name, 10)
    params = list(reversed(list(model.parameters())))
    flat = elements(optimizer, params)
    assert torch.isfinite(flat).all()
    assert (flat > 0).all()
    assert torch.equal(flat, torch.cat([elements(optimizer, [param]) for param in params]))
    assert is_adam_like(optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_preconditioner_is_the_same_made_in_small_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(name, 10)
    params = list(model.parameters())
    whole = preconditioner(optimizer, params)
    monkeypatch.setattr("elastic_ray.sync.preconditioners.LEAST_AT_ONCE", 7)
    pieces = preconditioner(optimizer, params)
    assert whole is not None
    assert pieces is not None
    gradient = torch.randn(sum(p.numel() for p in params), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(pieces.squared_norm(gradient), whole.squared_norm(gradient))
    state = {key: value.clone() for key, value in optimizer.state[params[0]].items()}
    rest = whole.squared_norm(gradient[:10]) + whole.squared_norm(gradient[10:], 10)
    torch.testing.assert_close(rest, whole.squared_norm(gradient))
    assert all(torch.equal(value, state[key]) for key, value in optimizer.state[params[0]].items())


def test_preconditioner_is_what_adam_divides_by() -> None:
    """With beta1 = 0 Adam's step is lr x precond x gradient."""
    param = nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.Adam([param], lr=0.5, betas=(0.0, 0.99))
    for _ in range(7):
        param.grad = torch.randn(6, generator=torch.Generator().manual_seed(1)) + 2
        before = param.detach().clone()
        optimizer.step()
    precond = elements(optimizer, [param])
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


def test_a_coordinate_without_gradients_does_not_drown_the_others() -> None:
    param = nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.Adam([param])
    for _ in range(10):
        param.grad = torch.ones(100)
        param.grad[0] = 0.0
        optimizer.step()
    precond = elements(optimizer, [param])
    assert float(precond[0]) <= 1.1 / LEAST_PART * float(precond[1])


def test_mixed_buckets_hold_ones_for_parameters_without_state() -> None:
    model, optimizer = trained("adam", 10)
    stranger = nn.Parameter(torch.zeros(3))
    flat = elements(optimizer, [stranger, *model.parameters()])
    assert flat[:3].tolist() == [1.0, 1.0, 1.0]
    assert flat[3:].min() > 1.0


def test_preconditioner_follows_the_state_between_looks_at_it() -> None:
    model, optimizer = trained("adam", 10)
    bucket, params = BucketPreconditioner(), list(model.parameters())
    gradient = torch.ones(sum(p.numel() for p in params))
    bucket.at(10, lambda: preconditioner(optimizer, params))
    for _ in range(3):
        nn.functional.cross_entropy(model(batch(8)[0]), batch(8)[1]).backward()
        optimizer.step()
    fresh = preconditioner(optimizer, params)
    assert fresh is not None
    later = bucket.at(13, lambda: fresh)
    torch.testing.assert_close(later.squared_norm(gradient), fresh.squared_norm(gradient), rtol=1e-2, atol=0)


def test_preconditioner_is_kept_between_refreshes() -> None:
    model, optimizer = trained("adam", 10)
    bucket = BucketPreconditioner()
    compute = lambda: preconditioner(optimizer, list(model.parameters()))  # noqa: E731
    first = bucket.at(40, compute)
    x, y = batch(8)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert bucket.at(47, compute) is first
    assert bucket.at(48, compute) is not first
    again = bucket.at(49, compute)
    bucket.invalidate()
    assert bucket.at(49, compute) is not again


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflowed_gradient_leaves_no_estimate(bad: float) -> None:
    norm = float(squared_norm(torch.tensor([1.0, bad, 1.0, 1.0])))
    assert estimate_groups(mean_sq_norms=[norm], sq_norms_of_mean=[1.0], samples=2, scale=1.0) is None


@dataclasses.dataclass
class Source:
    """Several optimizers, all of whose state is at hand and one of which is of Adam's kind."""

    idle: bool = True
    adam_like: bool = True
    outdated: bool = False
    state: Mapping[Any, Any] = dataclasses.field(default_factory=dict)


def test_kind_of_several_optimizers_is_that_of_any() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    first = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    tracker = NoiseTracker(first, 1)
    tracker.source = Source()
    tracker.learn_kind()
    assert tracker.adam_like is None, "nothing has stepped"
    first.step()
    tracker.learn_kind()
    assert tracker.adam_like is True
