"""Models, optimizers and data whose training on several ranks is compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ray.data.order import IndexOrder

SAMPLES, EPOCHS, BATCH = 25, 2, 7


class Plain(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class UsedBySome(Plain):
    """A layer that only samples with a large first feature pass through; a rank may have none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        rows = x[:, 0] > 0.8
        out = self.second(hidden)
        if rows.any():
            out = out + rows[:, None].to(out.dtype) * self.rare(hidden)
        return out


class Shared(nn.Module):
    """One weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.again(torch.relu(self.first(x)))))


class Images(nn.Module):
    """Convolutions over channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 2), nn.Conv2d(8, 3, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, :, None, None].expand(-1, -1, 2, 2).reshape(-1, 3, 2, 4)
        hidden = self.first(image.to(memory_format=torch.channels_last)).relu()
        return self.second(hidden).mean((2, 3))


def mixed() -> nn.Module:
    """Two kinds of parameters: the last bucket's kind cannot carry the control values."""
    model = Plain()
    model.first.bfloat16()
    forward = model.forward

    def cast(x: Tensor) -> Tensor:
        return model.second(torch.relu(model.first(x.bfloat16())).float())

    del forward
    model.forward = cast
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum and weight decay, so that every step tells on the next."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Three groups, one of them empty of trainable parameters, in another order than the model's."""
    first, *rest = list(model.parameters())
    still = nn.Parameter(torch.zeros(2), requires_grad=False)
    model.register_parameter("still", still)
    return torch.optim.SGD([{"params": rest, "lr": 0.2}, {"params": [still]}, {"params": [first]}], lr=0.05)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def dataset(dtype: torch.dtype) -> torch.utils.data.TensorDataset:
    """Fixed rows."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return torch.utils.data.TensorDataset(x.to(dtype), torch.randint(3, (SAMPLES,), generator=generator))


def make(build: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    """A model, the same each time, and its data."""
    torch.manual_seed(1)
    model = build()
    return model, dataset(next(model.parameters()).dtype if build is not mixed else torch.float32)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """In float32 at least."""
    out = model(x)
    return nn.functional.cross_entropy(out if out.dtype == torch.float64 else out.float(), y)


def reference(build: Any, optimizer_of: Any, batch: int = BATCH, world: int = 1) -> dict[str, Tensor]:
    """Train on whole batches, without any of our code but the order of samples and the rule for short tails."""
    from elastic_ray.data.sharding import step_size

    model, data = make(build)
    optimizer = optimizer_of(model)
    for epoch in range(EPOCHS):
        order = IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:]
        position = 0
        while count := step_size(position=position, total=SAMPLES, batch_size=batch, world_size=world):
            x, y = data[torch.from_numpy(order[position : position + count])]
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            position += count
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], *, exact: bool = False) -> None:
    """Within float tolerance, coarse for bfloat16."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if exact:
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)
        elif torch.bfloat16 in (t.dtype for t in wanted.values()):
            torch.testing.assert_close(found[name].float(), tensor.float(), rtol=0.05, atol=0.02)
        else:
            torch.testing.assert_close(found[name], tensor)
