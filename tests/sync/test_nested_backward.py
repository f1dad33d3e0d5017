"""Backward passes within others, and graphs that add to a gradient several times, train as in plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import elastic_ray as er
from elastic_ray.sync import AllReduce
from tests.loop.changing import Change, Kill, run_job

BATCH, STEPS = 8, 5
CLOSE = 2e-5
EACH = AllReduce(bucket_bytes=1024)  # two: the shared layer's weight is apart


class Net(nn.Module):
    """A layer that is used several times, and one that is used once."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.inner, self.head = nn.Linear(20, 20, bias=False), nn.Linear(20, 20), nn.Linear(20, 1)
        generator = torch.Generator().manual_seed(3)
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.2)

    def layer(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(x))

    def forward(self, x: Tensor, program: Program, step: int) -> Tensor:
        return program(self, x, step)


Program = Callable[[Net, Tensor, int], Tensor]
Backward = Callable[[Any, Any, Tensor], None]


def _leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_(True)


def recycled(net: Net, x: Tensor, step: int) -> Tensor:
    h = _leaf(x)
    for _ in range(3):
        h = checkpoint(net.layer, h, use_reentrant=True)
    return net.head(torch.tanh(net.inner(h)))


def recycled_without_reentry(net: Net, x: Tensor, step: int) -> Tensor:
    h = x
    for _ in range(3):
        h = checkpoint(net.layer, h, use_reentrant=False)
    return net.head(torch.tanh(net.inner(h)))


def within(net: Net, x: Tensor, step: int) -> Tensor:
    """A checkpoint in a checkpoint, both with the shared layer."""

    def outer(h: Tensor) -> Tensor:
        h = checkpoint(net.layer, h, use_reentrant=True)
        return torch.tanh(net.inner(checkpoint(net.layer, h, use_reentrant=True)))

    return net.head(checkpoint(outer, checkpoint(outer, _leaf(x), use_reentrant=True), use_reentrant=True))


def all_within(net: Net, x: Tensor, step: int) -> Tensor:
    """No gradient comes but within a checkpoint, as where adapters are trained of a model that is frozen."""

    def last(h: Tensor) -> Tensor:
        return net.head(torch.tanh(net.inner(h)))

    h = checkpoint(net.layer, checkpoint(net.layer, _leaf(x), use_reentrant=True), use_reentrant=True)
    return checkpoint(last, h, use_reentrant=True)


def tied(net: Net, x: Tensor, step: int) -> Tensor:
    """The weights are used outside as well, and their gradient of that comes first."""
    h = checkpoint(net.layer, checkpoint(net.layer, _leaf(x), use_reentrant=True), use_reentrant=True)
    return net.head(torch.tanh(net.inner(nn.functional.linear(h, net.shared.weight))))


def at_times(net: Net, x: Tensor, step: int) -> Tensor:
    """Once or more often, from step to step."""
    h = _leaf(x)
    for _ in range(1 + step % 3):
        h = checkpoint(net.layer, h, use_reentrant=True)
    return net.head(torch.tanh(net.inner(h)))


def later(net: Net, x: Tensor, step: int) -> Tensor:
    """Reentrant from the third step on, each layer once."""
    if step < 2:
        return net.head(torch.tanh(net.inner(net.layer(x))))
    return net.head(torch.tanh(net.inner(checkpoint(net.layer, _leaf(x), use_reentrant=True))))


def tied_later(net: Net, x: Tensor, step: int) -> Tensor:
    return recycled_without_reentry(net, x, step) if step < 2 else tied(net, x, step)


def plainly(model: Any, wrapped: Any, loss: Tensor) -> None:
    loss.backward()


def in_parts(model: Any, wrapped: Any, loss: Tensor) -> None:
    """Two passes over one graph."""
    (0.3 * loss).backward(retain_graph=True)
    (0.7 * loss).backward()


def unsynchronised(model: Any, wrapped: Any, loss: Tensor) -> None:
    with wrapped.no_sync():
        (0.3 * loss).backward(retain_graph=True)
    (0.7 * loss).backward()


def penalised(model: Any, wrapped: Any, loss: Tensor) -> None:
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    # Linear in the gradient, so that the penalty of the whole batch is the mean of the ranks'.
    (loss + 0.1 * sum(grad.sum() for grad in grads)).backward()


class _Alone:
    """What a wrapper is in plain PyTorch."""

    def no_sync(self) -> Any:
        return torch.enable_grad()


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(BATCH * STEPS, size, generator=generator) for size in (20, 1)))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.03, eps=1e-2)


def _loss(model: Any, x: Tensor, y: Tensor, program: Program, step: int) -> Tensor:
    return nn.functional.mse_loss(model(x, program, step), y)


def _plain(program: Program, backward: Backward) -> dict[str, Tensor]:
    model = Net()
    optimizer = _optimizer(model)
    for step, (x, y) in enumerate(DataLoader(_data(), batch_size=BATCH)):
        optimizer.zero_grad()
        backward(model, _Alone(), _loss(model, x, y, program, step))
        optimizer.step()
    return model.state_dict()


def _trained(program: Program, backward: Backward, strategy: Any, micro: int | None, calls_wrapper: bool) -> Any:
    model = Net()
    if strategy == "fully_shard":
        for each in (model.shared, model.inner, model):
            er.fully_shard(each)
    optimizer = _optimizer(model)
    kept = None if strategy == "fully_shard" else strategy
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=kept)
    loader = er.AdaptiveDataLoader(_data(), batch_size=BATCH, shuffle=False)
    if micro is not None:
        loader.autoscale_batch_size(BATCH, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    for _ in er.remaining_epochs_until(1):
        for x, y in loader:
            optimizer.zero_grad()
            step = er.get_context().get_global_step()
            backward(model, wrapped, _loss(wrapped if calls_wrapper else model, x, y, program, step))
            optimizer.step()
    return er.get_context().get_world_rank(), {k: v.clone() for k, v in model.state_dict().items()}


def _check(
    program: Program,
    backward: Backward = plainly,
    strategy: Any = EACH,
    *,
    workers: int = 2,
    micro: int | None = None,
    calls_wrapper: bool = True,
    script: Any = (),
) -> None:
    wanted = _plain(program, backward)
    found = run_job(
        lambda: _trained(program, backward, strategy, micro, calls_wrapper), script, first=tuple(range(1, workers + 1))
    ).results
    for rank, weights in found.values():
        for name, value in wanted.items() if rank == 0 or strategy != "fully_shard" else ():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=CLOSE, msg=lambda m: f"{name}: {m}")  # noqa: B023


PROGRAMS = [recycled, recycled_without_reentry, within, all_within, tied, at_times, later]


@pytest.mark.matrix(every=6)
@pytest.mark.parametrize(
    "strategy", ["all_reduce", EACH, "zero1", "zero2", "fully_shard"], ids=lambda each: str(each)[:11]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_that_come_several_times_are_added_up(program: Program, strategy: Any) -> None:
    if program is tied and strategy == "fully_shard":
        pytest.skip("torch's fully_shard takes a weight in its own module's forward alone")
    _check(program, strategy=strategy)


def test_slices_refuse_passes_that_are_all_within_others() -> None:
    """Each would be reduced by itself; here the slices are real ones, of three workers."""
    _check(within, strategy="zero2", workers=3)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        _check(all_within, strategy="zero2", workers=3)


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(
    ("program", "backward"),
    [
        *itertools.product([recycled, recycled_without_reentry, all_within], [in_parts, unsynchronised]),
        (recycled_without_reentry, penalised),  # torch.autograd.grad is not for reentrant checkpoints
    ],
)
def test_several_passes_over_one_graph(program: Program, backward: Backward) -> None:
    _check(program, backward)


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("backward", [plainly, in_parts])
@pytest.mark.parametrize("program", [recycled, all_within, tied])
def test_micro_batches(program: Program, backward: Backward, workers: int) -> None:
    _check(program, backward, workers=workers, micro=2)


def test_micro_batches_of_worker_that_has_become_only_one() -> None:
    """All buckets count, and not only the last one, which holds what the group's last reduction has left."""
    _check(recycled_without_reentry, micro=2, script=[Change(2, (2,))])


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("backward", [plainly, in_parts])
def test_several_passes_of_a_sharded_model(backward: Backward, micro: int | None) -> None:
    _check(recycled, backward, "fully_shard", micro=micro)


def test_loop_that_calls_the_model_itself_and_loses_workers() -> None:
    _check(recycled, calls_wrapper=False, script=[Change(1, (1, 2, 3)), Kill(3, 2, "allreduce")])


def test_layer_used_several_times_in_mid_training_is_refused() -> None:
    with pytest.raises(RuntimeError, match="use_reentrant=False, or do so from the first step on"):
        _check(tied_later)
