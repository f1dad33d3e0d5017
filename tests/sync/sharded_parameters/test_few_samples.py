"""Evaluation of sharded models over fewer samples than workers: ranks without one gather parameters with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from tests.loop.changing import Change, Kill, run_job
from tests.loop.few_samples import FEW, FOUR, GROWS, KILLS, Stream, check, few, run, sharded_net


def in_groups() -> nn.Module:
    """Sharded in groups of two."""
    return sharded_net(shard_size=2)


def kept() -> nn.Module:
    """Blocks stay gathered after a call with gradients."""
    return sharded_net(reshard_after_forward=False)


@pytest.mark.thorough
@pytest.mark.matrix(every=10)
@pytest.mark.parametrize("options", [{}, {"nested": "before"}, {"nested": "after"}, {"grad": True}], ids=str)
@pytest.mark.parametrize("model", [sharded_net, in_groups, kept])
def test_a_job_grows_beyond_the_samples_of_an_evaluation(
    model: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    found = run([*GROWS, Change(12, (2, 3))], (1, 2), model, **options)
    assert found.groups == [(1, 2), FOUR, (2, 3)]
    check(found, **options)


def test_an_evaluation_before_anything_is_trained() -> None:
    check(run([], FOUR, sharded_net, before=True), before=True)


@pytest.mark.thorough
def test_a_stream_of_fewer_samples_than_workers() -> None:
    check(run(GROWS, (1, 2), sharded_net, lambda: er.AdaptiveDataLoader(Stream(), batch_size=2)))


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize("kill", KILLS[:2], ids=str)
@pytest.mark.parametrize("model", [sharded_net, in_groups])
def test_a_worker_is_lost_in_it(model: Callable[[], nn.Module], kill: Kill) -> None:
    found = run([kill], FOUR, model)
    assert {own.world for own in found.results.values()} == {3}
    check(found)


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize(("worker", "moment"), [(2, "forward"), (4, "edge")])
@pytest.mark.parametrize("first", [FOUR, (*FOUR, 5)])
def test_worker_is_lost_in_it_within_step_of_training(worker: int, moment: str, first: tuple[int, ...]) -> None:
    # The others are in the evaluation by then; one that had not begun the step would cut it for the group that follows.
    others = tuple(each for each in first if each != worker and each <= FEW)
    kill = Kill(5, worker, moment, after=others, after_moment="forward")
    found = run([kill], first, sharded_net, nested="before")
    world = len(first) - 1
    assert [len(group) for group in found.groups] == [world + 1, world, world], "the step of training is drawn again"
    check(found, nested="before")


def does(what: Callable[[Any, Any], Any], *, grad: bool = True) -> Callable[[], None]:
    """Do it to model and output in a step of three samples."""

    def train() -> None:
        model = sharded_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        for _ in er.remaining_epochs_until(1):
            for x, _ in few():
                with torch.set_grad_enabled(grad):
                    what(model, wrapped(x).sum())

    return train


@pytest.mark.parametrize(
    "function",
    [
        does(lambda model, output: output.backward()),
        does(lambda model, output: model.last.weight.full_tensor(), grad=False),
        does(lambda model, output: model.last.weight.norm().item(), grad=False),
    ],
    ids=["backward", "full_tensor", "item"],
)
def test_what_takes_a_sample_on_each_rank_is_refused(function: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError, match=r"samples for 3 of 4 workers.*use at most 3 workers here"):
        run_job(function, [], first=FOUR)
