"""The noise of one worker on its device: two halves of a batch, under AMP, clipping and ``torch.compile``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.loop.api import current_session

BATCH, STEPS, WIDTH = 32, 40, 64
KINDS = ("plain", "clipped", "scaled", "autocast", "compiled")


def rows() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1024, WIDTH, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, :4] + torch.randn(1024, 4, generator=generator)).argmax(1))


def compared(kind: str, device: torch.device) -> tuple[int, float]:
    """Number of halved steps, and the largest error of an estimate beside one from the halves by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=kind == "scaled")
    wrapped: Any = er.AdaptiveDataParallel(model, optimizer, grad_scaler=scaler if kind == "scaled" else None)
    called: Any = torch.compile(wrapped) if kind == "compiled" else wrapped
    loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=0)
    loader.autoscale_batch_size(2 * BATCH)
    current_session().registry.need_halves()
    dtype = torch.float16 if kind == "scaled" and device.type == "cuda" else torch.bfloat16
    mixed = kind in ("scaled", "autocast")

    def loss_of(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=mixed):
            return nn.functional.cross_entropy(net(x.to(device)), y.to(device))

    halved, worst, halves = 0, 0.0, list[list[torch.Tensor]]()
    for _ in er.remaining_epochs_until(100):
        for x, y in loader:
            step: Any = current_session().ledger.outermost
            if step.halved:
                by_hand = torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
                halves.append([each.double() for each in by_hand])
            optimizer.zero_grad()
            scaler.scale(loss_of(called, x, y)).backward()
            if kind == "clipped":
                nn.utils.clip_grad_norm_(wrapped.parameters(), 0.01)
            pending = wrapped._tracker._pending
            if step.halved and step.is_last_micro:
                assert pending is not None
                signal = sum(float((a * b).sum()) for a, b in zip(*halves, strict=True))
                size = sum(float(a.square().sum() + b.square().sum()) / 2 for a, b in zip(*halves, strict=True))
                [found] = pending.estimates
                signal += found.var * BATCH / 1024  # samples are drawn without replacement
                worst, halved, halves = max(worst, abs(found.sqr - signal) / size), halved + 1, []
            scaler.step(optimizer)
            scaler.update()
        if current_session().progress.steps >= STEPS:
            break
    return halved, worst


@pytest.mark.parametrize("kind", KINDS)
def test_halves_tell_the_noise(kind: str, device: torch.device) -> None:
    if kind == "compiled" and device.type == "cpu":
        pytest.skip("a compiler for CPUs takes minutes")
    halved, worst = compared(kind, device)
    assert halved >= 8
    assert worst < (0.02 if kind in ("scaled", "autocast") else 1e-4)


def kept_after_steps(adapts: bool, device: torch.device, *, halves: bool = True) -> int:
    """Bytes that are allocated between two steps, without gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4096), nn.ReLU(), nn.Linear(4096, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=0)
    if adapts:
        loader.autoscale_batch_size(2 * BATCH)
        if halves:
            current_session().registry.need_halves()
    before = torch.cuda.memory_allocated(device)
    for _ in er.remaining_epochs_until(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x.to(device)), y.to(device)).backward()
            optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(device) - before


def test_no_copy_of_a_gradient_outlives_its_step(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("torch does not count memory of CPUs")
    params = 4 * (WIDTH * 4096 + 4096 + 4 * 4096 + 4)
    assert kept_after_steps(False, device) < 0.1 * params
    assert kept_after_steps(True, device) < 0.1 * params  # the first half's is let go after the step
    assert kept_after_steps(True, device, halves=False) < 0.1 * params


if __name__ == "__main__":  # where pytest's other fixtures cannot be imported
    cuda = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for kind in KINDS[: None if cuda.type == "cuda" else -1]:
        print(kind, compared(kind, cuda), flush=True)
    if cuda.type == "cuda":
        print("bytes kept", kept_after_steps(False, cuda), kept_after_steps(True, cuda))
