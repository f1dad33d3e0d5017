"""Batch sizes that are declared by progress."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.run.current import set_session
from tests.loop.changing import Change, Kill, run_job

SAMPLES, EPOCHS = 64, 4
RAMP = [(0, 4), (0.25, 8), (0.5, 16)]


def train() -> tuple[list[int], list[int]]:
    """The global batch at each epoch's second step and how many samples each epoch had."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(5)))
    loader = er.AdaptiveDataLoader(data, batch_size=RAMP, seed=1)
    batches, samples = [], []
    for _ in er.remaining_epochs_until(EPOCHS):
        totals, found, first = er.Accumulator(), list[int](), er.get_context().get_global_step()
        for (x,) in loader:
            if er.get_context().get_global_step() == first + 1:
                found.append(loader.current_batch_size)  # of one worker's step there may be two halves
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            totals["samples"] += len(x)
        samples.append(int(totals["samples"]))
        batches += sorted(set(found))
    return batches, samples


def test_batch_is_declared_one_and_each_sample_counts_once() -> None:
    set_session(None)
    assert train() == ([4, 8, 16, 16], [SAMPLES] * EPOCHS)
    set_session(None)


@pytest.mark.parametrize("script", [[Change(10, (1, 2, 3, 4))], [Kill(12, 2, "backward")]])
def test_so_it_is_on_every_worker_whatever_happens(script: list[Any]) -> None:
    outcome = run_job(train, script, first=(1, 2))
    assert outcome.results[1] == ([4, 8, 16, 16], [SAMPLES] * EPOCHS)


def test_ramp_beyond_the_samples_of_an_epoch_is_refused() -> None:
    set_session(None)
    with pytest.raises(ValueError, match="max_batch_size must be at most an epoch's 64 samples"):
        er.AdaptiveDataLoader(
            torch.utils.data.TensorDataset(torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(5))),
            batch_size=[(0, 4), (0.5, 128)],
        )
    set_session(None)
