"""What the trials of these tests train: code written for NNI, or for elastic_ray, inside an elastic train loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

QUALITY = {"quality": {"_type": "uniform", "_value": [0.1, 2.0]}}


def batch(*parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A search space of NNI's Batch tuner, which tries these in turn."""
    return {"all": {"_type": "choice", "_value": list(parameters)}}


def for_nni() -> None:
    """As people write it for NNI; ``parameters`` are those of :func:`scores`, and ``raises``."""
    import nni

    parameters = nni.get_next_parameter()
    score = 0.0
    for score in scores(parameters):
        nni.report_intermediate_result({"default": score, "half": score / 2} if parameters.get("more") else score)
        if parameters.get("raises"):
            raise KeyError(f"the user's own mistake in trial {nni.get_sequence_id()}")
    nni.report_final_result(score)


def for_elastic_ray(config: dict[str, Any]) -> None:
    """As people write it for elastic_ray; without ``final`` the last report is the result."""
    import elastic_ray as er

    for score in scores(config):
        er.report({"score": score, "missing": 0.0} if not config.get("forgets") else {"missing": 0.0})


def scores(parameters: Mapping[str, Any]) -> Iterator[float]:
    """Train a linear model; yields the sum of ``quality`` so far after each epoch.

    ``parameters``: quality, epochs or NNI's TRIAL_BUDGET, pause_s, NNI's load_checkpoint_dir and save_checkpoint_dir.
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
    saved = Path(parameters.get("load_checkpoint_dir", "nowhere")) / "score"
    if saved.exists():
        score = float(saved.read_text())
    for _ in er.remaining_epochs_until(int(parameters.get("TRIAL_BUDGET", parameters.get("epochs", 4)))):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            time.sleep(parameters.get("pause_s", 0.01))  # a trial long enough to be judged
        score += parameters["quality"]
        yield score
    if "save_checkpoint_dir" in parameters and er.get_context().get_world_rank() == 0:
        folder = Path(parameters["save_checkpoint_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "score").write_text(str(score))
