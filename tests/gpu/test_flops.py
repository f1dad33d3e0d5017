"""Operations of a model on its device, counted while it trains: eager, and compiled inside the wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.parallel.flops import TrainingFlops

WIDTH, LENGTH, SAMPLES = 64, 16, 8


class Attention(nn.Module):
    """A layer whose attention is one of torch's fused operations."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of four heads, in half precision."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        mixed: torch.Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed


def counted(model: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> float | None:
    """Operations of a sample, forward and backward, as a run of a few steps counts them."""
    monkeypatch.setattr("elastic_ray.parallel.wrapper.flops_on", lambda _: TrainingFlops(1.0))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(4 * SAMPLES, LENGTH, WIDTH))
    for _ in er.remaining_epochs_until(2):
        for (x,) in er.AdaptiveDataLoader(data, batch_size=SAMPLES):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                wrapped(x.to(device)).square().mean().backward()
            optimizer.step()
    return current_session().registry.take_peak_s()


@pytest.mark.parametrize("style", ["eager", "compiled", "fullgraph"])
def test_training_counts_operations_and_stays_compiled(
    style: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    compiled = CompileCounterWithBackend("aot_eager")
    model: Any = Attention()
    if style != "eager":
        model = torch.compile(model, backend=compiled, fullgraph=style == "fullgraph")
    found = counted(model, device, monkeypatch)
    projections = 2 * LENGTH * WIDTH * (3 * WIDTH + WIDTH)
    attention = 2 * 2 * LENGTH * LENGTH * WIDTH if device.type == "cuda" else 0  # torch has no formula for the CPU's
    assert found is not None and 2 * projections + attention <= found <= 3 * (projections + attention)
    assert compiled.frame_count == (0 if style == "eager" else 1)
