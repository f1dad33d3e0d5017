"""A batch that adapts at a rate near the largest stable one.

Steps are as fast as a formula says, so that decisions are the same on any machine: 16 times the batch costs twice as
much, and only the gradient speaks against the largest batch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.run.current import set_session
from elastic_ray.standalone.session import StandaloneController, standalone_session

EPOCHS, BATCH, MOST, HELD_OUT = 12, 32, 512, 360
_LOOK_STEPS = 16


@functools.cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """Samples to train on, and those that are held out."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pixels / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    return TensorDataset(x[HELD_OUT:], y[HELD_OUT:]), TensorDataset(x[:HELD_OUT], y[:HELD_OUT])


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Each image moved by up to a pixel."""
    windows = nn.functional.pad(x.view(-1, 8, 8), (1, 1, 1, 1)).unfold(1, 8, 1).unfold(2, 8, 1).reshape(len(x), 9, 64)
    return windows[torch.arange(len(x)), torch.randint(0, 9, (len(x),))]


def trained(seed: int) -> tuple[float, int]:
    """Accuracy on what is held out, and the largest batch."""
    session = standalone_session()
    controller = session.controller
    assert isinstance(controller, StandaloneController)
    controller._session = None  # no thread looks at measurements in its own time
    set_session(session)
    try:
        torch.manual_seed(seed)
        convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()
        model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolutions, nn.Flatten(), nn.Linear(512, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        training, held_out = digits()
        loader = er.AdaptiveDataLoader(training, batch_size=BATCH, seed=seed)
        loader.autoscale_batch_size(MOST)
        largest, looked = BATCH, 0
        for _ in er.remaining_epochs_until(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                loss: Any = nn.functional.cross_entropy(wrapped(shifted(x)), y)
                loss.backward()
                optimizer.step()
                if session.progress.steps - looked >= _LOOK_STEPS:
                    looked = session.progress.steps
                    report = session.step_report()
                    assert report is not None
                    took_s = 0.005 * (0.967 + 0.00208 * report.batch_size)
                    controller.observe(dataclasses.replace(report, step_time=took_s, grad_time=took_s * 0.9))
                    largest = max(largest, report.batch_size)
        x, y = held_out.tensors
        with torch.no_grad():
            return float((model(x).argmax(1) == y).float().mean()), largest
    finally:
        session.membership.close(broken=False)
        set_session(None)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2))
def test_a_batch_that_adapts_does_not_destroy_a_run(seed: int) -> None:
    """Where noise reads as endless and nothing takes a growth back, both seeds end at 0.86."""
    accuracy, largest = trained(seed)
    assert accuracy > 0.9
    assert largest > BATCH, "it is no test where the batch stays"
