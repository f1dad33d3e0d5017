"""Several optimizers of one sharded model: each updates its own parameters' rows, as in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import elastic_ray as er
from elastic_ray.sync.checks import StrategyError
from tests.loop.changing import Change, Hold, Kill, run_job
from tests.sync.sharded_parameters.sharded import BATCH, CLOSE, EPOCHS, Net, data, meta_net, sharded_net
from tests.sync.tiles.saving import Job

Optimizers = list[torch.optim.Optimizer]


def sgd_and_adamw(model: nn.Module) -> Optimizers:
    matrices, rest = [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices[:2]}, {"params": matrices[2:], "lr": 0.02}]
    return [
        torch.optim.SGD(groups, lr=0.05, momentum=0.9),
        torch.optim.AdamW(rest, lr=0.01, eps=1e-2),
    ]


def two_adamw(model: nn.Module) -> Optimizers:
    first, *rest = model.parameters()
    return [torch.optim.AdamW([first], lr=0.02, eps=1e-2), torch.optim.AdamW(rest, lr=0.01, eps=1e-2)]


def schedules(optimizers: Optimizers) -> list[Any]:
    rates = zip(optimizers, (0.9, 0.95), strict=True)
    return [torch.optim.lr_scheduler.ExponentialLR(each, rate) for each, rate in rates]


def one_step(model: Any, plain: nn.Module, optimizers: Optimizers, steppers: Any, x: Tensor, y: Tensor) -> None:
    for each in optimizers:
        each.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    for each in steppers:
        each.step()


def undisturbed(make: Callable[[nn.Module], Optimizers]) -> tuple[dict[str, Tensor], list[Any]]:
    """The same training in a plain loop."""
    model = Net()
    optimizers = make(model)
    steppers = [*optimizers, *schedules(optimizers)]
    for _ in range(EPOCHS):
        for x, y in DataLoader(data(), batch_size=BATCH):
            one_step(model, model, optimizers, steppers, x, y)
    return model.state_dict(), [each.state_dict() for each in optimizers]


def train(
    make: Callable[[nn.Module], Optimizers], sharded: Callable[..., Net] = sharded_net, **options: Any
) -> tuple[int, dict[str, Tensor], list[Any], Any]:
    model = sharded(**options)
    optimizers = make(model)
    followers = schedules(optimizers)
    wrapped = er.AdaptiveDataParallel(model, optimizers, followers, scaling_rule="none", schedule="steps")
    loader = er.AdaptiveDataLoader(data(), batch_size=BATCH, shuffle=False)
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, y in loader:
            one_step(wrapped, model, optimizers, [*optimizers, *followers], x, y)
    saved = [each.state_dict() for each in optimizers]
    return er.get_context().get_world_rank(), model.state_dict(), saved, wrapped.noise_scale


def check(found: Any, make: Callable[[nn.Module], Optimizers], *, close: float = CLOSE) -> None:
    (_, parameters, saved, noise) = next(result for result in found.results.values() if result[0] == 0)
    wanted, states = undisturbed(make)
    assert parameters.keys() == wanted.keys() and noise is not None
    for name, value in wanted.items():
        torch.testing.assert_close(parameters[name], value, rtol=0, atol=close, msg=lambda m: f"{name}: {m}")  # noqa: B023
    for mine, theirs in zip(saved, states, strict=True):
        assert mine["state"].keys() == theirs["state"].keys()
        for index, state in theirs["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(mine["state"][index][key], value, rtol=0, atol=close)
        for group, other in zip(mine["param_groups"], theirs["param_groups"], strict=True):
            assert group["lr"] == pytest.approx(other["lr"])


SCRIPTS = {
    "grows and shrinks": [Change(3, (1, 2, 3)), Change(9, (1, 3))],
    "loses one in a backward pass": [Kill(5, 2, "allreduce"), Change(9, (1, 3))],
    "loses one in the first update": [Kill(5, 2, "optimizer_step"), Change(9, (1, 3))],
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("make", [sgd_and_adamw, two_adamw])
def test_a_changing_group_trains_as_a_plain_loop(make: Any, script: str) -> None:
    found = run_job(lambda: train(make), SCRIPTS[script], first=(1, 2))
    assert len(found.groups) == 3
    assert not [text for kind, text, _ in found.told if kind == "warning"]
    check(found, make)


@pytest.mark.parametrize(("sharded", "options"), [(meta_net, {}), (sharded_net, {"shard_size": 2})])
def test_pairs_train_however_a_model_is_sharded(sharded: Any, options: dict[str, Any]) -> None:
    script = [Change(3, (1, 2, 3, 4)), Change(9, (1, 3))]
    check(run_job(lambda: train(sgd_and_adamw, sharded, **options), script, first=(1, 2)), sgd_and_adamw)


@pytest.mark.parametrize("moment", ["vote", "restore", "after_step"])
@pytest.mark.parametrize("make", [sgd_and_adamw, two_adamw])
def test_ranks_agree_after_loss_between_updates(make: Any, moment: str) -> None:
    """A step whose first update is made is drawn again for the second optimizer alone."""
    found = run_job(lambda: train(make), [Kill(5, 2, moment), Change(9, (1, 3))], first=(1, 2, 3))
    check(found, make, close=2e-2)


@pytest.mark.parametrize("make", [sgd_and_adamw, two_adamw])
def test_rank_that_only_voted_makes_first_update(make: Any) -> None:
    """Worker 3 has voted for the first optimizer's update, and learns from worker 2 that it was made."""
    found = run_job(lambda: train(make), [Hold(5, 3, "vote"), Kill(5, 1, "after_step")], first=(1, 2, 3))
    check(found, make, close=2e-2)


def test_optimizers_load_states_of_their_own() -> None:
    """What one optimizer is given leaves the rows of the other's state as they are."""

    def loading() -> list[Any]:
        model = sharded_net()
        optimizers = two_adamw(model)
        wrapped = er.AdaptiveDataParallel(model, optimizers, scaling_rule="none")
        saved: list[Any] = []
        for epoch in er.remaining_epochs_until(2):
            for x, y in er.AdaptiveDataLoader(data(), batch_size=BATCH, shuffle=False):
                one_step(wrapped, model, optimizers, optimizers, x, y)
            if epoch == 0:
                first, other = optimizers[0].state_dict(), optimizers[1].state_dict()
                for state in first["state"].values():
                    state["exp_avg"].zero_()
                optimizers[0].load_state_dict(first)
                saved += [optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"], other["state"]]
        return saved

    for loaded, kept, before in run_job(loading, [], first=(1,)).results.values():
        assert all(not state["exp_avg"].any() for state in loaded.values()) and loaded
        assert kept.keys() == before.keys()
        assert all(torch.equal(kept[index]["exp_avg"], before[index]["exp_avg"]) for index in before)


class Pair(Optimizers):
    """Both optimizers, for a loop that has one."""

    def zero_grad(self) -> None:
        for each in self:
            each.zero_grad()

    def step(self) -> None:
        for each in self:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        states = [each.state_dict()["state"] for each in self]
        return {"state": {(number, index): own for number, of in enumerate(states) for index, own in of.items()}}


def pair(params: Any) -> Any:
    first, *rest = params
    return Pair([torch.optim.SGD([first], lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=0.01, eps=1e-2)])


@pytest.mark.parametrize("workers", [(1,), (1, 2), (1, 2, 3, 4)])
def test_job_resumes_from_checkpoint_of_both(tmp_path: Path, workers: tuple[int, ...]) -> None:
    def job(name: str, make: Any = sharded_net, **options: Any) -> Job:
        made: Any = {"pair": pair}
        return Job(tmp_path / name, strategy=None, optimizer="pair", optimizers=made, data=data, make=make, **options)

    saving = job("run", at=(3,))
    saving.run((1, 2, 3))
    assert saving.files()[0].parts == 3, "nothing was gathered"
    results = job("second", states=saving.open()).run(workers).results
    wanted = job("plain", make=Net).run((1,)).results[1]
    whole = next(each for each in results.values() if each.rank == 0)
    for value, other in zip(whole.model_state.values(), wanted.model_state.values(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=CLOSE)
    assert whole.state["state"].keys() == wanted.state["state"].keys()
    for index, kept in wanted.state["state"].items():
        for key, value in kept.items():
            torch.testing.assert_close(whole.state["state"][index][key], value, rtol=0, atol=CLOSE)


def test_muon_of_sharded_rows_is_refused_by_name() -> None:
    model = sharded_net()
    matrices, rest = [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim != 2]
    with pytest.raises(StrategyError, match=r"Muon cannot step a sharded model.*own rows"):
        er.AdaptiveDataParallel(model, [torch.optim.AdamW(rest), torch.optim.Muon(matrices)])
