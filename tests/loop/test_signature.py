"""What a model and a dataset tell of how long a step takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import elastic_ray as er
from elastic_ray.data.arguments import describe_sample
from elastic_ray.parallel.model_copy import describe_model
from elastic_ray.run.current import session_of_thread
from elastic_ray.sync.sharded_parameters.model_checks import SHARDED
from tests.loop.changing import run_job


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
def test_what_changes_time_of_a_step_is_another_model(other: Any) -> None:
    assert other() != told(torch.nn.Linear(3, 2))


def layout(shard_size: int | None) -> tuple[Any, str | None]:
    """What is reported of a sharded model, and what keeps its step times apart from others'."""
    session = session_of_thread()
    model = er.fully_shard(torch.nn.Linear(3, 2), shard_size=shard_size)
    wrapped = er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert wrapped.strategy == SHARDED and session is not None
    for _ in er.remaining_epochs_until(1):
        list(er.AdaptiveDataLoader(TensorDataset(torch.zeros(2, 3)), batch_size=2))
    return session.registry.models.infos, session.registry.strategy_key


def test_layouts_of_a_sharded_model_are_other_models() -> None:
    of = {size: run_job(lambda: layout(size), first=(1,)).results[1] for size in (None, 2, 4)}  # noqa: B023
    assert len({infos for infos, _ in of.values()}) == len({key for _, key in of.values()}) == 3
    model = er.fully_shard(torch.nn.Linear(3, 2))
    before = describe_model(model, torch.optim.SGD(model.parameters(), lr=0.1), amp=False, strategy=SHARDED)
    assert of[None] == ((before,), "fully_shard"), "what earlier jobs have measured still serves"


class Slow(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is to be loaded")


def test_samples_are_told_without_loading_one() -> None:
    images = TensorDataset(torch.zeros(5, 3, 8, 8), torch.zeros(5, dtype=torch.int64))
    assert describe_sample(images) == "TensorDataset (3, 8, 8) torch.float32 () torch.int64"
    assert describe_sample(Subset(images, [0, 1])) == describe_sample(images)
    assert describe_sample(Slow()) == "Slow"
