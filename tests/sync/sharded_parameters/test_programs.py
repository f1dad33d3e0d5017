"""Programs as torch's users write them for its own ``fully_shard``, with our import, through changes of the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import elastic_ray as er
from tests.loop.changing import Change, Kill, run_job
from tests.sync.sharded_parameters.sharded import CLOSE, Net, data

Program = Callable[[Any, Any, Tensor, Tensor], Tensor]

_SCRIPT = [Change(2, (1, 2, 3)), Kill(5, 2, "vote"), Change(7, (3,))]


def _build(sharded: bool) -> Net:
    """Blocks under activation checkpointing, as in torchtitan and torchtune."""
    model: Any = Net()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    for each in (*model.blocks, model.last, model) if sharded else ():
        er.fully_shard(each)
    return model


def _plainly(model: Any, wrapped: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(wrapped(x), y)


def _regularised(model: Any, wrapped: Any, x: Tensor, y: Tensor) -> Tensor:
    norm: Any = sum(param.pow(2).sum() for param in model.parameters() if param.dim() > 1)
    return _plainly(model, wrapped, x, y) + 0.02 * (norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _siamese(model: Any, wrapped: Any, x: Tensor, y: Tensor) -> Tensor:
    return _plainly(model, wrapped, x, y) + 0.1 * (wrapped(x.flip(1)) - wrapped(x)).pow(2).mean()


def _prefetched(model: Any, wrapped: Any, x: Tensor, y: Tensor) -> Tensor:
    if hasattr(model, "unshard"):
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
        model.unshard()
    return _plainly(model, wrapped, x, y)


def _loaded(model: Any, wrapped: Any, x: Tensor, y: Tensor) -> Tensor:
    if er.get_context().get_global_step() == 4:
        model.load_state_dict({name: value * 0.5 for name, value in Net().state_dict().items()})
    return _plainly(model, wrapped, x, y)


def _trained(loss: Program, sharded: bool) -> tuple[int, dict[str, Tensor]]:
    model = _build(sharded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    for _ in er.remaining_epochs_until(1):
        for x, y in er.AdaptiveDataLoader(DataLoader(data(), batch_size=10)):
            optimizer.zero_grad(set_to_none=False)
            for part, labels in ((x[:2], y[:2]), (x[2:], y[2:])):  # micro-steps by hand
                if len(part):
                    (loss(model, wrapped, part, labels) * len(part) / len(x)).backward()
            params = list(model.parameters())
            norm: Any = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
            nn.utils.clip_grads_with_norm_(params, 0.5, norm.full_tensor() if isinstance(norm, DTensor) else norm)
            optimizer.step()
    return er.get_context().get_world_rank(), {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "loss",
    [
        _plainly,
        _loaded,
        _regularised,
        pytest.param(_prefetched, marks=pytest.mark.slow),
        pytest.param(_siamese, marks=pytest.mark.slow),
    ],
    ids=["checkpointing", "loads whole weights", "regularised", "prefetches", "several calls"],
)
def test_it_ends_with_the_weights_of_plain_training(loss: Program) -> None:
    (_, wanted), *_ = run_job(lambda: _trained(loss, False)).results.values()
    found = run_job(lambda: _trained(loss, True), _SCRIPT, first=(1, 2)).results
    (whole,) = [own for rank, own in found.values() if rank == 0]
    assert whole.keys() == wanted.keys() and not any(isinstance(value, DTensor) for value in whole.values())
    for name, value in wanted.items():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=CLOSE, msg=lambda text: f"{name}: {text}")  # noqa: B023
