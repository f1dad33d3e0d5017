"""The gradient of the whole batch, whoever computes which part of it: parameters equal those of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from tests.loop.ranks import Ranks

SAMPLES, EPOCHS, BATCH = 25, 2, 7


class Plain(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Frozen(Plain):
    """The first layer stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Unused(Plain):
    """A layer that nobody uses, between the others."""

    def __init__(self) -> None:
        super().__init__()
        self.aside, self.second = nn.Linear(5, 5), nn.Linear(8, 3)


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


def double() -> nn.Module:
    """64-bit parameters."""
    return Plain().double()


def half() -> nn.Module:
    """bfloat16 parameters."""
    return Plain().bfloat16()


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


def elastic(build: Any, optimizer_of: Any, micro: int | None) -> dict[str, Tensor]:
    """Train with our wrappers; `micro`: most samples a rank takes at once."""
    model, data = make(build)
    optimizer = optimizer_of(model)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(data, batch_size=BATCH, seed=3)
    if micro is not None:
        loader.autoscale_batch_size(SAMPLES, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(wrapped, x, y).backward()
            optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


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


CASES = [
    (Plain, sgd), (Plain, adam), (Plain, groups), (Frozen, sgd), (Unused, sgd), (UsedBySome, sgd), (Shared, sgd),
    (Images, sgd), (double, sgd), (half, sgd), (mixed, sgd),
]  # fmt: skip
NAMES = [f"{build.__name__}-{optimizer_of.__name__}" for build, optimizer_of in CASES]


@pytest.mark.parametrize(("build", "optimizer_of"), CASES, ids=NAMES)
@pytest.mark.parametrize("world", [None, 2, 3])
@pytest.mark.matrix(every=12)
def test_unequal_shares_give_the_whole_batch_s_steps(ranks: Ranks, build: Any, optimizer_of: Any, world: Any) -> None:
    wanted = reference(build, optimizer_of, world=world or 1)
    results = ranks.run(elastic, build, optimizer_of, None, world=world)
    for result in results if world else [results]:
        assert_same(result, wanted)
    if world:
        for result in results[1:]:
            assert_same(result, results[0], exact=True)


@pytest.mark.matrix(every=6)
@pytest.mark.parametrize(("build", "optimizer_of"), CASES, ids=NAMES)
@pytest.mark.parametrize("world", [None, 2])
def test_accumulated_gradients_give_the_same_steps(ranks: Ranks, build: Any, optimizer_of: Any, world: Any) -> None:
    # 7 samples: alone 3 micro-steps of 3, 2, 2; on two ranks 2 of 2, and all shares rounded up to 8 samples.
    batch = 8 if world else 9
    wanted = reference(build, optimizer_of, batch=batch, world=world or 1)
    results = ranks.run(elastic, build, optimizer_of, 3 if world is None else 2, world=world)
    for result in results if world else [results]:
        assert_same(result, wanted)


def ddp(build: Any, batch: int) -> dict[str, Tensor]:
    """Torch DDP on equal shares in our order."""
    import os

    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model, data = make(build)
    optimizer = sgd(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for epoch in range(EPOCHS):
        order = IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:]
        for start in range(0, SAMPLES - batch + 1, batch):
            share = order[start + rank * batch // world : start + (rank + 1) * batch // world]
            x, y = data[torch.from_numpy(share)]
            optimizer.zero_grad()
            loss_of(wrapped, x, y).backward()
            optimizer.step()
    # DDP ends its group holding the GIL, which the group's threads need to let go of the last step's work: a deadlock.
    time.sleep(0.3)
    dist.destroy_process_group()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def elastic_dropping(build: Any, batch: int) -> dict[str, Tensor]:
    """Our wrappers on equal shares."""
    model, data = make(build)
    optimizer = sgd(model)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(data, batch_size=batch, seed=3, drop_last=True)
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(wrapped, x, y).backward()
            optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_equal_shares_give_ddp_s_parameters_to_the_bit(ranks: Ranks) -> None:
    theirs = ranks.run(ddp, Plain, 8, world=2)
    ours = ranks.run(elastic_dropping, Plain, 8, world=2)
    for result in ours:
        assert_same(result, theirs[0], exact=True)
