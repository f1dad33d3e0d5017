"""A train loop whose step takes its time per sample, and longer in the processes that a folder names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from placement.cluster.cluster import GPU_TYPE_LABEL
from tests.job.traced import Trace


def gpu_type() -> str:
    """GPU type of this process's node, by Ray's label."""
    import ray

    return str(ray.get_runtime_context().get_node_labels().get(GPU_TYPE_LABEL, ""))


def train(config: dict[str, Any]) -> None:
    """Train a linear model.

    ``config``: trace and slow (folders; a process is slow by the number in the file of its pid in ``slow``), samples,
    batch_size, sample_s (seconds of a step per sample), epochs, most (samples that fit into memory at once, in a group
    of three; all without it), by_type (how many times longer on nodes of a GPU type).
    """
    import os

    import torch

    import elastic_ray as er

    torch.manual_seed(0)
    torch.set_num_threads(1)
    samples = int(config["samples"])
    inputs = torch.randn(samples, 4)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(samples))
    model: Any = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(dataset, batch_size=int(config["batch_size"]))
    trace = Trace(Path(config["trace"]))
    own = Path(config["slow"]) / str(os.getpid())
    for epoch in er.remaining_epochs_until(int(config["epochs"])):
        for x, y, index in loader:
            trace.write("step", epoch=epoch, indices=index.tolist())
            times = float(own.read_text()) if own.exists() else config.get("by_type", {}).get(gpu_type(), 1.0)
            if er.get_context().get_world_size() == 3 and len(x) > config.get("most", samples):
                raise MemoryError(f"{len(x)} samples do not fit")
            time.sleep(config["sample_s"] * len(x) * times)  # what a sample costs on this worker
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        er.report({"epoch": epoch})
