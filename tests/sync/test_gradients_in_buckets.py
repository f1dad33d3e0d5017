"""Gradients lie in the buckets that reduce them, and user code sees of that no more than a tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.loop.api import current_session
from tests.loop.changing import run_job
from tests.loop.ranks import leave_torch_group
from tests.sync.sharded_parameters.live import Live

BATCH, STEPS, WIDTH = 8, 8, 160
Step = Callable[[nn.Module, nn.Module, torch.optim.Optimizer, Tensor], object]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def plain(wrapped: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    wrapped(x).square().mean().backward()
    optimizer.step()


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 1024, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (5, 32)), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))


def trained(
    step: Step, world_size: int, build: Callable[[], nn.Module] = net
) -> tuple[list[list[Tensor]], list[object], Live]:
    """Each rank's parameters after some steps, what the first rank's ``step`` returned, and its memory."""
    ends, told, live = [], [], Live()

    def train() -> None:
        data = torch.utils.data.TensorDataset(
            torch.randn(BATCH * STEPS, WIDTH, generator=torch.Generator().manual_seed(3))
        )
        first = current_session().worker == "w1"
        with live if first else Live():
            module = build()
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-3)
            wrapped = er.AdaptiveDataParallel(module, optimizer, scaling_rule="none")
            for _ in er.remaining_epochs_until(1):
                for (x,) in er.AdaptiveDataLoader(data, batch_size=BATCH):
                    found = step(wrapped, module, optimizer, x)
                    if first:
                        told.append(found)
        ends.append([p.detach().clone() for p in module.parameters()])

    run_job(train, first=range(1, world_size + 1))
    return ends, told, live


def test_two_ranks_hold_gradients_once() -> None:
    """As DDP with ``gradient_as_bucket_view``: parameters, gradients, two moments, and a layer on its way."""
    size = sum(p.nbytes for p in net().parameters())
    _, _, live = trained(plain, 2)
    assert live.peak < 4.6 * size


def peak_under_ddp(store: Path) -> int:
    """Most bytes alive of one of two ranks with the transformer, in a group of one, which reduces all the same."""
    live = Live()
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        with live:
            module = transformer()
            optimizer = torch.optim.AdamW(module.parameters())
            wrapped = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
            for _ in range(STEPS):
                plain(wrapped, module, optimizer, torch.randn(BATCH // 2, WIDTH))
    finally:
        leave_torch_group()
    return live.peak


@pytest.mark.thorough
def test_the_peak_of_two_ranks_is_that_of_ddp(tmp_path: Path) -> None:
    _, _, live = trained(plain, 2, transformer)
    assert live.peak <= 1.02 * peak_under_ddp(tmp_path / "store")


def kept(wrapped: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
    plain(wrapped, module, optimizer, x)
    grad = next(module.parameters()).grad
    assert grad is not None
    return grad.detach(), grad.clone()


def test_a_gradient_that_user_code_keeps_stays() -> None:
    _, told, _ = trained(kept, 2)
    assert len(told) == STEPS
    assert all(torch.equal(*pair) for pair in told)


def zeroed(wrapped: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    wrapped(x).square().mean().backward()
    optimizer.step()


def own(wrapped: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> bool:
    """User code gives gradients memory of its own, as one flat tensor; whether they stay there."""
    params = list(module.parameters())
    flat = torch.zeros(sum(p.numel() for p in params))
    for p, piece in zip(params, torch.split(flat, [p.numel() for p in params]), strict=True):
        p.grad = piece.view(p.shape)
    wrapped(x).square().mean().backward()
    optimizer.step()
    return torch.equal(flat, torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None]))


def twice(wrapped: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Two losses, one after the other."""
    optimizer.zero_grad()
    loss = wrapped(x).square().mean() / 2
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def local_first(wrapped: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss = wrapped(x).square().mean() / 2
    with wrapped.no_sync():
        loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("step", [plain, zeroed, own, twice, local_first], ids=lambda step: step.__name__)
def test_two_ranks_train_as_one(step: Step) -> None:
    (one,), _, _ = trained(plain, 1)
    ends, told, _ = trained(step, 2)
    assert told[0] in (None, True) and len(set(map(str, told))) == 1
    for end in ends:
        torch.testing.assert_close(end, one, rtol=1e-4, atol=1e-5)


def test_gradients_keep_another_memory_format() -> None:
    strides: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def train() -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1)).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(module.parameters())
        wrapped = er.AdaptiveDataParallel(module, optimizer)
        data = torch.utils.data.TensorDataset(torch.randn(24, 3, 4, 4))
        for _ in er.remaining_epochs_until(1):
            for (x,) in er.AdaptiveDataLoader(data, batch_size=BATCH):
                plain(wrapped, module, optimizer, x.to(memory_format=torch.channels_last))
                weight = next(module.parameters())
                assert weight.grad is not None
                strides.append((weight.stride(), weight.grad.stride()))

    run_job(train, first=(1, 2))
    assert all(ours == theirs for ours, theirs in strides) and strides
