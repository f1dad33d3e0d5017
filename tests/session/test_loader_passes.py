"""Passes of a run's loaders where the group is called off, breaks, or replaces one whose ranks have returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.consensus.intents import RanksDisagreeError
from elastic_ray.membership.messages import Returned
from tests.loop.changing import Kill, run_job
from tests.session.worker import Worker, group


def numbers(batch_size: int) -> er.AdaptiveDataLoader:
    """Twelve samples."""
    return er.AdaptiveDataLoader(TensorDataset(torch.arange(12)), batch_size=batch_size)


def test_group_called_off_within_step_is_left_after_it() -> None:
    worker = Worker()
    generations: list[int] = []
    for _ in er.remaining_epochs_until(1):
        for _ in numbers(6):
            if worker.session.progress.loader_steps == 0:
                worker.post(group(2, void_below=2))()
            generations += [worker.membership.generation for _ in numbers(4)]
    assert generations == [1, 1, 1, 2, 2, 2] and worker.session.progress.loader_steps == 8


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_step_after_another_rank_has_returned_is_refused(steps: int) -> None:
    """Whoever has returned one step ahead was in the step that this rank draws again."""
    worker = Worker()
    called_off = {1: worker.post(group(2, void_below=2, returned=(Returned(rank=1, steps=steps),)))}
    with pytest.raises(RanksDisagreeError, match=f"rank 1 has returned .* after {steps} steps; rank 0"):
        worker.train(called_off)
    assert worker.session.progress.loader_steps == max(steps, 2)


def test_a_rank_lost_before_data_is_compared_is_survived() -> None:
    def train() -> tuple[int, list[int]]:
        drawn: list[int] = []
        for _ in er.remaining_epochs_until(1):
            er.all_reduce(1.0)
            for (x,) in numbers(4):
                drawn.extend(x.tolist())
        return er.get_context().get_world_size(), sorted(drawn)

    outcome: Any = run_job(train, [Kill(0, 2, "after_collective", last=True)], first=(1, 2))
    assert outcome.results == {1: (1, list(range(12)))}
