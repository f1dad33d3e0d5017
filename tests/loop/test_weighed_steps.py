"""Gradients weighed by tokens in place of samples: those of one mean over all of them, however they are spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from elastic_ray.run.current import set_session
from tests.loop.changing import Change, Kill, run_job
from tests.loop.ranks import RankFailedError, Ranks

SAMPLES, BATCH, EPOCHS, LENGTH = 48, 12, 2, 7


def texts() -> torch.utils.data.TensorDataset:
    """Sequences of 0 to 7 tokens: numbers, and which of them count."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, LENGTH + 1, (SAMPLES,), generator=generator)
    counts = (torch.arange(LENGTH) < lengths[:, None]).double()
    return torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, LENGTH, 3, generator=generator, dtype=torch.float64), counts
    )


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-0.6, 0.7, p.numel(), dtype=torch.float64).reshape(p.shape) + 0.05 * number)
    return model


def token_loss(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens of a (micro-)batch; NaN where there are none, as in every framework."""
    return ((model(x)[..., 0] - x.sum(-1)).square() * mask).sum() / mask.sum()


def by_torch() -> torch.Tensor:
    """The parameters after plain torch has trained on whole batches."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, mask = texts().tensors
    for epoch in range(EPOCHS):
        for batch in torch.from_numpy(IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:]).split(BATCH):
            optimizer.zero_grad()
            token_loss(model, x[batch], mask[batch]).backward()
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def trained(
    bounds: tuple[int | None, int | None] | None = None,
    strategy: str | None = None,
    weigh: Callable[[Any, torch.Tensor], None] = lambda loader, mask: loader.weigh(mask.sum().item()),
    embedding: bool = False,
) -> tuple[torch.Tensor, float | None]:
    """The same by an elastic loop; also the noise scale that it has measured."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {} if strategy is None else {"strategy": strategy}
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", **options)
    loader = er.AdaptiveDataLoader(texts(), batch_size=BATCH, seed=3)
    if bounds is not None:
        loader.autoscale_batch_size(BATCH, local_bsz_bounds=bounds, gradient_accumulation=True)
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, mask in loader:
            weigh(loader, mask)
            optimizer.zero_grad()
            token_loss(wrapped, x, mask).backward()
            optimizer.step()
    noise = wrapped.noise_scale
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), noise.var if noise else None


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("world", [None, 2, 3])
@pytest.mark.parametrize("bounds", [None, (1, 2)])
def test_step_is_that_of_the_mean_over_all_tokens(
    ranks: Ranks, world: int | None, bounds: tuple[int, int] | None
) -> None:
    found = ranks.run(trained, bounds, world=world)
    for parameters, _ in [found] if world is None else found:
        torch.testing.assert_close(parameters, by_torch(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", ["ps", "partitioned_ar"])
def test_so_it_is_under_other_exact_strategies(ranks: Ranks, strategy: str) -> None:
    for parameters, _ in ranks.run(trained, (1, 3), strategy, world=2):
        torch.testing.assert_close(parameters, by_torch(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("script", "first"),
    [
        ([Change(2, (1, 2, 3)), Change(5, (2, 3))], (1, 2)),
        ([Kill(3, 2, "allreduce")], (1, 2, 3)),
        ([Kill(3, 2, "backward")], (1, 2)),
        ([Kill(4, 1, "edge")], (1, 2)),
    ],
)
def test_and_however_the_group_changes(script: Sequence[Change | Kill], first: Sequence[int]) -> None:
    for parameters, _ in run_job(trained, script, first=first).results.values():
        torch.testing.assert_close(parameters, by_torch(), rtol=0, atol=1e-12)


def trained_in_turn() -> list[torch.Tensor]:
    """Parameters of two models that the same steps train, each by its own loss."""
    models = [net(), net()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in models]
    wrapped = [er.AdaptiveDataParallel(*each, scaling_rule="none") for each in zip(models, optimizers, strict=True)]
    loader = er.AdaptiveDataLoader(texts(), batch_size=BATCH, seed=3)
    loader.autoscale_batch_size(BATCH, local_bsz_bounds=(1, 2), gradient_accumulation=True)
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, mask in loader:
            loader.weigh(mask.sum().item())
            for model, optimizer in zip(wrapped, optimizers, strict=True):
                optimizer.zero_grad()
                token_loss(model, x, mask).backward()
                optimizer.step()
    return [torch.cat([p.detach().reshape(-1) for p in each.parameters()]) for each in models]


@pytest.mark.parametrize("world", [None, 2])
def test_each_of_several_models_has_that_mean(ranks: Ranks, world: int | None) -> None:
    found = ranks.run(trained_in_turn, world=world)
    for parameters in found if world is None else [each for mine in found for each in mine]:
        torch.testing.assert_close(parameters, by_torch(), rtol=0, atol=1e-12)


def by_samples(loader: Any, mask: torch.Tensor) -> None:
    """As no loop needs to, for so it is anyway; in units of its own."""
    loader.weigh(0.37 * len(mask))


def not_at_all(loader: Any, mask: torch.Tensor) -> None:
    """Leave it at samples."""


@pytest.mark.parametrize("world", [None, 3])
def test_statistics_follow_the_weights(ranks: Ranks, world: int | None) -> None:
    """Squared norms of earlier micro-batches count with their shares as well, which are known with the last one."""
    weighed, plain = (ranks.run(trained, (1, 2), None, how, world=world) for how in (by_samples, not_at_all))
    (parameters, noise), (others, other) = (weighed, plain) if world is None else (weighed[0], plain[0])
    torch.testing.assert_close(parameters, others, rtol=0, atol=1e-12)
    assert noise is not None and noise == pytest.approx(other, rel=1e-6)


def some(loader: Any, mask: torch.Tensor) -> None:
    """Rank 1 does not weigh."""
    if er.get_context().get_world_rank() == 0:
        loader.weigh(mask.sum().item())


def test_ranks_that_weigh_and_that_do_not_are_told(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match=r"weighed by loader\.weigh"):
        ranks.run(trained, None, None, some, world=2)


def alone_in_a_step(count: Any, times: int = 1, *, skip: int = 0, bounds: tuple[int, int] | None = None) -> None:
    """One step of several micro-batches."""
    set_session(None)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(texts(), batch_size=BATCH)
    if bounds is not None:
        loader.autoscale_batch_size(BATCH, local_bsz_bounds=bounds, gradient_accumulation=True)
    with pytest.raises(RuntimeError, match="for the body of a loop over this loader"):
        loader.weigh(1)
    try:
        for number, (x, mask) in enumerate(loader):
            for _ in range(times if number >= skip else 0):
                loader.weigh(count)
            token_loss(wrapped, x, mask + 1).backward()
            optimizer.step()
    finally:
        set_session(None)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"count": "3"}, TypeError, r"takes a number .of a tensor its \.item"),
        ({"count": torch.tensor(3)}, TypeError, "takes a number"),
        ({"count": True}, TypeError, "takes a number"),
        ({"count": -1}, ValueError, "0 or more, but got -1"),
        ({"count": float("nan")}, ValueError, "0 or more, but got nan"),
        ({"count": float("inf")}, ValueError, "0 or more, but got inf"),
        ({"count": 2, "times": 2}, RuntimeError, "twice for one micro-batch"),
        ({"count": 2, "skip": 1, "bounds": (1, 4)}, RuntimeError, "was not called for an earlier micro-batch"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        alone_in_a_step(**arguments)


def weighed_once(*, within_no_sync: bool = False) -> None:
    """The first of a step's micro-batches is weighed, and not the others."""
    set_session(None)
    model = net()
    wrapped = er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = er.AdaptiveDataLoader(texts(), batch_size=BATCH)
    loader.autoscale_batch_size(BATCH, local_bsz_bounds=(1, 4), gradient_accumulation=True)
    try:
        for number, (x, mask) in enumerate(loader):
            if number == 0:
                loader.weigh(2)
            with wrapped.no_sync() if within_no_sync else nullcontext():
                token_loss(wrapped, x, mask + 1).backward()
    finally:
        set_session(None)


def test_all_micro_batches_of_step_are_weighed_or_none() -> None:
    with pytest.raises(RuntimeError, match=r"must be called before backward\(\) in each micro-batch"):
        weighed_once()


def test_within_no_sync_it_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"whose backward\(\) is within no_sync"):
        weighed_once(within_no_sync=True)


def weighed_late(*, within_no_sync: bool = False) -> None:
    """Each micro-batch is weighed when its gradient has been taken."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(texts(), batch_size=BATCH)
    for _ in er.remaining_epochs_until(1):
        for x, mask in loader:
            with wrapped.no_sync() if within_no_sync else nullcontext():
                token_loss(wrapped, x, mask + 1).backward()
            loader.weigh(mask.sum().item())
            optimizer.step()


@pytest.mark.parametrize("first", [(1,), (1, 2)])
@pytest.mark.parametrize("within_no_sync", [False, True])
def test_after_backward_it_is_refused(first: Sequence[int], within_no_sync: bool) -> None:
    with pytest.raises(RuntimeError, match=r"must be called before backward\(\), which has taken the micro-batch for"):
        run_job(lambda: weighed_late(within_no_sync=within_no_sync), first=first)


def nothing_weighs(*, sparse: bool) -> list[torch.Tensor]:
    """Every other step's loss is a mean over nothing."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(4, 3, sparse=sparse), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.arange(32) % 4), batch_size=4, shuffle=False)
    for _ in er.remaining_epochs_until(1):
        for step, (x,) in enumerate(loader):
            count = len(x) if step % 2 else 0
            loader.weigh(count)
            optimizer.zero_grad()
            (wrapped(x).sum() / count if count else wrapped(x).sum() / torch.zeros(()) * 0.0).backward()
            optimizer.step()
    assert wrapped.noise_scale is None or wrapped.noise_scale.var == wrapped.noise_scale.var
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("sparse", [False, True])
def test_step_of_no_weight_changes_nothing_at_any_size(sparse: bool) -> None:
    (alone,) = run_job(lambda: nothing_weighs(sparse=sparse)).results.values()
    assert all(p.isfinite().all() for p in alone)
    for found in run_job(lambda: nothing_weighs(sparse=sparse), first=(1, 2)).results.values():
        for one, other in zip(alone, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
