"""Batches that grow with the workers: each worker has its own number of samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.batch.limits import BatchLimits
from elastic_ray.batch.reports import LoaderInfo
from elastic_ray.batch.tuner import BatchTuner
from elastic_ray.run.current import set_session
from elastic_ray.run.registry import LoaderRegistry
from tests.loop.changing import Change, Kill, run_job

SAMPLES, EPOCHS, EACH, RATE = 96, 3, 4, 0.01


class Watched(torch.optim.SGD):
    """An optimizer that keeps the rates of its steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=RATE)
        self.rates: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


def data() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(5)))


def train() -> tuple[set[tuple[int, int, int]], set[float], list[int]]:
    """(workers, global batch, samples of one) of full steps, the rates over the first, and each epoch's samples."""
    model = torch.nn.Linear(1, 1)
    optimizer = Watched(model.parameters())
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="linear")
    loader = er.AdaptiveDataLoader(data(), batch_size=EACH, scale_with_workers=True, seed=1)
    shapes, samples = set[tuple[int, int, int]](), []
    for _ in er.remaining_epochs_until(EPOCHS):
        totals = er.Accumulator()
        for (x,) in loader:
            shapes.add((er.get_context().get_world_size(), loader.current_batch_size, loader.current_local_bsz))
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            totals["samples"] += len(x)
        samples.append(int(totals["samples"]))
    return shapes, {round(rate / RATE, 6) for rate in optimizer.rates}, samples


@pytest.mark.parametrize("script", [[Change(6, (1, 2, 3, 4)), Change(12, (2,))], [Kill(7, 2, "backward")]])
def test_each_worker_keeps_its_samples_whoever_comes_and_goes(script: list[Any]) -> None:
    shapes, factors, samples = run_job(train, script, first=(1, 2)).results[2 if len(script) > 1 else 1]
    assert {(world, world * EACH, EACH) for world, _, _ in shapes} == shapes and len(shapes) > 1
    assert samples == [SAMPLES] * EPOCHS
    assert factors >= {2.0}, "the linear rule: two workers, twice the rate"


def test_the_tuner_knows_no_other_batch() -> None:
    tuner = BatchTuner(BatchLimits(init_batch_size=4, max_batch_size=96, local_bsz_bounds=(4, 4)))
    for workers in (1, 3, 2, 24):
        decision = tuner.decide(1, workers, None)
        assert (decision.batch_size, decision.choice.atomic_bsz, decision.hindered) == (4 * workers, 4, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch_size": [(0, 4), (0.5, 8)]}, "needs one batch_size of each worker, but got a ramp"),
        ({"batch_tokens": 8, "tokens_per_sample": 2}, "but got a ramp of batch_size, or batch_tokens: leave one out"),
        ({"batch_size": 4, "whole_batches": True}, "but got whole_batches"),
        ({"batch_size": SAMPLES + 1}, "max_batch_size must be at most"),
    ],
)
def test_what_else_decides_the_batch_is_refused(arguments: dict[str, Any], said: str) -> None:
    set_session(None)
    with pytest.raises(ValueError, match=said):
        er.AdaptiveDataLoader(data(), scale_with_workers=True, **arguments)
    set_session(None)


def test_neither_job_nor_user_chooses_beside_it() -> None:
    set_session(None)
    loader = er.AdaptiveDataLoader(data(), batch_size=4, scale_with_workers=True)
    with pytest.raises(RuntimeError, match="a loader has scale_with_workers=True: the job does not choose"):
        loader.autoscale_batch_size(64)
    set_session(None)
    limits = BatchLimits(init_batch_size=4, max_batch_size=SAMPLES, local_bsz_bounds=(4, 4))
    with pytest.raises(ValueError, match=r"ElasticConfig\(fixed_batch=True\) contradict"):
        LoaderRegistry(fixed_batch=True).lead(loader, LoaderInfo(limits=limits))
