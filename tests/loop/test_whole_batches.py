"""Evaluation of what only whole batches tell, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset

import elastic_ray as er
from elastic_ray.loop.api import current_session
from tests.loop.ranks import RankFailedError, Ranks

CANDIDATES = 10


def ranked(batches: int, nested: bool, sampler: bool) -> dict[str, Any]:
    """Train a little; rank the first of ten candidates in each batch, after the epoch or within its second step."""
    torch.manual_seed(3)
    scores = torch.randn(batches * CANDIDATES)
    evaluated = TensorDataset(scores, torch.arange(len(scores)))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    if sampler:
        cut = BatchSampler(SequentialSampler(evaluated), CANDIDATES, drop_last=False)
        evaluation = er.AdaptiveDataLoader(evaluated, batch_sampler=cut, whole_batches=True)
    else:
        evaluation = er.AdaptiveDataLoader(evaluated, CANDIDATES, whole_batches=True, num_workers=1)
    loader = er.AdaptiveDataLoader(TensorDataset(torch.randn(24, 1)), batch_size=6)
    seen: list[list[int]] = []
    told = []

    def evaluate() -> None:
        hits = er.Accumulator()
        seen.clear()
        for x, index in evaluation:
            seen.append(index.tolist())
            hits["reciprocal rank"] += 1.0 / (1 + (x > x[0]).sum().item())
            hits["lists"] += 1
        told.append(dict(hits))

    for _epoch in er.remaining_epochs_until(2):
        for number, (x,) in enumerate(loader):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            if nested and number == 1:
                evaluate()
        if not nested:
            evaluate()
    lists = scores.view(batches, CANDIDATES)
    right = float((1.0 / (1 + (lists > lists[:, :1]).sum(1))).sum())
    session = current_session()
    assert session.registry.loaders.info is not None
    return {
        "seen": seen,
        "told": told,
        "right": right,
        "length": len(evaluation),
        "max": session.registry.loaders.info.max_workers,
        "state": [p.item() for p in model.parameters()],
    }


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize("sampler", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("world", "batches"), [(None, 5), (2, 5), (3, 4), (3, 1)])
def test_a_metric_of_whole_batches_is_exact(
    ranks: Ranks, world: int | None, batches: int, nested: bool, sampler: bool
) -> None:
    found = ranks.run(ranked, batches, nested, sampler, world=world)
    results = [found] if world is None else found
    lists = sorted(batch for result in results for batch in result["seen"])
    assert lists == [list(range(at, at + CANDIDATES)) for at in range(0, batches * CANDIDATES, CANDIDATES)]
    for result in results:
        assert len(result["seen"]) == result["length"]
        assert len(result["told"]) == 2
        for told in result["told"]:
            assert told == {"reciprocal rank": pytest.approx(result["right"]), "lists": batches}
        assert result["max"] == 6, "the training loader speaks for the job"
        assert result["state"] == results[0]["state"]


def trains_on_whole_batches(_: int) -> None:
    """What only evaluates is trained on."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(TensorDataset(torch.randn(24, 1)), batch_size=6, whole_batches=True)
    for _epoch in er.remaining_epochs_until(1):
        for (x,) in loader:
            wrapped(x).square().mean().backward()


def iterates_within(_: int) -> None:
    """A loop that a rank without a batch would miss."""
    loader = er.AdaptiveDataLoader(TensorDataset(torch.randn(24, 1)), batch_size=6, whole_batches=True)
    inner = er.AdaptiveDataLoader(TensorDataset(torch.randn(24, 1)), batch_size=6)
    for _epoch in er.remaining_epochs_until(1):
        for _batch in loader:
            list(inner)


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(
    ("function", "words"), [(trains_on_whole_batches, "is for evaluation"), (iterates_within, "would miss that loop")]
)
@pytest.mark.parametrize("world", [None, 2])
def test_whole_batches_only_evaluate(ranks: Ranks, world: int | None, function: Any, words: str) -> None:
    with pytest.raises(RuntimeError if world is None else RankFailedError, match=words):
        ranks.run(function, 0, world=world)
