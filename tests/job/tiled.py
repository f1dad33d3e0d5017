"""A train function whose workers write down how they trained, to compare strategies bit by bit."""

from __future__ import annotations

from typing import Any


def train(config: dict[str, Any]) -> None:
    """``config``: strategy, optimizer, epochs; ``adapt``: options of ``autoscale_batch_size``."""
    import time

    import torch

    import elastic_ray as er
    from tests.sync.tiles.trained import OPTIMIZERS, Net, data

    torch.set_num_threads(1)
    model = Net()
    optimizer = OPTIMIZERS[config["optimizer"]](model.parameters())
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=config["strategy"])
    loader = er.AdaptiveDataLoader(data(), batch_size=12, seed=3, drop_last=True)
    if "adapt" in config:
        loader.autoscale_batch_size(**config["adapt"])
    for epoch in er.remaining_epochs_until(int(config["epochs"])):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(wrapped(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            time.sleep(float(config.get("pause_s", 0.02)))  # a job long enough for what is done to it
        if er.get_context().get_world_rank() == 0:
            state = optimizer.state_dict()["state"]
            er.report(
                {
                    "epoch": epoch,
                    "workers": er.get_context().get_world_size(),
                    "weights": [p.detach().flatten().tolist() for p in model.parameters()],
                    "moments": [
                        value.flatten().tolist()
                        for index in sorted(state)
                        for value in state[index].values()
                        if torch.is_tensor(value)
                    ],
                }
            )
