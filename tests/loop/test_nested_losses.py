"""A worker that is lost in an evaluation within a step of training: that continues, and the step is drawn again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.loop.api import current_session
from tests.loop.changing import Kill, run_job
from tests.sync.sharded_parameters.sharded import Net, data, sharded_net

STEPS, EVALUATED = 8, 24


def in_groups() -> Net:
    """Sharded in groups of two."""
    return sharded_net(shard_size=2)


class Nested:
    """One worker's run: evaluates in the sixth step of each epoch, at a place of it."""

    def __init__(self, model: Callable[[], Net], place: str, strategy: str | None = None) -> None:
        torch.manual_seed(0)
        self.model = model()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-2)
        options = {"strategy": strategy} if strategy else {}
        self.wrapped = er.AdaptiveDataParallel(self.model, optimizer, scaling_rule="none", **options)
        self.loader = er.AdaptiveDataLoader(TensorDataset(*data()[:EVALUATED]), batch_size=6, shuffle=False)
        self.sums: list[dict[str, float]] = []
        train = er.AdaptiveDataLoader(data(), batch_size=12, seed=3, drop_last=True)
        for _ in er.remaining_epochs_until(1):
            for x, y in train:
                here = place if er.get_context().get_global_step() % STEPS == 5 else ""
                self.evaluate(here == "before")
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.wrapped(x), y)
                self.evaluate(here == "forward")
                loss.backward()
                self.evaluate(here == "backward")
                optimizer.step()
                self.evaluate(here == "update")
        self.steps = er.get_context().get_global_step()
        self.parameters = dict(self.model.state_dict())

    def evaluate(self, now: bool) -> None:
        """The mean loss over some samples."""
        if not now:
            return
        total = er.Accumulator()
        for x, y in self.loader:
            step: Any = current_session().ledger.step
            if step.loader_pass.position == 12:
                current_session().moment("validation")
            with torch.no_grad():
                total["loss"] += nn.functional.cross_entropy(self.wrapped(x), y, reduction="sum").item()
            total["samples"] += len(x)
        self.sums.append(dict(total))


@pytest.mark.matrix(every=12)
@pytest.mark.parametrize(
    ("model", "strategy", "place"),
    [
        *((Net, None, place) for place in ("before", "backward", "update")),
        *((sharded_net, None, place) for place in ("before", "backward", "update")),
        *((in_groups, None, place) for place in ("before", "backward")),
        (Net, "zero1", "backward"),
        (Net, "zero2", "backward"),
    ],
)
@pytest.mark.parametrize("lost", [1, 3])
def test_worker_is_lost_in_an_evaluation_within_a_step(
    model: Callable[[], Net], strategy: str | None, place: str, lost: int
) -> None:
    (alone,) = run_job(lambda: Nested(Net, place), first=(1,)).results.values()
    script = [Kill(5, lost, "validation")]
    found = run_job(lambda: Nested(model, place, strategy), script, first=(1, 2, 3, 4))
    assert len(found.groups) == 3, "the step is drawn again after its evaluation"
    for own in found.results.values():
        assert own.steps == STEPS
        for sums in own.sums:  # also of the step that was drawn again
            assert sums["samples"] == EVALUATED
            assert sums["loss"] == pytest.approx(alone.sums[0]["loss"], abs=1e-4)
    first = found.results[min(found.results)]
    for name, value in alone.parameters.items():
        torch.testing.assert_close(first.parameters[name], value, rtol=0, atol=2e-5)


def test_call_of_sharded_model_does_not_outlive_its_group() -> None:
    with pytest.raises(RuntimeError, match="Evaluate before the model is called"):
        run_job(lambda: Nested(sharded_net, "forward"), [Kill(5, 3, "validation")], first=(1, 2, 3, 4))
