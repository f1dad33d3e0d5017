"""A parameter that a step does not use has no gradient, on any rank and under any strategy, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_ray as er
from tests.loop.changing import Change, Kill, run_job

BATCH, STEPS = 8, 6
CLOSE = 2e-5


class Net(nn.Module):
    """Layers of which a step uses some, as its samples or its number say."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.block, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.never = nn.Linear(6, 2)
        generator = torch.Generator().manual_seed(3)
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor, step: int) -> Tensor:
        raise NotImplementedError


class Experts(Net):
    """Each sample goes to one of three experts: the second has one sample in a while, the third none in most steps."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        route, h = x[:, 0], torch.tanh(self.first(x))
        for number, expert in enumerate(self.experts):
            chosen = (route == number).nonzero().flatten()
            if len(chosen):
                h = h.index_add(0, chosen, expert(h[chosen]))
        return self.head(torch.tanh(h))


class LayerDrop(Net):
    """A block is left out of every other step, by all ranks."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head(torch.tanh(h if step % 2 else self.block(h)))


class Phases(Net):
    """The two losses of a GAN by turns: the generator's layers have no gradient in the other's."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        h = torch.tanh(self.block(torch.tanh(self.first(x))))
        return self.head(h.detach() if step % 2 else h)


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * STEPS, 5, generator=generator)
    x[:, 0] = 0
    x[BATCH + 3, 0] = x[4 * BATCH + 7, 0] = 1  # of one sample in two of the steps
    x[5 * BATCH : 5 * BATCH + 4, 0] = 2
    return TensorDataset(x, torch.randn(BATCH * STEPS, 1, generator=generator))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1, eps=1e-2)


Found = tuple[dict[int, list[str]], dict[str, Tensor]]


def _plain(make: Callable[[], Net]) -> Found:
    model = make()
    optimizer, unused = _optimizer(model), dict[int, list[str]]()
    for step, (x, y) in enumerate(DataLoader(_data(), batch_size=BATCH)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x, step), y).backward()
        unused[step] = [name for name, p in model.named_parameters() if p.grad is None]
        optimizer.step()
    return unused, model.state_dict()


def _trained(make: Callable[[], Net], strategy: str, micro: int | None) -> tuple[int, Found]:
    model, kept = make(), None if strategy in ("fully_shard", "shard_size") else strategy
    options = {"shard_size": 2} if strategy == "shard_size" else {}
    if kept is None:
        for layer in (model.block, model.never, model):  # the experts together
            er.fully_shard(layer, **options)
    optimizer, unused = _optimizer(model), dict[int, list[str]]()
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=kept)
    loader = er.AdaptiveDataLoader(_data(), batch_size=BATCH, shuffle=False)
    if micro is not None:
        loader.autoscale_batch_size(BATCH, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    for _ in er.remaining_epochs_until(1):
        for x, y in loader:
            optimizer.zero_grad()
            step = er.get_context().get_global_step()
            nn.functional.mse_loss(wrapped(x, step), y).backward()
            unused[step] = [name for name, p in model.named_parameters() if p.grad is None]
            optimizer.step()
    return er.get_context().get_world_rank(), (unused, {k: v.clone() for k, v in model.state_dict().items()})


def _check(make: Callable[[], Net], strategy: str, micro: int | None, workers: int, script: Any = ()) -> None:
    unused, weights = _plain(make)
    first = tuple(range(1, workers + 1))
    found = run_job(lambda: _trained(make, strategy, micro), script, first=first).results
    assert found
    for rank, (own_unused, own_weights) in found.values():
        assert own_unused == {step: unused[step] for step in own_unused}, rank
        for name, value in weights.items() if rank == 0 else ():
            torch.testing.assert_close(own_weights[name], value, rtol=0, atol=CLOSE, msg=lambda m: f"{name}: {m}")  # noqa: B023


def test_the_programs_leave_parameters_out() -> None:
    """So that what is compared with is worth it."""
    for make in (Experts, LayerDrop, Phases):
        unused, _ = _plain(make)
        assert len({tuple(each) for each in unused.values()}) > 1 and all(
            "never.bias" in each for each in unused.values()
        )


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("strategy", ["all_reduce", "zero1", "zero2", "fully_shard", "shard_size"])
@pytest.mark.parametrize("make", [Experts, LayerDrop, Phases])
def test_what_a_step_does_not_use_is_left_alone(make: Callable[[], Net], strategy: str) -> None:
    _check(make, strategy, None, 4 if strategy == "shard_size" else 2)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("strategy", ["all_reduce", "zero2", "fully_shard"])
def test_one_micro_batch_that_uses_it_is_enough(strategy: str, workers: int) -> None:
    """Whether it comes first or last of its step."""
    _check(Experts, strategy, 2, workers)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("make", [Experts, LayerDrop])
def test_so_it_is_while_workers_come_and_die(make: Callable[[], Net]) -> None:
    _check(make, "fully_shard", None, 2, [Change(1, (1, 2, 3)), Kill(3, 2, "vote")])


class Discriminator(nn.Module):
    """With a head that none of the losses uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(5, 8), nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def _gan(*, plain: bool) -> list[float]:
    """Two models, whose gradients come in one backward pass."""
    generator = torch.Generator().manual_seed(3)
    made, judge = nn.Linear(5, 5), Discriminator()
    for p in (*made.parameters(), *judge.parameters()):
        p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    first, second = _optimizer(made), _optimizer(judge)
    one: Any = made if plain else er.AdaptiveDataParallel(made, first, scaling_rule="none")
    two: Any = judge if plain else er.AdaptiveDataParallel(judge, second, scaling_rule="none")

    def step(x: Tensor) -> None:
        second.zero_grad()
        (two(one(x).detach()).square().mean() - two(x).mean()).backward()
        second.step()
        first.zero_grad()
        two(one(x)).mean().backward()
        first.step()

    if plain:
        for x, _ in DataLoader(_data(), batch_size=BATCH):
            step(x)
    else:
        for _ in er.remaining_epochs_until(1):
            for x, _ in er.AdaptiveDataLoader(_data(), batch_size=BATCH, shuffle=False):
                step(x)
    return [p.sum().item() for p in (*made.parameters(), *judge.parameters())]


def test_gradients_of_two_models_come_in_one_pass() -> None:
    found = run_job(lambda: _gan(plain=False), [Change(3, (1, 2, 3))], first=(1, 2)).results
    assert all(own == pytest.approx(_gan(plain=True), abs=1e-4) for own in found.values()), found
