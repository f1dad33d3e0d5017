"""A scheduler's decay as growth of the batch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import elastic_ray as er
from elastic_ray.adaptation import PolicyError, PolicyView, SetBatch
from elastic_ray.adaptation.policies.seesaw import GROWTH, Seesaw
from elastic_ray.batch.scaling_rules import Adam, Linear
from elastic_ray.parallel.schedulers import rules_of
from elastic_ray.run.current import set_session
from placement.goodput.model import NoiseScale
from tests.loop.changing import Change, Kill, run_job

FIRST = 8


@pytest.fixture(autouse=True)
def alone() -> Any:
    set_session(None)
    yield
    set_session(None)


def batches(
    rates: list[float], most: int = 1 << 20, noise: Callable[[int], NoiseScale | None] = lambda at: None
) -> list[int]:
    """The batch after each step, whose scheduled rate is given."""
    policy, found = Seesaw(), list[int]()
    view = PolicyView(initial_batch_size=FIRST, max_batch_size=most)
    answer = policy.before_train(view)
    assert answer == SetBatch(FIRST)
    for at, rate in enumerate(rates):
        view = PolicyView(
            initial_batch_size=FIRST, max_batch_size=most, learning_rates=(rate, 3 * rate), noise=noise(at)
        )
        policy.after_step(view)
        found.append(policy.asked)
    return found


def test_each_halving_of_the_rate_doubles_the_batch() -> None:
    assert batches([0.1, 0.1, 0.05, 0.05, 0.025, 0.0125]) == [8, 8, 16, 16, 32, 64]


def test_warm_up_changes_nothing_and_a_restart_goes_back() -> None:
    assert batches([0.0, 0.05, 0.1, 0.1, 0.025, 0.1, 0.05]) == [8, 8, 8, 8, 32, 8, 16]


@given(st.integers(10, 400), st.integers(FIRST, 4096))
def test_cosine_is_followed_within_the_least_growth(steps: int, most: int) -> None:
    rates = [0.5 * (1 + math.cos(math.pi * at / steps)) for at in range(steps + 1)]
    found = batches(rates, most)
    assert found == sorted(found) and found[0] == FIRST and found[-1] == most
    for rate, batch in zip(rates, found, strict=True):
        ideal = min(most, FIRST / rate) if rate > 0 else most
        assert ideal / (GROWTH + 1 / FIRST) - 1 <= batch <= ideal


@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=40), st.integers(FIRST, 500))
def test_rate_and_batch_keep_the_product_of_the_schedule(decays: list[float], most: int) -> None:
    """Rate / sqrt(batch) of an Adam, and rate / batch of SGD, are those of the schedule at the initial batch."""
    rates = list(itertools.accumulate([0.3, *decays], lambda a, b: a * b))
    for rule, power in ((Adam(by_noise=False), 0.5), (Linear(), 1.0)):
        for rate, batch in zip(rates, batches(rates, most), strict=True):
            (factor,) = rule.factors(batch / FIRST, [None], 0.0)
            assert rate * factor / batch**power == pytest.approx(rate / FIRST**power)
            assert rate * factor <= 0.3 * (1 + 1e-9), "never above the highest rate of the schedule"


def test_measured_noise_is_a_cap() -> None:
    def noise(at: int) -> NoiseScale:
        return NoiseScale(sqr=-1.0 if at < 2 else 1.0, var=3.0 if at < 6 else 1.0)  # 24 samples, then 8

    rates = [1.0, 0.5, 0.5, 0.25, 0.125, 0.1, 0.05, 1.0]
    assert batches(rates, noise=noise) == [8, 8, 16, 24, 24, 24, 24, 8]


def test_rules_are_those_of_the_optimizers_kind() -> None:
    parts = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    given = [torch.optim.AdamW(parts[:1]), torch.optim.SGD(parts[1:], lr=0.1)]
    assert rules_of(None, "seesaw", given) == [Adam(by_noise=False, least_beta2=0.95), Linear()]
    with pytest.raises(ValueError, match="scaling_rule must be left out, but got 'linear'"):
        rules_of("linear", "seesaw", given)


SAMPLES, EPOCHS = 96, 4
PLANNED = SAMPLES // FIRST * EPOCHS


def train(most: int = 16, kind: Any = torch.optim.SGD) -> tuple[list[tuple[int, float]], int]:
    """Batch, and factor of the rate over the highest scheduled one, of each step; the scheduler's count."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = kind(model.parameters(), lr=1e-3)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 12))
    made = dict[int, tuple[int, float]]()
    wrapped = er.AdaptiveDataParallel(model, optimizer, decay, schedule="seesaw")
    loader = er.AdaptiveDataLoader(
        torch.utils.data.TensorDataset(torch.linspace(-2, 2, SAMPLES)[:, None]), batch_size=FIRST, seed=1
    )
    loader.autoscale_batch_size(most)

    def note(stepped: Any, args: Any, kwargs: Any) -> None:
        at = er.get_context().get_global_step()
        made[at] = loader.current_batch_size, stepped.param_groups[0]["lr"] / 1e-3

    optimizer.register_step_pre_hook(note)
    for _ in er.remaining_epochs_until(EPOCHS):
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x).mean().backward()  # whose gradient is noise alone
            optimizer.step()
            decay.step()
    return [made[step] for step in sorted(made)], decay.last_epoch


@pytest.mark.parametrize(("kind", "power"), [(torch.optim.SGD, 1.0), (torch.optim.AdamW, 0.5)])
def test_steps_have_the_batch_and_the_rate(kind: Any, power: float) -> None:
    steps, counted = train(most=24, kind=kind)
    sizes = [size for size, _ in steps]
    assert sizes == sorted(sizes) and set(sizes) <= {8, 16, 24} and sizes[-1] > 8 and counted == PLANNED
    assert len(steps) < 0.8 * PLANNED
    at = 0
    for size, rate in steps:
        scheduled = 0.5 ** (at // 12)
        at += size // FIRST
        if kind is torch.optim.SGD:  # Adam's rate has the correction of its bias in it as well
            assert rate == pytest.approx(scheduled * (size / FIRST) ** power)


@pytest.mark.parametrize("script", [[Change(4, (1, 2))], [Kill(7, 2, "backward")]])
def test_so_it_is_through_changes_of_the_group(script: list[Any]) -> None:
    first = (1,) if isinstance(script[0], Change) else (1, 2)
    for steps, counted in run_job(train, script, first=first).results.values():
        assert counted == PLANNED and steps[-1][0] == 16
        assert all(rate <= 1 + 1e-9 for _, rate in steps)


def made(scheduler: Callable[[Any], Any], **more: Any) -> None:
    """Wrap a model whose scheduler this makes."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    er.AdaptiveDataParallel(model, optimizer, scheduler(optimizer), schedule="seesaw", **more)


class ByItself:
    """A scheduler of nobody's kind."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        """Nothing."""


schedulers = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (lambda o: None, "lr_scheduler is None"),
        (schedulers.ReduceLROnPlateau, "cannot read ReduceLROnPlateau: its rate goes by a metric"),
        (ByItself, "cannot read ByItself: it is no torch.optim.lr_scheduler.LRScheduler"),
        (
            lambda o: schedulers.LambdaLR(o, lambda at: random.random()),
            "cannot read LambdaLR: its function gives another",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(scheduler: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(scheduler)


def test_groups_that_decay_differently_are_refused() -> None:
    policy = Seesaw()
    policy.after_step(PolicyView(initial_batch_size=8, max_batch_size=64, learning_rates=(0.1, 0.2)))
    with pytest.raises(ValueError, match=r"one scheduler factor for all parameter groups.*0.5 to 1 of their highest"):
        policy.after_step(PolicyView(initial_batch_size=8, max_batch_size=64, learning_rates=(0.05, 0.2)))


def test_batch_that_may_not_grow_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"the loader's is fixed at [0-9]+: call loader.autoscale_batch_size"):
        loop_without_limits()


def loop_without_limits() -> None:
    """Train with a fixed batch."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decay = schedulers.LinearLR(optimizer)
    wrapped = er.AdaptiveDataParallel(model, optimizer, decay, schedule="seesaw")
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 1)), batch_size=2):
            wrapped(x).sum().backward()
            optimizer.step()


def test_scheduler_that_is_given_a_metric_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decay = schedulers.LinearLR(optimizer)
    er.AdaptiveDataParallel(model, optimizer, decay, schedule="seesaw")
    with pytest.raises(ValueError, match=r"stepped with arguments.*LinearLR.step\(\) got \(3,\)"):
        decay.step(3)


def test_measured_critical_batch_bounds_growth_and_takes_back() -> None:
    policy = Seesaw()
    policy.before_train(PolicyView(initial_batch_size=FIRST, max_batch_size=1 << 20))
    asked = []
    for rate, critical in ((0.1, None), (0.0125, None), (0.0125, 40), (0.00625, 40), (0.00625, 100), (0.00625, 2)):
        policy.after_step(
            PolicyView(
                initial_batch_size=FIRST, max_batch_size=1 << 20, learning_rates=(rate,), critical_batch=critical
            )
        )
        asked.append(policy.asked)
    assert asked == [8, 64, 40, 40, 100, 8]


def test_growth_is_taken_to_go_on_as_it_did() -> None:
    policy, told = Seesaw(), []
    facts = {"initial_batch_size": FIRST, "max_batch_size": 64}
    policy.before_train(PolicyView(**facts))
    for samples, rate in ((0, 0.1), (100, 0.05), (300, 0.025), (350, 0.025), (500, 0.0125)):
        view = PolicyView(samples=samples, learning_rates=(rate,), **facts)
        policy.after_step(view)
        told.append(policy.coming_batches(view))
    assert told == [(), (), [(200.0, 64), (400.0, 64)], [(150.0, 64), (350.0, 64)], []]
