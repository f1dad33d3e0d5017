"""Shapes of loops: evaluation after and within training, break, and several passes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.loop.api import current_session
from tests.loop.ranks import Ranks
from tests.loop.trainee import WORLDS, Trainee, each, numbers

# -- evaluation and sums -------------------------------------------------------------------------------------


def evaluated(nested: bool) -> dict[str, Any]:
    """Train on 21 samples, evaluate 11: after each epoch, or within every second step too."""
    trainee = Trainee()
    loader = er.AdaptiveDataLoader(numbers(21), batch_size=6)
    evaluation = er.AdaptiveDataLoader(numbers(11), batch_size=4, shuffle=False)
    sums, trained = [], []

    def evaluate() -> None:
        totals = er.Accumulator()
        with torch.no_grad():
            for (x,) in evaluation:
                trainee.wrapped(x.float()[:, None])
                totals["sum"] += x.sum().item()
                totals["count"] += len(x)
        sums.append((totals["sum"], totals["count"]))

    for _ in er.remaining_epochs_until(2):
        seen = er.Accumulator()
        for number, (x,) in enumerate(loader):
            trainee.train(x)
            seen["sum"] += x.sum().item()
            seen["squares"] += x.square().sum().item()
            if nested and number % 2:
                evaluate()
        evaluate()
        trained.append(dict(seen))
    return {"sums": sums, "trained": trained, "steps": current_session().progress.steps, "state": trainee.state()}


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_evaluation_passes_and_sums_are_exact(ranks: Ranks, world: int | None, nested: bool) -> None:
    for result in each(ranks, world, evaluated, nested):
        assert set(result["sums"]) == {(55.0, 11.0)}
        assert len(result["sums"]) == (6 if nested else 2)
        assert result["trained"] == [{"sum": 210.0, "squares": 2870.0}] * 2
        assert result["steps"] == 8


# -- break ---------------------------------------------------------------------------------------------------


def broken_off(where: str) -> dict[str, Any]:
    """Leave the training pass, or a nested evaluation, in its third step; continue with the next epoch."""
    trainee = Trainee()
    loader = er.AdaptiveDataLoader(numbers(30), batch_size=6)
    evaluation = er.AdaptiveDataLoader(numbers(12), batch_size=3, shuffle=False)
    steps, totals = [], er.Accumulator()
    for _ in er.remaining_epochs_until(3):
        count = 0
        for (x,) in loader:
            trainee.train(x)
            totals["samples"] += len(x)
            count += 1
            for number, (y,) in enumerate(evaluation):
                totals["evaluated"] += len(y)
                if where != "train" and number == 1:
                    break
            if where != "evaluation" and count == 3:
                break
        steps.append(count)
    return {"steps": steps, "totals": dict(totals), "committed": current_session().progress.steps}


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(
    ("where", "count", "samples", "evaluated_samples"),
    [("train", 3, 54, 108), ("evaluation", 5, 90, 90), ("both", 3, 54, 54)],
)
@pytest.mark.parametrize("world", WORLDS)
def test_pass_left_by_break_counts_what_it_has_done(
    ranks: Ranks, world: int | None, where: str, count: int, samples: int, evaluated_samples: int
) -> None:
    for result in each(ranks, world, broken_off, where):
        assert result["steps"] == [count] * 3
        assert result["totals"] == {"samples": samples, "evaluated": evaluated_samples}
        assert result["committed"] == 3 * count


# -- passes --------------------------------------------------------------------------------------------------


def passes(_: int) -> list[list[list[int]]]:
    """Two passes over the same loader in each of two epochs, one of them inside a step of the first."""
    trainee = Trainee()
    loader = er.AdaptiveDataLoader(numbers(10), batch_size=4)
    found = []
    for _epoch in er.remaining_epochs_until(2):
        first: list[int] = []
        second: list[int] = []
        inner: list[int] = []
        for number, (x,) in enumerate(loader):
            trainee.train(x)
            first += x.tolist()
            if number == 1:
                inner += [value for (y,) in loader for value in y.tolist()]
        for (x,) in loader:
            second += x.tolist()
        found.append([first, second, inner])
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_passes_over_one_loader_each_see_every_sample(ranks: Ranks, world: int | None) -> None:
    results = each(ranks, world, passes, 0)
    for epoch, which in itertools.product(range(2), range(3)):
        seen = [value for result in results for value in result[epoch][which]]
        assert sorted(seen) == list(range(10)), (epoch, which)
        assert seen != sorted(seen)
    if world is None:
        assert results[0][0][0] == results[0][0][1] == results[0][0][2] != results[0][1][0]


def plain_epochs(_: int) -> list[list[int]]:
    """A loop without `remaining_epochs_until`, as it is before a program becomes elastic."""
    trainee = Trainee()
    loader = er.AdaptiveDataLoader(numbers(12), batch_size=4)
    found = []
    for _epoch in range(3):
        seen: list[int] = []
        for (x,) in loader:
            trainee.train(x)
            seen += x.tolist()
        found.append(seen)
    return found


@pytest.mark.parametrize("world", [None, 2])
def test_a_plain_loop_has_another_order_in_each_pass(ranks: Ranks, world: int | None) -> None:
    results = each(ranks, world, plain_epochs, 0)
    orders = [[value for result in results for value in result[epoch]] for epoch in range(3)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def zipped(_: int) -> None:
    """Two loaders side by side."""
    first, second = er.AdaptiveDataLoader(numbers(12), batch_size=4), er.AdaptiveDataLoader(numbers(12), batch_size=4)
    for _epoch in er.remaining_epochs_until(1):
        for _pair in zip(first, second, strict=True):
            pass


def test_interleaved_loaders_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match="nested but not interleaved"):
        ranks.run(zipped, 0)


def dropped(_: int) -> tuple[int, list[int]]:
    """A last batch that is left out."""
    loader = er.AdaptiveDataLoader(numbers(14), batch_size=4, drop_last=True)
    counts = []
    for _epoch in er.remaining_epochs_until(2):
        totals = er.Accumulator()
        for (x,) in loader:
            totals["count"] += len(x)
        counts.append(int(totals["count"]))
    return len(loader), counts


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("world", WORLDS)
def test_drop_last_drops_the_tail_of_the_whole(ranks: Ranks, world: int | None) -> None:
    for result in each(ranks, world, dropped, 0):
        assert result == (3, [12, 12])
