"""The same loop under torchrun, in processes of a group that does not change, and alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import elastic_ray as er
from tests.loop.ranks import Ranks
from tests.sync.conftest import ranks as ranks
from tests.sync.sharded_parameters.sharded import CLOSE, sharded_net, train_an_epoch


def _train() -> Any:
    model = sharded_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    train_an_epoch(wrapped, optimizer)
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.thorough
def test_ranks_of_torchrun_train_as_one_process(ranks: Ranks) -> None:
    first, second = ranks.run(_train, world=2)
    alone = ranks.run(_train)
    assert first.keys() == alone.keys() and second.keys() == {"seen"}, "rank 0 has the whole"
    for name, value in alone.items():
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(value), rtol=0, atol=CLOSE)
