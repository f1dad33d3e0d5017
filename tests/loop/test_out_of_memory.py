"""Memory that runs out in a step: it is drawn again in smaller parts, and the loop goes on, alone and in groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.adaptation.policy import Policy
from elastic_ray.loop.api import current_session
from elastic_ray.run.current import set_session
from tests.loop.changing import run_job
from tests.loop.ranks import Ranks

WIDTH, SAMPLES = 6, 96
MOMENTS = ("forward", "backward", "update")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def no_session() -> Iterator[None]:
    set_session(None)
    yield
    set_session(None)


class Allocator:
    """Stands in for one of a GPU: has room for so many samples at once, which it counts at one moment of a step.

    Args:
        moment: "forward", "backward" or "update".
        room: samples.
        rank: whose it is; another rank's has room for all.
    """

    def __init__(self, moment: str, room: int, rank: int | None = None) -> None:
        self.moment, self.room, self.rank = moment, room, rank
        self.refused, self.samples = 0, 0

    def take(self, moment: str, samples: int) -> None:
        """Raise torch.OutOfMemoryError where there is no room."""
        self.samples = max(samples, self.samples if moment == "update" else 0)
        mine = self.rank is None or self.rank == er.get_context().get_world_rank()
        if mine and moment == self.moment and samples > self.room:
            self.refused += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory, as if, at {moment} with {samples} samples")


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Allocator) -> Tensor:
        ctx.memory, ctx.samples = memory, len(x)
        memory.take("forward", len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.memory.take("backward", ctx.samples)
        return gradients[0], None


class Net(nn.Module):
    """Two layers, and the allocator between them: a backward pass that it ends has reached the second."""

    def __init__(self, memory: Allocator) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.memory, self.seen = memory, 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.seen = len(x)
        passed: Tensor = _Passes.apply(self.first(x).tanh(), self.memory)
        return self.second(passed)


class Adam(torch.optim.Adam):
    """Has no room for what it makes in its first update while the batch is large."""

    net: Net

    def step(self, closure: Any = None) -> Any:
        self.net.memory.take("update", self.net.seen)
        return super().step(closure)


def rows() -> torch.utils.data.TensorDataset:
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def trained(
    moment: str,
    room: int,
    batch_size: Any = 32,
    rank: int | None = None,
    strategy: str | None = None,
    epochs: int = 2,
    adapt: dict[str, Any] | None = None,
    policy: Policy | None = None,
    amp: bool = False,
) -> tuple[list[float], int, int, int | None, int]:
    """Weights, refusals, steps, the bound, and samples that counted."""
    memory = Allocator(moment, room, rank)
    net = Net(memory)
    optimizer = Adam(net.parameters(), lr=0.01)
    optimizer.net = net
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=amp)
    model = er.AdaptiveDataParallel(
        net,
        optimizer,
        scheduler,
        grad_scaler=scaler if amp else None,
        scaling_rule="none",
        schedule="steps",
        strategy=strategy,
        policy=policy,
    )
    loader = er.AdaptiveDataLoader(rows(), batch_size=batch_size, seed=1)
    if adapt is not None:
        loader.autoscale_batch_size(**adapt)
    samples = 0
    for _ in er.remaining_epochs_until(epochs):
        totals = er.Accumulator()
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale((model(x) - y).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            totals["samples"] += len(x)
        samples += int(totals["samples"])
    progress = current_session().progress
    weights = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).tolist()
    return weights, memory.refused, progress.steps, progress.memory_bound, samples


@pytest.mark.parametrize("amp", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_loop_alone_goes_on_and_the_batch_stays(moment: str, amp: bool) -> None:
    calm = trained(moment, 1000, amp=amp)
    set_session(None)
    weights, refused, steps, bound, samples = trained(moment, 9, amp=amp)
    assert (refused, bound) == (2, 8), "32 and 16 samples are refused, 8 fit"
    assert (steps, samples) == (6, 2 * SAMPLES) == (calm[2], calm[4])
    assert weights == pytest.approx(calm[0], abs=2e-6)


@pytest.mark.parametrize("strategy", [None, "zero1", "zero2"])
@pytest.mark.parametrize("moment", ["forward", "backward"])
@pytest.mark.parametrize("rank", [1, None], ids=["one rank", "all"])
def test_so_it_does_under_torchrun(ranks: Ranks, moment: str, strategy: str | None, rank: int | None) -> None:
    calm = trained(moment, 1000)
    for weights, refused, steps, bound, samples in ranks.run(trained, moment, 9, 32, rank, strategy, world=2):
        assert refused <= 1 and bound == 8
        assert (steps, samples) == (6, 2 * SAMPLES)
        assert weights == pytest.approx(calm[0], abs=2e-6)


@pytest.mark.parametrize("strategy", [None, "zero2"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("rank", [1, None], ids=["one rank", "all"])
def test_so_it_does_in_a_group_that_may_change(moment: str, strategy: str | None, rank: int | None) -> None:
    calm = trained(moment, 1000)
    outcome = run_job(lambda: trained(moment, 9, 32, rank, strategy), [], first=(1, 2))
    for weights, _, steps, bound, samples in outcome.results.values():
        assert bound == 8
        assert (steps, samples) == (6, 2 * SAMPLES)
        assert weights == pytest.approx(calm[0], abs=2e-6)
