"""A train loop for worker processes that are killed, what it writes down, and the same training by torch alone."""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ray.data.order import IndexOrder

SAMPLES, BATCH, EPOCHS, ROWS, IDS = 72, 12, 4, 40, 3
STEPS = SAMPLES // BATCH * EPOCHS


class Tabled(nn.Module):
    """A table of which a batch touches some rows, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 16)
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 1)
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                p.copy_(torch.linspace(-0.5, 0.6, p.numel()).mul(37).sin().reshape(p.shape) / 2 + 0.03 * number)

    def forward(self, ids: Tensor) -> Tensor:
        summed: Tensor = self.last(torch.tanh(self.first(self.table(ids).sum(1)))).squeeze(1)
        return summed


def data() -> torch.utils.data.TensorDataset:
    """Ids, something to learn from them, and the samples' numbers."""
    ids = torch.randint(ROWS, (SAMPLES, IDS), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(ids, (ids < ROWS // 2).float().sum(1) - 1, torch.arange(SAMPLES))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Every step tells on the next."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def weights(model: nn.Module) -> list[float]:
    """All parameters; float32 goes through JSON bit by bit."""
    return [float(value) for p in model.parameters() for value in p.detach().reshape(-1).tolist()]


def train(config: dict[str, Any]) -> None:
    """``config``: trace (folder), strategy, pause_s (of each step), epochs."""
    import os
    import time

    import elastic_ray as er

    torch.set_num_threads(1)
    model = Tabled()
    optimizer = sgd(model)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=config["strategy"])
    context = er.get_context()
    with open(Path(config["trace"]) / f"{os.getpid()}-{time.monotonic_ns()}.jsonl", "a") as file:

        def write(kind: str, **values: Any) -> None:
            where = {"rank": context.get_world_rank(), "world": context.get_world_size()}
            where |= {"generation": context.get_generation(), "step": context.get_global_step(), "pid": os.getpid()}
            file.write(json.dumps({"kind": kind, **where, **values}) + "\n")
            file.flush()

        for epoch in er.remaining_epochs_until(int(config.get("epochs", EPOCHS))):
            for ids, y, numbers in er.AdaptiveDataLoader(data(), batch_size=BATCH, seed=3):
                own = weights(model)
                optimizer.zero_grad()
                loss = (wrapped(ids) - y).square().mean()
                write("step", epoch=epoch, samples=numbers.tolist(), loss=loss.item(), weights=own)
                loss.backward()
                optimizer.step()
                time.sleep(float(config.get("pause_s", 0.0)))  # a job long enough for what is done to it
        write("final", weights=weights(model))


@dataclasses.dataclass(frozen=True)
class Step:
    """A step as its last generation has drawn it.

    Attributes:
        generation: that one.
        world: its ranks.
        loss: the mean over all samples of the step.
        weights: each rank's parameters at its beginning, by rank.
        lost: those of the ranks that are left, in the group before, where that has drawn the step as well.
    """

    generation: int
    world: int
    loss: float
    weights: list[list[float]]
    lost: list[list[float]]


@dataclasses.dataclass(frozen=True)
class Account:
    """What a trace says.

    Attributes:
        steps: in order.
        final: the parameters of each process that came to the end.
    """

    steps: list[Step]
    final: list[list[float]]


def account(trace: Path) -> Account:
    """Check that every sample was drawn once an epoch, and that each group began as one."""
    lines = [json.loads(text) for path in trace.glob("*.jsonl") for text in path.read_text().splitlines()]
    by_step: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
    for line in lines:
        if line["kind"] == "step":
            by_step[line["step"]].append(line)
    assert sorted(by_step) == list(range(len(by_step))), "a step is missing"
    steps, epochs, began = [], collections.defaultdict(list), -1
    for number in sorted(by_step):
        newest = max(line["generation"] for line in by_step[number])  # earlier ones were lost and drawn again
        drawn = sorted(
            (line for line in by_step[number] if line["generation"] == newest), key=lambda line: line["rank"]
        )
        world = drawn[0]["world"]
        assert [line["rank"] for line in drawn] == list(range(world)), f"step {number}"
        if newest != began:
            began = newest
            assert all(line["weights"] == drawn[0]["weights"] for line in drawn), f"a group begins at step {number}"
        samples = [sample for line in drawn for sample in line["samples"]]
        epochs[drawn[0]["epoch"]] += samples
        loss = sum(line["loss"] * len(line["samples"]) for line in drawn) / len(samples)
        left, before = (
            {line["pid"] for line in drawn},
            [each for each in by_step[number] if each["generation"] < newest],
        )
        last = max((line["generation"] for line in before), default=0)
        lost = [each["weights"] for each in before if each["generation"] == last and each["pid"] in left]
        steps.append(Step(newest, world, loss, [line["weights"] for line in drawn], lost))
    assert all(sorted(drawn) == list(range(SAMPLES)) for drawn in epochs.values()), "every sample once an epoch"
    return Account(steps, [line["weights"] for line in lines if line["kind"] == "final"])


def by_torch(epochs: int = EPOCHS) -> tuple[list[float], list[float]]:
    """The loss of each step, and the parameters in the end, of one process."""
    model = Tabled()
    optimizer = sgd(model)
    ids, y, _ = data().tensors
    losses = []
    for epoch in range(epochs):
        for batch in torch.from_numpy(IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:]).split(BATCH):
            optimizer.zero_grad()
            loss = (model(ids[batch]) - y[batch]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, weights(model)
