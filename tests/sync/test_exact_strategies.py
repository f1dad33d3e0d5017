"""Strategies that are exact give the steps of one process, or of torch DDP: strategy x model x ranks x optimizer."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from elastic_ray.sync import Strategy
from elastic_ray.sync.builders import PS, PartitionedAR
from elastic_ray.sync.spec import Owner, Reduce, Rule
from tests.loop.changing import Change, Kill, run_job
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

MIXED = Strategy(
    rules=(
        Rule(pattern="first.bias", sync=Owner(bucket_bytes=1024)),
        Rule(pattern="*.bias", sync=Reduce(parts=2, axis=1)),
    )
)
STRATEGIES: dict[str, Any] = {
    "all_reduce": "all_reduce",
    "ring": "ring",
    "tree": "tree",
    "two_level": "two_level",
    "ps": "ps",
    "ps_balanced": Strategy(default=Owner(bucket_bytes=1024)),
    "partitioned_ar": "partitioned_ar",
    "random_axis": "random_axis_partition_ar",
    "mixed": MIXED,
}
strategies = pytest.mark.parametrize("strategy", list(STRATEGIES.values()), ids=list(STRATEGIES))


def elastic(
    build: Any, optimizer_of: Any, strategy: Any, micro: int | None = None, clip: float = 0.0, amp: bool = False
) -> dict[str, Tensor]:
    """Train with our wrappers; `micro`: most samples a rank takes at once, `clip`: largest norm of gradients."""
    model, data = make(build)
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, enabled=amp)
    wrapped = er.AdaptiveDataParallel(
        model, optimizer, scaling_rule="none", strategy=strategy, grad_scaler=scaler if amp else None
    )
    loader = er.AdaptiveDataLoader(data, batch_size=BATCH, seed=3)
    if micro is not None:
        loader.autoscale_batch_size(SAMPLES, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale(loss_of(wrapped, x, y)).backward()
            scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def clipped(build: Any, optimizer_of: Any, clip: float) -> dict[str, Tensor]:
    """As `reference` on one process, with clipping."""

    class Clipping:
        """The optimizer, which clips before it steps."""

        def __init__(self, model: nn.Module) -> None:
            self._model, self._optimizer = model, optimizer_of(model)

        def zero_grad(self) -> None:
            self._optimizer.zero_grad()

        def step(self) -> None:
            nn.utils.clip_grad_norm_(self._model.parameters(), clip)
            self._optimizer.step()

    return reference(build, Clipping, world=2)


def assert_all(results: Any, wanted: dict[str, Tensor], *, alone: bool = False) -> None:
    """Every rank has the wanted parameters, and all have the same."""
    each = [results] if alone else results
    for result in each:
        assert_same(result, wanted)
        assert_same(result, each[0], exact=True)


CASES = [(Plain, adam), (UsedBySome, sgd), (Shared, adam), (Images, sgd), (mixed, sgd), (Plain, groups)]


@pytest.mark.thorough
@pytest.mark.parametrize(("build", "optimizer_of"), CASES, ids=[f"{b.__name__}-{o.__name__}" for b, o in CASES])
@strategies
@pytest.mark.matrix(every=9)
def test_unequal_shares_give_the_whole_batch_s_steps(
    ranks: Ranks, build: Any, optimizer_of: Any, strategy: Any
) -> None:
    assert_all(ranks.run(elastic, build, optimizer_of, strategy, world=3), reference(build, optimizer_of, world=3))


@pytest.mark.matrix(every=4)
@strategies
@pytest.mark.parametrize("world", [None, 4])
def test_one_rank_and_four(ranks: Ranks, world: int | None, strategy: Any) -> None:
    wanted = reference(Plain, sgd, world=world or 1)
    assert_all(ranks.run(elastic, Plain, sgd, strategy, world=world), wanted, alone=world is None)


@pytest.mark.matrix(every=4)
@strategies
def test_accumulated_gradients_give_the_same_steps(ranks: Ranks, strategy: Any) -> None:
    wanted = reference(UsedBySome, sgd, batch=8, world=2)
    assert_all(ranks.run(elastic, UsedBySome, sgd, strategy, 2, world=2), wanted)


@pytest.mark.matrix(every=4)
@strategies
def test_clipping_and_amp_s_scale_see_the_mean(ranks: Ranks, strategy: Any) -> None:
    wanted = clipped(Plain, sgd, 0.2)
    for amp in (False, True):
        assert_all(ranks.run(elastic, Plain, sgd, strategy, None, 0.2, amp, world=2), wanted)


# -- BatchNorm, against DDP ----------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Convolutions with BatchNorm, whose statistics are each rank's own in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 2), nn.BatchNorm2d(8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, :, None, None].expand(-1, -1, 2, 2).reshape(-1, 3, 2, 4)
        return self.second(self.norm(self.first(image)).relu()).mean((2, 3))


def ddp(optimizer_of: Any) -> dict[str, Tensor]:
    """Torch DDP on equal shares in our order."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model, data = make(Normed)
    optimizer = optimizer_of(model)
    wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    for epoch in range(EPOCHS):
        order = IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:]
        for start in range(0, SAMPLES - 7, 8):
            x, y = data[torch.from_numpy(order[start + rank * 8 // world : start + (rank + 1) * 8 // world])]
            optimizer.zero_grad()
            loss_of(wrapped, x, y).backward()
            optimizer.step()
    leave_torch_group()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def on_equal_shares(optimizer_of: Any, strategy: Any) -> dict[str, Tensor]:
    """Our wrappers on the same."""
    model, data = make(Normed)
    optimizer = optimizer_of(model)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, y in er.AdaptiveDataLoader(data, batch_size=8, seed=3, drop_last=True):
            optimizer.zero_grad()
            loss_of(wrapped, x, y).backward()
            optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("optimizer_of", [sgd, adam])
def test_batch_norm_trains_as_under_ddp(ranks: Ranks, optimizer_of: Any) -> None:
    wanted = ranks.run(ddp, optimizer_of, world=2)[0]
    for strategy in ("ps", STRATEGIES["ps_balanced"], "partitioned_ar", "random_axis_partition_ar"):
        assert_all(ranks.run(on_equal_shares, optimizer_of, strategy, world=2), wanted)


# -- several models ------------------------------------------------------------------------------------------------


def two_models(first: Any, second: Any) -> dict[str, Tensor]:
    """Two models with an optimizer each, trained in turn in each step, of which one is used by the other's loss."""
    models, wrapped, optimizers = [], [], []
    for number, strategy in enumerate((first, second)):
        torch.manual_seed(number)
        models.append(nn.Linear(6, 6))
        optimizers.append(sgd(models[-1]) if number else adam(models[-1]))
        wrapped.append(er.AdaptiveDataParallel(models[-1], optimizers[-1], scaling_rule="none", strategy=strategy))
    _, data = make(Plain)
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, _ in er.AdaptiveDataLoader(data, batch_size=BATCH, seed=3, drop_last=True):
            optimizers[0].zero_grad()
            wrapped[0](x).square().mean().backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            wrapped[1](models[0](x).detach()).cos().mean().backward()
            optimizers[1].step()
    return {f"{n}.{name}": p.detach().clone() for n, m in enumerate(models) for name, p in m.named_parameters()}


@pytest.mark.thorough
def test_each_of_several_models_has_its_own(ranks: Ranks) -> None:
    wanted = ranks.run(two_models, "all_reduce", "all_reduce")
    for ways in ((PS(), PartitionedAR(parts=2)), ("ps_balanced", "all_reduce"), ("random_axis_partition_ar", "ps")):
        assert_all(ranks.run(two_models, *ways, world=3), wanted)


# -- changes and kills ---------------------------------------------------------------------------------------------


@strategies
@pytest.mark.parametrize(
    "script",
    [
        [Change(2, (1, 2, 3, 4)), Change(4, (2, 3, 4)), Change(5, (4,))],
        [Kill(2, 3, "backward"), Change(4, (1, 2, 4))],
        [Kill(2, 1, "allreduce")],  # rank 0, which owns what has one owner
        [Kill(2, 2, "allreduce"), Kill(3, 3, "allreduce")],
        [Kill(3, 2, "optimizer_step")],
        [Kill(3, 3, "after_step"), Change(5, (1, 2, 4, 5))],
    ],
    ids=["2-4-3-1", "backward", "first", "two", "optimizer_step", "after_step"],
)
@pytest.mark.matrix(every=12)
def test_changes_and_kills_leave_the_steps_as_they_are(strategy: Any, script: list[Any]) -> None:
    """Of an owner, too: what it owned is planned anew."""
    first = (1, 2) if isinstance(script[0], Change) else (1, 2, 3)

    def loop() -> dict[str, Tensor]:
        torch.manual_seed(1)  # all threads': the model below is made from fixed numbers
        model = Plain()
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-0.5, 0.6, p.numel()).reshape(p.shape) + 0.03 * number)
        optimizer = sgd(model)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
        _, data = make(Plain)
        for _ in er.remaining_epochs_until(EPOCHS):
            for x, y in er.AdaptiveDataLoader(data, batch_size=8, seed=3, drop_last=True):
                optimizer.zero_grad()
                loss_of(wrapped, x, y).backward()
                optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    (wanted,) = run_job(loop).results.values()
    outcome = run_job(loop, script, first=first, nodes=2)
    assert sorted(outcome.results) == sorted(outcome.groups[-1])
    assert all("two_level is all_reduce" in text for _, text, _ in outcome.told), "a group of one on each node"
    assert_all(list(outcome.results.values()), wanted)
