"""``optimizer.step(closure)`` in the loops of others: the same training, whatever the group does meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import elastic_ray as er
from elastic_ray.run.current import set_session
from tests.loop.changing import Change, Kill, run_job
from tests.loop.small_net import net, rows, weights


def train(*, by_closure: bool = True, micro: int | None = None) -> tuple[Tensor, list[float]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(rows(), batch_size=8, seed=3)
    if micro is not None:
        loader.autoscale_batch_size(8, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    values = []
    for _ in er.remaining_epochs_until(2):
        for (x,) in loader:

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = wrapped(x).square().mean()
                loss.backward()
                return loss

            if by_closure:
                with torch.no_grad():  # as torch's own step, which calls it with gradients all the same
                    values.append(float(optimizer.step(closure)))
            else:
                values.append(float(closure()))
                optimizer.step()
    return weights(model), values


@pytest.mark.parametrize("micro", [None, 2])
def test_it_is_called_once_per_micro_batch_valued(micro: int | None) -> None:
    set_session(None)
    plain = train(by_closure=False, micro=micro)
    set_session(None)
    called = train(micro=micro)
    set_session(None)
    assert torch.equal(plain[0], called[0]) and plain[1] == called[1]


@pytest.mark.parametrize(
    "script", [[Change(3, (1, 2)), Change(8, (2,))], [Kill(4, 2, "allreduce")], [Kill(5, 1, "edge")]]
)
def test_so_it_is_when_the_group_changes(script: Sequence[Change | Kill]) -> None:
    first = (1,) if isinstance(script[0], Change) else (1, 2)
    alone = run_job(train).results[1][0]
    for found, _ in run_job(train, script, first=first).results.values():
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-9)


class Twice(torch.optim.SGD):
    """Looks ahead, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            value = closure()
        super().step()
        return value


def test_a_second_call_is_refused() -> None:
    set_session(None)
    model = net()
    optimizer = Twice(model.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    (x,) = next(iter(er.AdaptiveDataLoader(rows(), batch_size=8)))

    def closure() -> Tensor:
        loss: Tensor = wrapped(x).square().mean()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="this optimizer calls the closure several times"):
        optimizer.step(closure)
    set_session(None)
