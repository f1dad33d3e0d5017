"""Train functions of jobs of units, whose models are parallelised inside a unit by torch's own means."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import elastic_ray as er

SAMPLES, BATCH, WIDTH = 48, 12, 8


class Net(nn.Module):
    """Two layers that a plan can cut, and a norm that every worker of the unit holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.roll(inputs, 1, 1).sin())


def tensor_parallel(net: Net) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(net, er.unit_mesh(), plan)


def sharded(net: Net) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in (net.up, net.down):
        fully_shard(layer, mesh=er.unit_mesh())
    return fully_shard(net, mesh=er.unit_mesh())  # type: ignore[return-value]


class Pipelined(nn.Module):
    """Blocks one after the other, of which a unit's workers hold one each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Net() for number in range(2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


KINDS = {"tp": tensor_parallel, "plain": lambda net: net, "shard": sharded}


def whole(model: nn.Module) -> dict[str, Any]:
    """All parameters; a collective within the unit."""
    full = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()}
    return {name: p.detach().flatten().tolist() for name, p in full.items()}


def loss_of(found: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(found, targets)


def pipeline_step(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Forward and backward passes of two micro-batches through both stages, by torch's schedule."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(model.module, dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of)
    if dist.get_rank() == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets)


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pipelines = config["kind"] == "pp"
    if pipelines or config["kind"] == "blocks":
        net: Any = Pipelined()
        if pipelines:
            del net.blocks[str(1 - dist.get_rank())]
    else:
        net = KINDS[config["kind"]](Net())
    if "still" in config:  # every step is the same one
        kind, batch = getattr(torch.optim, config["still"]), SAMPLES
        optimizer: Any = kind(net.parameters(), lr=0.0, foreach=False)
    else:
        optimizer, batch = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False), BATCH
    model = er.AdaptiveDataParallel(net, optimizer)
    loader = er.AdaptiveDataLoader(data(), batch_size=batch, shuffle="still" not in config)
    if "largest" in config:
        loader.autoscale_batch_size(config["largest"], local_bsz_bounds=(4, config["largest"]))
    for epoch in er.remaining_epochs_until(config["epochs"]):
        for inputs, targets in loader:
            optimizer.zero_grad()
            if pipelines:
                pipeline_step(model, inputs, targets)
            else:
                loss_of(model(inputs), targets).backward()
            optimizer.step()
            until = config.get("until")
            if until and not Path(until).exists():
                time.sleep(0.1)  # units take seconds to start
        found = whole(net)
        if pipelines:
            parts: list[Any] = [None, None]
            dist.all_gather_object(parts, found)
            found = parts[0] | parts[1]
        noise = model.noise_scale
        told = {"noise": [noise.sqr, noise.var] if noise is not None else [], "batch": loader.current_batch_size}
        er.report({"epoch": epoch, "parameters": found, "unit": dist.get_world_size(), **told})
