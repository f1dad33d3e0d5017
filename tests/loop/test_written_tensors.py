"""Tensors that forward passes write to: of any kind, and those that have not changed are left alone."""

from __future__ import annotations

import pytest
import torch

from elastic_ray.parallel.buffers import WrittenTensors


@pytest.mark.parametrize("kind", ["inference", "sparse", "expanded", "dense"])
def test_buffers_of_any_kind_survive_lost_steps(kind: str) -> None:
    model = torch.nn.Module()
    with torch.inference_mode(kind == "inference"):
        held = torch.eye(4)
    held = held.to_sparse() if kind == "sparse" else held[:1].expand(4, 4) if kind == "expanded" else held
    model.register_buffer("held", held)
    written = WrittenTensors(model)
    for _ in range(5):
        before = written.remember()
        written.roll_back(before)
    assert model.get_buffer("held") is held


def test_unchanged_tensors_keep_their_counters() -> None:
    """Else a graph from before the lost pass could not be gone through any more."""
    model = torch.nn.Module()
    model.register_buffer("scale", torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    loss = (x * model.get_buffer("scale")).sum()
    written = WrittenTensors(model)
    written.roll_back(written.remember())
    loss.backward()
    assert x.grad is not None
