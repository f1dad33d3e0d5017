"""Hooks of an optimizer that steps tiles: they see whole parameters, as every rank has them, also after a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.sync.step_hooks import InnerHook, StepHooks
from tests.loop.changing import Change, Hold, Kill, Outcome, run_job
from tests.sync.tiles.trained import BATCH, EPOCHS, STEPS, Net, data


class WithAverage(nn.Module):
    """A net, and an average of its weights that moves with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.average = Net(), Net().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Run:
    """One worker's: gradients are clipped before the step, and the average moves after it, both in hooks."""

    def __init__(self, strategy: str) -> None:
        module = WithAverage()
        optimizer = torch.optim.AdamW(module.net.parameters(), lr=0.01)
        self.before = self.after = 0

        def clip(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self.before += 1
            nn.utils.clip_grad_norm_([p for group in stepped.param_groups for p in group["params"]], 0.1)

        @torch.no_grad()
        def follow(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self.after += 1
            now = [p for group in stepped.param_groups for p in group["params"]]
            torch._foreach_lerp_(list(module.average.parameters()), now, 0.1)

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(follow)
        wrapped = er.AdaptiveDataParallel(module, optimizer, scaling_rule="none", strategy=strategy)
        loader = er.AdaptiveDataLoader(data(), batch_size=BATCH, seed=3, drop_last=True)
        for _ in er.remaining_epochs_until(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
        self.parameters = [p.detach().clone() for p in module.parameters()]


def check(strategy: str, script: Sequence[Change | Kill | Hold], first: tuple[int, ...]) -> Outcome:
    """All workers end with the average of one process, up to rounding."""
    (alone,) = run_job(lambda: Run("all_reduce"), [], first=(1,)).results.values()
    found = run_job(lambda: Run(strategy), script, first=first)
    for own in found.results.values():
        for mine, theirs in zip(own.parameters, alone.parameters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    return found


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_they_see_whole_parameters(strategy: str) -> None:
    found = check(strategy, [], (1, 2, 3))
    assert all(own.before == own.after == STEPS for own in found.results.values())


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_the_group_changes(strategy: str) -> None:
    check(strategy, [Change(3, (1, 2, 3, 4)), Kill(9, 2, "after_step", last=True), Change(15, (3, 4, 5))], (1, 2, 3))


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("joins", [(), (5,)])
@pytest.mark.parametrize("heard", [(), (1,), (1, 2)])
def test_a_loss_while_parameters_are_on_their_way(heard: tuple[int, ...], joins: tuple[int, ...]) -> None:
    """Some ranks have called the hooks by then, others owe them: those behind, and newcomers, take over either."""
    script = [Kill(3, 4, "publish", after=heard, joins=joins)]
    check("zero1", script, (1, 2, 3, 4))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("held", [(2,), (1, 2), (1, 2, 3)])
def test_loss_before_all_know_that_the_update_is_decided(held: tuple[int, ...]) -> None:
    check("zero1", [Kill(3, 4, "publish"), *(Hold(3, worker, "vote") for worker in held)], (1, 2, 3, 4))


def test_what_hooks_return_is_taken_or_refused() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    inner: list[int] = []
    optimizer.register_step_pre_hook(InnerHook(lambda *_: inner.append(1)))
    changing = optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "scale": 2}))
    hooks = StepHooks(optimizer)
    assert hooks.before({"kept": 1}) == {"kept": 1, "scale": 2} and not inner
    changing.remove()
    for wrong, message in ((3, "must return None or"), (((optimizer, 1), {}), "positional arguments")):
        handle = optimizer.register_step_pre_hook(lambda *_, wrong=wrong: wrong)
        with pytest.raises(RuntimeError, match=message):
            hooks.before({})
        with hooks.left_out():
            optimizer.step()
        handle.remove()
    assert len(inner) == 2


def test_hook_may_remove_and_add_others() -> None:
    """As with torch alone: hooks after an update remove one of those before it, or add one."""
    model, called = nn.Linear(2, 1), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    once = optimizer.register_step_pre_hook(lambda *_: called.append("once"))

    def change(*_: Any) -> None:
        if "added" not in called:
            called.append("change")
            once.remove()
            optimizer.register_step_pre_hook(lambda *_: called.append("added"))

    optimizer.register_step_post_hook(change)
    hooks = StepHooks(optimizer)
    for _ in range(2):
        hooks.before({})
        with hooks.left_out(after=False):
            optimizer.step()
    assert called == ["once", "change", "added"]
