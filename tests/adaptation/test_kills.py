"""Workers that die around the step with which a policy's requests apply: those left have applied all, or none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.adaptation import Policy, PolicyView, ScaleRate, SetBatch, SetStrategy
from tests.loop.changing import Change, Kill, Outcome, run_job

_ASKED_AFTER = 3


class Asks(Policy):
    """Asks for three changes at once, and counts its steps."""

    def __init__(self) -> None:
        self.count = 0

    def after_step(self, view: PolicyView) -> Any:
        self.count += 1
        return [SetBatch(24), ScaleRate(0.5), SetStrategy("bf16")] if view.step == _ASKED_AFTER else None


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """A step as a rank finds it when it draws its samples."""

    step: int
    batch: int
    rate: float
    strategy: str
    count: int


def train() -> tuple[list[Seen], list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = Asks()
    wrapped = er.AdaptiveDataParallel(model, optimizer, policy=policy, scaling_rule="none")
    inputs = torch.randn(144, 4, generator=torch.Generator().manual_seed(1))
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(inputs), batch_size=12)
    loader.autoscale_batch_size(48)
    context, seen = er.get_context(), []
    for _ in er.remaining_epochs_until(2):
        for (x,) in loader:
            step, count = context.get_global_step(), policy.count
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            rate = _applied_rate()
            optimizer.step()
            seen.append(Seen(step, loader.current_batch_size, rate, wrapped.strategy.name, count))
    return seen, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def _applied_rate() -> float:
    """What policies have made of the rate."""
    from elastic_ray.loop.api import current_session

    return current_session().adaptation.runner.values.rate_factor


def check(outcome: Outcome) -> None:
    """Of every step that counts all ranks have seen the same, and each request was told once."""
    runs = list(outcome.results.values())
    assert runs and all(parameters == runs[0][1] for _, parameters in runs)
    for seen, _ in runs:
        for each in {each.step: each for each in seen}.values():
            after = each.step > _ASKED_AFTER
            expected = Seen(
                each.step, 24 if after else 12, 0.5 if after else 1.0, "bf16" if after else "all_reduce", each.step
            )
            assert each == expected
    # The controller drops what is repeated with the same number.
    told = {(detail["number"], text) for kind, text, detail in outcome.told if kind == "policy"}
    assert sorted(number for number, _ in told) == [1, 2, 3], told


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("worker", [1, 2])
@pytest.mark.parametrize("step", [_ASKED_AFTER - 1, _ASKED_AFTER, _ASKED_AFTER + 1])
@pytest.mark.parametrize("moment", ["backward", "optimizer_step", "edge"])
def test_kill_leaves_all_of_a_steps_requests_or_none(moment: str, step: int, worker: int) -> None:
    check(run_job(train, [Kill(step, worker, moment)], first=(1, 2, 3)))


@pytest.mark.parametrize("step", [_ASKED_AFTER, _ASKED_AFTER + 1, _ASKED_AFTER + 2])
def test_joiners_have_the_policys_state_and_what_was_applied(step: int) -> None:
    outcome = run_job(train, [Change(step, (1, 2, 3))], first=(1, 2))
    check(outcome)
    assert len(outcome.results) == 3
