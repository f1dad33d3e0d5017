"""Schedules by progress: a decay over the steps of the initial batch ends where it should, however batches grow."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elastic_ray as er
from elastic_ray.adaptation import Policy, PolicyView, SetBatch
from elastic_ray.batch.limits import BatchChoice
from elastic_ray.run.current import set_session
from elastic_ray.state.progress import PassProgress
from elastic_ray.steps.ledger import StepLedger
from elastic_ray.steps.step import LoaderStep
from tests.loop.changing import Change, Kill, run_job

SAMPLES, FIRST, EPOCHS = 48, 4, 3
PLANNED = SAMPLES // FIRST * EPOCHS


class Grows(Policy):
    """Doubles the batch with each epoch."""

    def before_epoch(self, view: PolicyView) -> Any:
        return SetBatch(FIRST * 2**view.epoch)


def train(schedule: str | None = None, policy: Policy | None = None) -> tuple[float, int, int]:
    """A linear decay over the planned steps: the last rate, the scheduler's count, optimizer steps."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / PLANNED)
    once = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
    options: dict[str, Any] = {} if schedule is None else {"schedule": schedule}
    wrapped = er.AdaptiveDataParallel(model, optimizer, [decay, once], scaling_rule="none", policy=policy, **options)
    loader = er.AdaptiveDataLoader(
        torch.utils.data.TensorDataset(torch.linspace(-2, 2, SAMPLES)[:, None]), batch_size=FIRST
    )
    if policy is not None:
        loader.autoscale_batch_size(SAMPLES)
    for _ in er.remaining_epochs_until(EPOCHS):
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            decay.step()
        once.step()
    assert once.last_epoch == EPOCHS, "a scheduler of epochs counts them"
    return optimizer.param_groups[0]["lr"] / 1e-3, decay.last_epoch, er.get_context().get_global_step()


def test_by_progress_a_decay_ends_with_the_data() -> None:
    set_session(None)
    assert train() == (pytest.approx(0.0, abs=1e-9), PLANNED, PLANNED)
    set_session(None)
    rate, counted, steps = train(policy=Grows())
    assert steps < 0.7 * PLANNED and counted == PLANNED and rate == pytest.approx(0.0, abs=1e-9)
    set_session(None)


def test_by_steps_it_counts_what_the_optimizer_does() -> None:
    set_session(None)
    _, counted, steps = train("steps", Grows())
    assert counted == steps < PLANNED
    set_session(None)


@pytest.mark.parametrize("script", [[Change(4, (1, 2)), Change(9, (2,))], [Kill(5, 2, "allreduce")]])
def test_and_so_it_does_when_the_group_changes(script: list[Any]) -> None:
    first = (1,) if isinstance(script[0], Change) else (1, 2)
    for rate, counted, _ in run_job(lambda: train(policy=Grows()), script, first=first).results.values():
        assert counted == PLANNED and rate == pytest.approx(0.0, abs=1e-9)


class _State:
    """Nothing that a step takes back."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.mark.thorough
@given(
    samples=st.integers(1, 500),
    first=st.integers(1, 60),
    batches=st.lists(st.integers(1, 200), min_size=1, max_size=600),
)
@settings(max_examples=200, deadline=None)
def test_steps_of_a_pass_add_up(samples: int, first: int, batches: list[int]) -> None:
    ledger = StepLedger(_State())
    counted, position = 0, 0
    while position < samples:
        batch = min(batches[counted % len(batches)], samples - position)
        ledger.depth = 1
        ledger.step = ledger.outermost = LoaderStep(
            loader_pass=PassProgress(position=position),
            total=samples,
            sizes=[[batch]],
            scale=1.0,
            init_batch_size=first,
            shape=BatchChoice(atomic_bsz=batch),
            ordinal=0,
            can_switch=lambda world_size: True,
        )
        counted += ledger.initial_steps
        position += batch
    assert counted == math.ceil(samples / first)


@pytest.mark.parametrize("wrong", ["epochs", "", None, 1])
def test_another_way_to_count_is_refused(wrong: Any) -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="schedule must be one of 'progress', 'steps', 'seesaw', but got"):
        er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=wrong)
