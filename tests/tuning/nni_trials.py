"""What the trials of these tests train: code written for NNI, inside an elastic train loop."""

from __future__ import annotations

import time
from typing import Any

SPACE = {"quality": {"_type": "choice", "_value": [0.1, 0.2, 0.5, 1.0]}}


def train() -> None:
    """A linear model; intermediate results are ``quality`` x epoch."""
    import nni

    parameters = nni.get_next_parameter()
    score = 0.0
    for score in scores(parameters):
        nni.report_intermediate_result(score)
    nni.report_final_result(score)


def scores(parameters: dict[str, Any]) -> Any:
    """Train; yields a score after each epoch.

    ``parameters``: quality, epochs, pause_s.
    """
    import torch

    import elastic_ray as er

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(data, batch_size=8)
    score = 0.0
    for _ in er.remaining_epochs_until(int(parameters.get("epochs", 4))):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            time.sleep(parameters.get("pause_s", 0.01))
        score += parameters["quality"]
        yield score
