"""Reports of a train function that has not come to its loop."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import elastic_ray as er
from tests.loop.changing import run_job


@pytest.mark.parametrize("early", [0, 2])
def test_a_report_before_the_loop_is_told_once(early: int) -> None:
    def train() -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        for number in range(early):
            er.report({"number": number})
        for _ in er.remaining_epochs_until(1):
            for (x,) in er.AdaptiveDataLoader(TensorDataset(torch.ones(8, 1)), batch_size=4):
                optimizer.zero_grad()
                wrapped(x).sum().backward()
                optimizer.step()
            er.report({"number": early})

    told = [text for kind, text, _ in run_job(train, ()).told if kind == "warning"]
    assert len(told) == bool(early) and all("report() before its first epoch" in text for text in told)
