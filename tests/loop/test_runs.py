"""Several runs in one process, and loops that draw their batches with ``next``."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.run.current import set_session
from elastic_ray.sync.checks import StrategyError
from tests.loop.ranks import Ranks


def numbers(count: int) -> TensorDataset:
    """0..count-1."""
    return TensorDataset(torch.arange(float(count)))


def trained(dataset: Any, *, loader: Any = None, loader_first: bool = False, adapt: bool = False) -> list[float]:
    """A train function as a notebook's cell has it; the model's weights, and what an evaluation finds."""
    torch.manual_seed(0)

    def make() -> Any:
        made = loader or er.AdaptiveDataLoader(dataset, batch_size=6)
        if adapt:
            made.autoscale_batch_size(12)
        return made

    ours = make() if loader_first else None
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    ours = ours or make()
    epochs = 0
    for _ in er.remaining_epochs_until(2):
        totals = er.Accumulator()
        for (x,) in ours:
            optimizer.zero_grad()
            wrapped(x[:, None]).square().mean().backward()
            optimizer.step()
            totals["samples"] += len(x)
        assert totals["samples"] == len(dataset)
        epochs += 1
    assert epochs == 2
    evaluation = er.AdaptiveDataLoader(dataset, batch_size=4, shuffle=False)
    sums = er.Accumulator()
    with torch.no_grad():
        for (x,) in evaluation:
            sums["x"] += float(x.sum())
    return [*(p.item() for p in model.parameters()), sums["x"]]


def several(way: str) -> list[list[float]]:
    """The same training three times in one process."""
    dataset = numbers(18)
    if way == "one loader for all":
        loader = er.AdaptiveDataLoader(dataset, batch_size=6)
        return [trained(dataset, loader=loader) for _ in range(3)]
    if way == "adaptive":
        return [trained(dataset, adapt=True, loader_first=bool(n)) and [0.0] for n in range(3)]
    return [trained(dataset, loader_first=way == "loader first") for _ in range(3)]


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("way", ["model first", "loader first", "one loader for all", "adaptive"])
@pytest.mark.parametrize("world", [None, 2])
def test_a_train_function_may_run_again(ranks: Ranks, world: int | None, way: str) -> None:
    results = ranks.run(several, way, world=world)
    for result in [results] if world is None else results:
        assert result[0] == result[1] == result[2]


def test_broken_off_run_does_not_stand_in_the_way() -> None:
    set_session(None)
    loader = er.AdaptiveDataLoader(numbers(18), batch_size=6)
    try:
        for _ in er.remaining_epochs_until(2):
            for _batch in loader:
                raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        kept = error  # and with it the frames, as a notebook keeps them
    assert trained(numbers(18)) == trained(numbers(18))
    del kept


def refused_at_first(way: str) -> int:
    """A notebook that is corrected: its scheduler was not handed over; the steps of the second attempt."""
    made: dict[str, Any] = {}
    steps = 0
    for corrected in (False, True):
        if not made or way != "same model, same loader":
            loader = made["loader"] = er.AdaptiveDataLoader(numbers(18), batch_size=6)
            model = made["model"] = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if way == "adaptive":
            loader.autoscale_batch_size(12)
        if way == "with a state":
            er.register_state("average", nn.Linear(1, 1))
        wrapped = er.AdaptiveDataParallel(model, optimizer, scheduler if corrected else None)
        if way == "twice without a loop":
            model, optimizer = pair_of_its_own()
            wrapped = er.AdaptiveDataParallel(model, optimizer, None)
            with pytest.raises(ValueError, match="strategy must be"):
                er.AdaptiveDataParallel(*pair_of_its_own(), None, strategy="nonsense")
        refused: Any = contextlib.nullcontext() if corrected else pytest.raises(ValueError, match="lr_scheduler=")
        with refused:
            for _ in er.remaining_epochs_until(2):
                for (x,) in loader:
                    optimizer.zero_grad()
                    wrapped(x[:, None]).square().mean().backward()
                    optimizer.step()
                    steps += 1
                scheduler.step()
    return steps


def pair_of_its_own() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("world", [None, 2])
@pytest.mark.parametrize(
    "way", ["all anew", "same model, same loader", "adaptive", "with a state", "twice without a loop"]
)
def test_an_opening_that_failed_leaves_nothing_behind(ranks: Ranks, world: int | None, way: str) -> None:
    steps = ranks.run(refused_at_first, way, world=world)
    most = 12 if way == "adaptive" else 6  # one worker takes some steps in halves
    assert all(6 <= each <= most for each in ([steps] if world is None else steps))


def test_what_failed_for_its_loader_reopens_with_another() -> None:
    set_session(None)
    model, optimizer = pair_of_its_own()
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy="diloco")
    steps = 0
    for limit in (12, None):
        loader = er.AdaptiveDataLoader(numbers(18), batch_size=6)
        if limit is not None:
            loader.autoscale_batch_size(limit)
        refused: Any = contextlib.nullcontext()
        if limit is not None:
            refused = pytest.raises(StrategyError, match="an adaptive batch")
        with refused:
            for _ in er.remaining_epochs_until(1):
                for (x,) in loader:
                    wrapped(x[:, None]).square().mean().backward()
                    optimizer.step()
                    steps += 1
    assert steps == 3


def test_adaptive_loader_made_anew_adapts_before_the_first_epoch() -> None:
    set_session(None)
    model, optimizer = pair_of_its_own()
    er.AdaptiveDataParallel(model, optimizer)
    for _ in range(2):  # a notebook's cell
        loader = er.AdaptiveDataLoader(numbers(18), batch_size=6)
        loader.autoscale_batch_size(12)
        info = current_session().registry.loaders.info
        assert info is not None and info.limits.max_batch_size == 12
        del loader


def test_an_adaptive_loader_that_is_used_again_adapts_again() -> None:
    set_session(None)
    loader = er.AdaptiveDataLoader(numbers(18), batch_size=6)
    loader.autoscale_batch_size(12)
    for _ in range(2):
        trained(numbers(18), loader=loader)
        info = current_session().registry.loaders.info
        assert info is not None and info.limits.max_batch_size == 12


def folds(_: int) -> list[list[float]]:
    """Cross-validation: a model, an optimizer and two loaders for each fold."""
    dataset = numbers(18)
    found = []
    for fold in range(3):
        torch.manual_seed(0)
        held_out = list(range(fold * 6, fold * 6 + 6))
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        training = Subset(dataset, [i for i in range(18) if i not in held_out])
        loader = er.AdaptiveDataLoader(training, batch_size=4)
        evaluation = er.AdaptiveDataLoader(Subset(dataset, held_out), batch_size=4, shuffle=False)
        seen = []
        for _epoch in er.remaining_epochs_until(2):
            for (x,) in loader:
                optimizer.zero_grad()
                wrapped(x[:, None]).square().mean().backward()
                optimizer.step()
                seen += x.tolist()
            total = er.Accumulator()
            for (x,) in evaluation:
                total["x"] += float(x.sum())
        found.append([*sorted(seen), total["x"], *(p.item() for p in model.parameters())])
    return found


@pytest.mark.parametrize("world", [None, 2])
def test_folds_one_after_the_other(ranks: Ranks, world: int | None) -> None:
    results = ranks.run(folds, 0, world=world)
    results = [results] if world is None else results
    for fold in range(3):
        held_out = range(fold * 6, fold * 6 + 6)
        seen = sorted(x for result in results for x in result[fold][:-3])
        assert seen == sorted(2 * [float(i) for i in range(18) if i not in held_out])
        assert {tuple(result[fold][-3:]) for result in results} == {(float(sum(held_out)), *results[0][fold][-2:])}


# -- next ----------------------------------------------------------------------------------------------------


def with_next(epochs: bool) -> list[list[float]]:
    """``iter`` and ``next`` for ``len(loader)`` steps, with an evaluation after each epoch."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(numbers(15), batch_size=6)
    evaluation = er.AdaptiveDataLoader(numbers(5), batch_size=4, shuffle=False)
    found = []
    for _ in er.remaining_epochs_until(3) if epochs else range(3):
        batches, seen = iter(loader), []
        for _step in range(len(loader)):
            (x,) = next(batches)
            optimizer.zero_grad()
            wrapped(x[:, None]).square().mean().backward()
            optimizer.step()
            seen += x.tolist()
        total = er.Accumulator()
        for (x,) in evaluation:
            total["x"] += float(x.sum())
        assert total["x"] == 10.0
        found.append(seen)
    assert current_session().progress.steps in (9, 8), "the last step of a plain loop is not over yet"
    return found


@pytest.mark.parametrize("epochs", [True, False])
@pytest.mark.parametrize("world", [None, 2])
def test_batches_may_be_drawn_with_next(ranks: Ranks, world: int | None, epochs: bool) -> None:
    results = ranks.run(with_next, epochs, world=world)
    results = [results] if world is None else results
    orders = [[x for result in results for x in result[epoch]] for epoch in range(3)]
    assert all(sorted(order) == list(range(15)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_an_iterator_ends_with_its_epoch() -> None:
    set_session(None)
    loader = er.AdaptiveDataLoader(numbers(12), batch_size=6)
    batches = iter(loader)
    epochs = er.remaining_epochs_until(2)
    next(epochs)
    next(batches)
    next(epochs)
    with pytest.raises(RuntimeError, match=r"call iter\(loader\) again in each epoch"):
        next(batches)


class Kept(nn.Module):
    """A table with few touched rows, and a layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids))


def run_and_forget(strategy: str | None) -> Any:
    """A short run of which nothing is kept."""
    model = Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    wrapped = er.AdaptiveDataParallel(model, optimizer, **({} if strategy is None else {"strategy": strategy}))
    loader = er.AdaptiveDataLoader(numbers(24), batch_size=6)
    for _ in er.remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x.long()).square().mean().backward()
            optimizer.step()
    return weakref.ref(model), weakref.ref(wrapped)


@pytest.mark.parametrize("strategy", [None, "parallax"])
def test_a_run_that_is_over_leaves_no_model_behind(ranks: Ranks, strategy: str | None) -> None:
    assert ranks.run(models_left, strategy) == []


def models_left(strategy: str | None) -> list[str]:
    """What of a run is there after the next has begun."""
    left = run_and_forget(strategy)
    er.AdaptiveDataParallel(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    list(er.AdaptiveDataLoader(numbers(6), batch_size=6))
    set_session(None)
    gc.collect()
    return [type(each()).__name__ for each in left if each() is not None]


def test_model_that_is_wrapped_again_leaves_its_run_before() -> None:
    """What was unfrozen since belongs to no parameter of that run, which would take its gradient away."""
    set_session(None)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    net[0].requires_grad_(False)
    kept = []
    for _ in range(2):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = er.AdaptiveDataParallel(net, optimizer, scaling_rule="none")
        kept.append(model)
        before = net[0].weight.clone()
        for _ in er.remaining_epochs_until(1):
            for (x,) in er.AdaptiveDataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        assert torch.equal(net[0].weight, before) is not net[0].weight.requires_grad
        net[0].requires_grad_(True)
