"""What a model and a dataset tell of how long a step takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from elastic_ray.data.arguments import describe_sample
from elastic_ray.parallel.signature import describe_model


def told(module: torch.nn.Module, kind: Any = torch.optim.SGD, *, amp: bool = False, **options: Any) -> Any:
    return describe_model(module, kind(module.parameters(), **{"lr": 0.1, **options}), amp=amp)


def test_seeds_and_learning_rates_are_no_other_model() -> None:
    torch.manual_seed(1)
    one = told(torch.nn.Linear(3, 2))
    torch.manual_seed(2)
    assert told(torch.nn.Linear(3, 2), lr=0.5, weight_decay=0.1) == one
    assert one.kind == "Linear"


@pytest.mark.parametrize(
    "other",
    [
        lambda: told(torch.nn.Linear(4, 2)),
        lambda: told(torch.nn.Linear(3, 2, bias=False)),
        lambda: told(torch.nn.Linear(3, 2).double()),
        lambda: told(torch.nn.Linear(3, 2), torch.optim.Adam),
        lambda: told(torch.nn.Linear(3, 2), amp=True),
        lambda: told(torch.nn.Sequential(torch.nn.Linear(3, 2))),
    ],
    ids=["shape", "parameters", "type", "optimizer", "AMP", "class"],
)
def test_what_changes_the_time_of_a_step_is_another_model(other: Any) -> None:
    assert other() != told(torch.nn.Linear(3, 2))


class Slow(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is to be loaded")


def test_samples_are_told_without_loading_one() -> None:
    images = TensorDataset(torch.zeros(5, 3, 8, 8), torch.zeros(5, dtype=torch.int64))
    assert describe_sample(images) == "TensorDataset (3, 8, 8) torch.float32 () torch.int64"
    assert describe_sample(Subset(images, [0, 1])) == describe_sample(images)
    assert describe_sample(Slow()) == "Slow"
