"""Counts torch's operations in a step of the thread that trains: what a GPU is given to do, whatever the machine."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import elastic_ray as er
from elastic_ray.loop.api import current_session
from tests.loop.changing import run_job

SKIPPED, COUNTED = 40, 16  # the first steps measure the noise more often
BATCH = 8


class Operations(TorchDispatchMode):
    """Operations that torch dispatches, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Hand on ``batches``, and count in the steps after the first ones."""
        for number, batch in enumerate(batches):
            if number == SKIPPED:
                self.__enter__()
            elif number == SKIPPED + COUNTED:
                self.__exit__(None, None, None)
            yield batch

    @property
    def of_a_step(self) -> float:
        """Mean number of a counted step, without marks for profilers."""
        return sum(n for name, n in self.calls.items() if not name.startswith("profiler.")) / COUNTED


def net(layers: int) -> torch.nn.Module:
    """A net with this many linear layers, of two parameters each."""
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))


def samples() -> torch.utils.data.Dataset[Any]:
    """As many as one epoch takes."""
    return torch.utils.data.TensorDataset(torch.randn((SKIPPED + COUNTED + 4) * BATCH, 8))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """The body of the loop."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def plain(layers: int, wrap: Any = lambda module: module) -> Operations:
    """Of a plain loop; ``wrap`` makes the model that is called."""
    module, operations = net(layers), Operations()
    model, optimizer = wrap(module), torch.optim.SGD(module.parameters(), lr=0.01)
    for (x,) in operations.over(torch.utils.data.DataLoader(samples(), batch_size=BATCH)):
        step(model, optimizer, x)
    return operations


def ours(world_size: int, layers: int, **options: Any) -> Operations:
    """Of the first rank of a job of this size; ``options`` are the wrapper's."""
    operations = Operations()

    def train() -> None:
        torch.manual_seed(0)
        module = net(layers)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        model = er.AdaptiveDataParallel(module, optimizer, **options)
        loader = er.AdaptiveDataLoader(samples(), batch_size=BATCH)
        counts = operations if current_session().worker == "w1" else Operations()
        for _ in er.remaining_epochs_until(1):
            for (x,) in counts.over(loader):
                step(model, optimizer, x)

    run_job(train, first=range(1, world_size + 1))
    return operations
