"""The gradient of the whole batch, whoever computes which part of it: parameters equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from tests.loop.parity import (
    BATCH,
    EPOCHS,
    SAMPLES,
    Images,
    Plain,
    Shared,
    UsedBySome,
    adam,
    assert_same,
    groups,
    loss_of,
    make,
    mixed,
    reference,
    sgd,
)
from tests.loop.ranks import Ranks, leave_torch_group


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


def double() -> nn.Module:
    """64-bit parameters."""
    return Plain().double()


def half() -> nn.Module:
    """bfloat16 parameters."""
    return Plain().bfloat16()


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
    leave_torch_group()
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
