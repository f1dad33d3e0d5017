"""Embeddings with ``max_norm``: lookups write to them, on each rank to other rows, so several workers refuse them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.run.current import set_session
from elastic_ray.session.session import Session
from elastic_ray.standalone.session import StandaloneController
from tests.loop.changing import Change, run_job
from tests.loop.ranks import RankFailedError, Ranks
from tests.sync import tables


def build(trained: bool) -> None:
    """A model with such a table."""
    model = tables.Bounded(sparse=False)
    model.table.weight.requires_grad_(trained)
    er.AdaptiveDataParallel(model, tables.sgd(model))


@pytest.mark.thorough
def test_several_workers_refuse_them_by_name(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match=r"ValueError: table has max_norm=1\.0.*drift apart \(2 workers"):
        ranks.run(build, True, world=2)
    ranks.run(build, False, world=2)  # every lookup of a row that is not trained gives the same


def grow() -> None:
    """Trains alone; others may come."""
    model = nn.Sequential(nn.Embedding(9, 2, max_norm=1.0), nn.Flatten(), nn.Linear(2, 1))
    optimizer = tables.sgd(model)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    for _ in er.remaining_epochs_until(2):
        for (ids,) in er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.arange(8)[:, None] % 9), batch_size=4):
            optimizer.zero_grad()
            wrapped(ids).square().mean().backward()
            optimizer.step()


def test_a_worker_that_gets_others_unforeseen_refuses_them_then() -> None:
    run_job(grow, first=(1,))
    with pytest.raises(ValueError, match="0 has max_norm"):
        run_job(grow, [Change(1, (1, 2))], first=(1,))


def test_worker_that_may_get_others_refuses_them_at_construction() -> None:
    membership = WorkerMembership("w1", lambda spec, rank: None, lambda generation, cause: None)
    set_session(Session("w1", membership, StandaloneController(1, membership.post), sizes=(1, 2)))
    try:
        with pytest.raises(ValueError, match="table has max_norm"):
            build(True)
    finally:
        set_session(None)
