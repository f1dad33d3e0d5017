"""A train function whose model is sharded, built without memory, and large enough that workers read it row by row."""

from __future__ import annotations

from typing import Any


def train(config: dict[str, Any]) -> None:
    """``config``: epochs; ``pause_s`` in each step. Rank 0 tells sums of what there is; all ranks ask for it."""
    import time

    import torch

    import elastic_ray as er
    from tests.sync.sharded_parameters.sharded import data

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(13, 3000), torch.nn.Tanh(), torch.nn.Linear(3000, 3))
    for layer in (model[0], model[2]):
        er.fully_shard(layer, device="cpu")
    er.fully_shard(model, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(data(), batch_size=12, seed=3, drop_last=True)
    for epoch in er.remaining_epochs_until(int(config["epochs"])):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            time.sleep(float(config.get("pause_s", 0.02)))  # a job long enough for what is done to it
        weights, state = model.state_dict(), optimizer.state_dict()["state"]
        tensors = [*weights.values(), *(value for index in sorted(state) for value in state[index].values())]
        er.report({"epoch": epoch, "sums": [float(value.double().abs().sum()) for value in tensors]})
