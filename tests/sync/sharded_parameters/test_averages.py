"""Averages of a sharded model's weights: they move with the group, or there is an error that says how they do."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.state.layout import ReplicasDifferError
from elastic_ray.sync import change_parameters
from tests.loop.changing import Change, Hold, Kill, run_job
from tests.sync.sharded_parameters.sharded import CLOSE, Net, data, sharded_net, train_an_epoch


class Averaged(nn.Module):
    """A net and its average."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net, self.average = net, copy.deepcopy(net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x) if self.training else self.average(x)
        return result


@dataclasses.dataclass(frozen=True)
class Case:
    """How it is trained."""

    sharded: bool = True
    shard_size: int | None = None
    micro: int | None = None
    by_hand: bool = False


def follow(average: list[Tensor], now: list[Tensor]) -> None:
    """A tenth of the way."""
    torch._foreach_lerp_(average, now, 0.1)


@dataclasses.dataclass
class Found:
    """What a worker ends with."""

    rank: int
    state: dict[str, Tensor]
    losses: list[float]


def train(case: Case) -> Found:
    """Two epochs; the average is evaluated after each."""
    averaged = Averaged(Net())
    if case.sharded:
        for part in (*averaged.net.blocks, averaged.net, *averaged.average.blocks, averaged.average, averaged):
            er.fully_shard(part, shard_size=case.shard_size)
    optimizer = torch.optim.AdamW(averaged.net.parameters(), lr=0.01, eps=1e-2)

    def hook(*_: Any) -> None:
        if case.by_hand:
            with torch.no_grad():
                follow(list(averaged.average.parameters()), list(averaged.net.parameters()))
        else:
            change_parameters(follow, averaged.average, averaged.net)

    optimizer.register_step_post_hook(hook)
    wrapped = er.AdaptiveDataParallel(averaged, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(data(), batch_size=12, seed=3)
    if case.micro is not None:
        loader.autoscale_batch_size(12, local_bsz_bounds=(1, case.micro), gradient_accumulation=True)
    losses = list[float]()
    for _ in er.remaining_epochs_until(2):
        wrapped.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
        wrapped.eval()
        total = er.Accumulator()
        with torch.no_grad():
            for x, y in er.AdaptiveDataLoader(data(), batch_size=24, shuffle=False):
                total["loss"] += nn.functional.cross_entropy(wrapped(x), y, reduction="sum").item()
        losses.append(total["loss"])
    return Found(er.get_context().get_world_rank(), averaged.state_dict(), losses)


def check(case: Case, script: Any, first: tuple[int, ...]) -> None:
    """Rank 0 ends with what one process has that shards nothing."""
    found = run_job(lambda: train(case), script, first=first).results
    wanted = run_job(lambda: train(Case(sharded=False)), first=(1,)).results[1]
    (whole,) = [each for each in found.values() if each.rank == 0]
    assert whole.state.keys() == wanted.state.keys()
    for name, value in wanted.state.items():
        torch.testing.assert_close(whole.state[name], value, rtol=0, atol=CLOSE)
    for each in found.values():
        assert each.losses == pytest.approx(wanted.losses[-len(each.losses) :], rel=1e-3)


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(
    ("case", "script", "first"),
    [
        (Case(), [Change(3, (1, 2, 3)), Change(7, (1, 3)), Change(11, (1,))], (1, 2)),
        (Case(micro=2), [Change(5, (1, 2, 3))], (1, 2)),
        (Case(), [Kill(5, 2, "backward"), Change(9, (1, 3, 4))], (1, 2, 3)),
        (Case(), [Kill(5, 1, "vote", joins=(4,))], (1, 2, 3)),
        (Case(), [Hold(5, 3, "vote"), Kill(5, 1, "edge")], (1, 2, 3)),
        (Case(shard_size=2), [Change(3, (1, 2, 3, 4)), Kill(9, 2, "vote")], (1, 2)),
    ],
    ids=["changes", "accumulated", "lost", "lost in a vote", "heard decided by one", "shard groups"],
)
def test_average_that_is_part_of_model_moves_with_group(case: Case, script: Any, first: tuple[int, ...]) -> None:
    check(case, script, first)


Between = Callable[[Net, int], None]


def loop(between: Between) -> None:
    """Train a sharded net, with something before each step."""
    model = sharded_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    for _ in er.remaining_epochs_until(2):
        for x, y in er.AdaptiveDataLoader(data(), batch_size=12, seed=3):
            between(model, er.get_context().get_global_step())
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()


def keeping(make: Callable[[Net], list[Tensor]], combine: Callable[[list[Tensor], list[Tensor]], None]) -> Between:
    """Keep an average by hand, from the first step on."""
    kept: dict[int, list[Tensor]] = {}

    def between(model: Net, step: int) -> None:
        with torch.no_grad():
            combine(kept.setdefault(id(model), make(model)), list(model.parameters()))

    return between


def one_by_one(average: list[Tensor], now: list[Tensor]) -> None:
    for old, new in zip(average, now, strict=True):
        old.mul_(0.9).add_(new, alpha=0.1)


COPIES = keeping(lambda model: [p.detach().clone() for p in model.parameters()], follow)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(
    ("script", "first"),
    [
        ([Change(3, (1, 2, 3))], (1, 2)),
        ([Kill(3, 2, "backward", joins=(3,))], (1, 2)),  # as many workers as before
        ([Change(3, (1, 2))], (1,)),
    ],
    ids=["larger", "another worker", "no more alone"],
)
@pytest.mark.parametrize("combine", [follow, one_by_one])
def test_copies_of_another_group_are_refused_with_a_way(combine: Any, script: Any, first: tuple[int, ...]) -> None:
    made = keeping(lambda model: [p.detach().clone() for p in model.parameters()], combine)
    with pytest.raises(
        (RuntimeError, CommunicationFailedError), match=r"elastic_ray\.sync\.change_parameters.*recipes"
    ):
        run_job(lambda: loop(made), script, first=first)


@pytest.mark.thorough
def test_copies_serve_as_long_as_the_group_does() -> None:
    run_job(lambda: loop(COPIES), first=(1, 2))


@pytest.mark.parametrize("workers", [1, 2])
def test_second_sharded_model_that_is_not_wrapped_is_refused(workers: int) -> None:
    made = keeping(lambda _: list(sharded_net().requires_grad_(False).parameters()), follow)
    with pytest.raises(RuntimeError, match=r"AdaptiveDataParallel does not wrap is in none.*change_parameters"):
        run_job(lambda: loop(made), first=tuple(range(1, workers + 1)))


@pytest.mark.parametrize(
    ("script", "text"),
    [((), "rank 0 owns differ"), ([Kill(1, 2, "backward")], "the group has changed since")],
    ids=["", "and a worker is lost"],
)
def test_average_that_a_hook_moves_by_hand_is_found(script: Any, text: str) -> None:
    with pytest.raises(ReplicasDifferError, match=text):
        run_job(lambda: train(Case(by_hand=True)), script, first=(1, 2, 3))


@pytest.mark.parametrize(
    ("script", "text"),
    [((), "rank 0 owns differ"), ([Kill(3, 2, "backward")], r"the group has changed since.*change_parameters")],
    ids=["next update", "change"],
)
def test_rows_changed_by_hand_are_found_at_once(script: Any, text: str) -> None:
    """Where the group changes, rows would come from the one that follows."""
    steps = list[int]()

    def between(model: Net, step: int) -> None:
        steps.append(step)
        if step == 3:
            torch._foreach_mul_([p.detach() for p in model.parameters()], 1.01)

    with pytest.raises(ReplicasDifferError, match=text):
        run_job(lambda: loop(between), script, first=(1, 2, 3))
    assert max(steps) == 3


def test_average_may_be_put_in_and_taken_out_again() -> None:
    seen = list[float]()

    def between(model: Net, step: int) -> None:
        if step in (3, 9):
            kept = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 0.5)
                seen.append(model.last.weight.norm().item())
                for p, old in zip(model.parameters(), kept, strict=True):
                    p.copy_(old)

    run_job(lambda: loop(between), first=(1, 2, 3))
    assert len(seen) == 6


def test_weights_are_clipped_with_the_update() -> None:
    def trained(*, sharded: bool) -> Any:
        model = sharded_net() if sharded else Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.register_step_post_hook(
            lambda *_: change_parameters(lambda rows: [p.clamp_(-0.2, 0.2) for p in rows], model.parameters())
        )
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        train_an_epoch(wrapped, optimizer)
        return model.state_dict()

    found = run_job(lambda: trained(sharded=True), [Kill(4, 3, "vote")], first=(1, 2, 3)).results[1]
    wanted = run_job(lambda: trained(sharded=False), first=(1,)).results[1]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=CLOSE)


def test_what_cannot_be_changed_is_refused() -> None:
    def between(model: Net, step: int) -> None:
        change_parameters(lambda rows: None, model)

    with pytest.raises(RuntimeError, match="must be called while their optimizer steps"):
        run_job(lambda: loop(between), first=(1,))
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"same shapes in the same order, but number 1 has \[\(2, 2\)\]"):
        change_parameters(follow, net, [net.weight])
    with pytest.raises(ValueError, match="got none"):
        change_parameters(follow)
    with pytest.raises(TypeError, match="got a str"):
        change_parameters(follow, ["weight"])
    with pytest.raises(TypeError, match="change must be a function"):
        change_parameters(net.weight, net)
    change_parameters(lambda rows: [p.fill_(2.0) for p in rows], net)
    assert bool((net.weight == 2).all()), "what is not sharded is changed as it is"
