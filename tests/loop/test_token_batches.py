"""Batches that are declared in tokens, on every worker and through changes of the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.run.current import set_session
from elastic_ray.sync import LocalSGD
from tests.loop.changing import Change, Kill, run_job

LENGTH, SAMPLES, EPOCHS = 8, 96, 2


@pytest.fixture(autouse=True)
def alone() -> Any:
    set_session(None)
    yield
    set_session(None)


def texts() -> torch.utils.data.TensorDataset:
    """Padded sequences of which half of the tokens count."""
    counts = (torch.arange(LENGTH) < LENGTH // 2).float().expand(SAMPLES, LENGTH).clone()
    x = torch.randn(SAMPLES, LENGTH, generator=torch.Generator().manual_seed(5))
    return torch.utils.data.TensorDataset(x, counts)


def train(
    weigh: Callable[[int], bool] = lambda step: True,
    seen: Callable[[Any], None] = lambda loader: None,
    empty: int = 0,
    strategy: Any = None,
    **batch: Any,
) -> list[list[int]]:
    """Samples of each step, by epoch."""
    model = torch.nn.Linear(LENGTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
    loader = er.AdaptiveDataLoader(texts(), seed=1, **batch)
    epochs, at = list[list[int]](), er.get_context().get_global_step
    for _ in er.remaining_epochs_until(EPOCHS):
        steps = dict[int, int]()
        totals = er.Accumulator()
        for x, counts in loader:
            if weigh(at()):
                loader.weigh(counts.sum().item() * (at() >= empty))
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            steps[at()] = loader.current_batch_size
            totals["samples"] += len(x)
        assert totals["samples"] == SAMPLES
        epochs.append([steps[step] for step in sorted(steps)])
        seen(loader)
    return epochs


def test_batch_in_tokens_is_so_many_samples() -> None:
    loader = er.AdaptiveDataLoader(texts(), batch_tokens=128, tokens_per_sample=16)
    assert (loader.batch_size, len(loader), loader.max_batch_size) == (8, 12, None)
    capped = er.AdaptiveDataLoader(texts(), batch_tokens=128, tokens_per_sample=16, max_batch_tokens="0.5K")
    assert capped.max_batch_size == 31


def test_counted_tokens_make_the_batch() -> None:
    first, second = train(batch_tokens=64, tokens_per_sample="weigh")
    assert first[0] == 8 and set(first[1:]) == {16} and set(second) == {16}


@pytest.mark.parametrize("script", [[Change(3, (1, 2, 3))], [Kill(3, 2, "backward")]])
def test_so_it_is_through_changes_of_the_group(script: list[Any]) -> None:
    outcome = run_job(lambda: train(batch_tokens=64, tokens_per_sample="weigh"), script, first=(1, 2))
    assert all(size == 16 for epochs in outcome.results.values() for size in epochs[-1])


def test_ramp_counts_tokens() -> None:
    ramp = [(0, 8 * LENGTH), (48 * LENGTH, 16 * LENGTH), ("1.1K", 32 * LENGTH)]
    first, second = train(weigh=lambda step: False, batch_tokens=ramp, tokens_per_sample=LENGTH)
    # 48 samples after six steps; 1100 tokens are 138 samples; a batch counts one step after it was asked for.
    assert first == [8] * 7 + [16] * 3 and second == [16] * 4 + [32]


@pytest.mark.parametrize("weigh", [lambda step: False, lambda step: step < 3, lambda step: step % 2 == 0])
def test_tokens_that_are_not_counted_are_refused(weigh: Callable[[int], bool]) -> None:
    with pytest.raises(RuntimeError, match=r"a step has trained without loader.weigh\(n\)"):
        train(weigh=weigh, batch_tokens=64, tokens_per_sample="weigh")


def test_steps_without_a_token_change_no_batch() -> None:
    first, _ = train(empty=3, batch_tokens=64, tokens_per_sample="weigh")
    assert first[:4] == [8] * 4 and first[4] > 16  # the mean is over the empty samples as well
    assert train(empty=99, batch_tokens=64, tokens_per_sample="weigh") == [[8] * 12] * 2


def test_changed_group_keeps_a_ramp_in_tokens() -> None:
    ramp = [(0, 64), (300, 128), (600, 256)]
    script = [Change(3, (1, 2, 3)), Change(9, (2, 3))]
    outcome = run_job(
        lambda: train(lambda step: False, batch_tokens=ramp, tokens_per_sample=LENGTH), script, first=(1, 2)
    )
    # The batch on three workers is the nearest that they divide. 300 tokens are 38 samples, 600 are 75.
    assert outcome.results[2] == [[8, 8, 8, 8, 9, 9, 18, 18, 18], [30, 32, 32, 32]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": 3}, "neither batch_size=3"),
        ({"batch_sampler": [[0, 1]], "whole_batches": True}, "nor a batch_sampler"),
    ],
)
def test_batch_is_declared_once(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        er.AdaptiveDataLoader(texts(), batch_tokens=64, tokens_per_sample=LENGTH, **given)


def test_cap_beyond_the_epoch_is_refused() -> None:
    with pytest.raises(
        ValueError, match="max_batch_tokens must be at most an epoch's 96 samples of 8 tokens, but got 1000"
    ):
        er.AdaptiveDataLoader(texts(), batch_tokens=64, tokens_per_sample=LENGTH, max_batch_tokens="1K")


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("first", ["counted", "other"])
def test_steps_of_other_loaders_count_for_none(first: str, weighs: bool) -> None:
    model = torch.nn.Linear(LENGTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    given: dict[str, dict[str, Any]] = {
        "counted": {"batch_tokens": 64, "tokens_per_sample": "weigh"},
        "other": {"batch_size": SAMPLES},
    }
    order = sorted(given, key=lambda name: name != first)
    made = {name: er.AdaptiveDataLoader(texts(), seed=1, **given[name]) for name in order}
    for _ in er.remaining_epochs_until(EPOCHS):
        for name, loader in made.items():
            for x, counts in loader:
                if name == "counted" or weighs:
                    loader.weigh(counts.sum().item() * (1 if name == "counted" else 100))
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
    assert made["counted"].current_batch_size == 16, "as many samples as have 64 tokens"


def test_only_one_loader_counts_tokens() -> None:
    model = torch.nn.Linear(LENGTH, 1)
    er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=1e-3), scaling_rule="none")
    loaders = [er.AdaptiveDataLoader(texts(), batch_tokens=64, tokens_per_sample="weigh") for _ in range(2)]
    for _ in er.remaining_epochs_until(1):
        with pytest.raises(RuntimeError, match="only one AdaptiveDataLoader of a train loop may have"):
            next(iter(loaders[1]))


def test_averaged_models_count_no_tokens() -> None:
    with pytest.raises(RuntimeError, match="cannot be used with strategies that average models"):
        train(strategy=LocalSGD(period=2), batch_tokens=64, tokens_per_sample="weigh")
