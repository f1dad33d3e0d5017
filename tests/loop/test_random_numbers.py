"""Ranks that are seeded alike build the same model, and then draw numbers of their own."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.steps.random_numbers import fold_generators, seed_alike
from tests.loop.ranks import Ranks
from tests.loop.trainee import numbers


def drawn(fold: bool | None) -> tuple[float, list[float], float]:
    """What is drawn before the first epoch, as masks within it, and from NumPy's generator."""
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    options = {} if fold is None else {"fold_random": fold}
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped = er.AdaptiveDataParallel(model, optimizer, **options)
    before, masks = torch.rand(1).item(), []
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(numbers(8), batch_size=4):
            masks.append(nn.functional.dropout(torch.ones(64), 0.5).sum().item())
            optimizer.zero_grad()
            wrapped(x.float()[:, None]).mean().backward()
            optimizer.step()
    return before, masks, float(np.random.rand())  # noqa: NPY002


@pytest.mark.parametrize("fold", [None, True])
def test_masks_differ_by_rank_and_models_do_not(ranks: Ranks, fold: bool | None) -> None:
    alone = ranks.run(drawn, fold)
    first, second = ranks.run(drawn, fold, world=2)
    assert first[0] == second[0] == alone[0]
    assert first[1] != second[1] and first[1] == alone[1], "the first rank continues as a program without elastic-ray"
    assert first[2] == second[2], "NumPy's generator, which may decide what all ranks do, is left alone"


def test_ranks_may_draw_alike(ranks: Ranks) -> None:
    first, second = ranks.run(drawn, False, world=2)
    assert first == second


def test_joiners_and_continued_runs_draw_no_earlier_numbers() -> None:
    cases = [
        {"rank": 0, "generation": 1, "steps": 0, "joined": False},
        {"rank": 1, "generation": 1, "steps": 0, "joined": False},
        {"rank": 1, "generation": 2, "steps": 8, "joined": True},
        {"rank": 1, "generation": 4, "steps": 8, "joined": True},
        {"rank": 0, "generation": 1, "steps": 8, "joined": False},
        {"rank": 0, "generation": 1, "steps": 9, "joined": False},
    ]
    with torch.random.fork_rng():
        found = []
        for case in cases:
            torch.manual_seed(7)
            expected = torch.rand(1).item()
            torch.manual_seed(7)
            fold_generators(**case)
            found.append(torch.rand(1).item())
    assert found[0] == expected and len(set(found)) == len(cases)


def test_workers_of_a_job_begin_alike() -> None:
    with torch.random.fork_rng():
        before = np.random.get_state()  # noqa: NPY002
        try:
            found = []
            for job in ("a", "a", "b"):
                seed_alike(job)
                found.append((torch.rand(1).item(), float(np.random.rand())))  # noqa: NPY002
        finally:
            np.random.set_state(before)  # noqa: NPY002
    assert found[0] == found[1] != found[2]


def own_numbers(seeds: bool) -> list[float]:
    """What NumPy draws before training and within it, in a worker that draws and one that has seeded."""
    seed_alike("a job")
    if seeds:
        np.random.seed(3)  # noqa: NPY002
    found = [float(np.random.rand())]  # noqa: NPY002
    fold_generators(int(os.environ["RANK"]), 1, 0, joined=False)
    return [*found, float(np.random.rand())]  # noqa: NPY002


def test_numpys_generator_becomes_each_ranks_own_unless_seeded(ranks: Ranks) -> None:
    (a, b), (c, d) = ranks.run(own_numbers, False, world=2)
    assert a == c and b != d
    (a, b), (c, d) = ranks.run(own_numbers, True, world=2)
    assert a == c and b == d
