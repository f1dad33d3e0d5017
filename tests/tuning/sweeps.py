"""What the trials of these tests train."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
from ray import tune

import tuning


def train(config: dict[str, Any]) -> None:
    """A small net; reports ``score`` = ``quality`` x epoch after each epoch.

    ``config``: quality, epochs, pause_s, width (of the net), checkpoint (whether to report one), silent (report
    nothing), raise_at (epoch, once per trial folder ``once``), hold (a file that the second half of the epochs waits
    for).
    """
    import torch

    import elastic_ray as er

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    width = config.get("width", 1)
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.01))
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(data, batch_size=8)
    inherited, read_from = 0.0, ""
    if er.get_checkpoint() is not None:
        read_from = er.get_checkpoint().filesystem.type_name
        with er.get_checkpoint().as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(saved["model"])
        inherited = saved["score"]
    score = inherited
    for epoch in er.remaining_epochs_until(config.get("epochs", 4)):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            time.sleep(config.get("pause_s", 0.02))  # a trial long enough to be judged
        if "hold" in config and epoch == config["epochs"] // 2:
            _wait_for(Path(config["hold"]))
        score += config.get("quality", 1.0)
        if epoch == config.get("raise_at") and _first(config["once"]):
            raise KeyError("the user's own mistake")
        if config.get("silent"):
            continue
        metrics = {
            "score": score,
            "epoch": epoch,
            "inherited": inherited,
            "read_from": read_from,
            "process": os.getpid(),
        }
        if not config.get("checkpoint"):
            er.report(metrics)
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            if er.get_context().get_world_rank() == 0:
                torch.save({"model": model.state_dict(), "score": score}, Path(folder) / "state.pt")
            er.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} is not there after 60 s"
        time.sleep(0.02)


def _first(path: str) -> bool:
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def in_tune_words(config: dict[str, Any]) -> None:
    """Four epochs of nothing, reported as in a function of Ray Tune; raises once in epoch ``raise_at``."""
    import torch
    from ray import tune

    import elastic_ray as er

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(8, 1)), batch_size=4)
    resumed_from = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            resumed_from = int((Path(folder) / "epoch").read_text()) + 1
    for epoch in er.remaining_epochs_until(4):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        if epoch == config["raise_at"] and _first(config["once"]):
            raise KeyError("the user's own mistake")
        metrics = {
            "score": 1.0,
            "epoch": epoch,
            "resumed_from": resumed_from,
            "trial": tune.get_context().get_trial_id(),
        }
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            (Path(folder) / "epoch").write_text(str(epoch))
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


def trainable(*, loop: Any = train, workers: Any = (1, 2), **options: Any) -> Any:
    """One of the loops above as an elastic trainable."""
    scaling = ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"slot": 1})
    return tuning.elastic(loop, scaling_config=scaling, **{"sweep": "tests", **options})


def fit(folder: Path, space: dict[str, Any], *, elastic: Any = None, run: Any = None, **config: Any) -> Any:
    """A sweep to its end."""
    return tune.Tuner(
        elastic or trainable(),
        param_space=space,
        tune_config=tune.TuneConfig(**{"metric": "score", "mode": "max", "max_concurrent_trials": 4, **config}),
        run_config=tune.RunConfig(**{"storage_path": str(folder), "verbose": 0, **(run or {})}),
    ).fit()
