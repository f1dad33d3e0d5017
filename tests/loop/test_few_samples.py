"""Evaluation over fewer samples than workers, of models that each rank holds: some ranks see no batch."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.sync import ShardedEmbedding
from tests.loop.changing import Change, Hold, Kill, run_job
from tests.loop.few_samples import FEW, FOUR, GROWS, KILLS, STEPS, Net, Stream, check, few, run
from tests.loop.ranks import Ranks


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("options", [{}, {"nested": "before"}, {"nested": "after"}, {"grad": True}], ids=str)
def test_a_job_grows_beyond_the_samples_of_an_evaluation(options: dict[str, Any]) -> None:
    found = run(GROWS, (1, 2), **options)
    assert found.groups == [(1, 2), FOUR]
    assert sorted(own.seen[-1] for own in found.results.values()) == [0, 1, 1, 1]
    check(found, **options)


def test_a_stream_of_fewer_samples_than_workers() -> None:
    found = run(GROWS, (1, 2), loader=lambda: er.AdaptiveDataLoader(Stream(), batch_size=2))
    assert sorted(own.seen[-1] for own in found.results.values()) == [0, 1, 1, 1]
    check(found)


def counts(_: int) -> dict[str, float]:
    """What three samples add up to, where the group does not change."""
    total = er.Accumulator()
    for _epoch in er.remaining_epochs_until(1):
        for x, _y in few():
            total["samples"] += len(x)
    return dict(total)


def test_a_group_that_cannot_change(ranks: Ranks) -> None:
    assert ranks.run(counts, 0, world=4) == [{"samples": FEW}] * 4


class WithTable(Net):
    """A model some of whose rows live with owners."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ShardedEmbedding(7, 3, optimizer="sgd", seed=5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.table((10 * x[:, 0]).long().abs() % 7)


@pytest.mark.parametrize("nested", ["", "before"])
def test_those_without_sample_fetch_no_rows_with_the_others(nested: str) -> None:
    found = run(GROWS, (1, 2), WithTable, nested=nested)
    assert sorted(own.seen[-1] for own in found.results.values()) == [0, 1, 1, 1]
    check(found, model=WithTable, nested=nested)


@pytest.mark.parametrize("kill", [Kill(STEPS, 1, "forward"), Kill(STEPS, 4, "edge")], ids=str)
def test_a_worker_is_lost_while_rows_are_fetched(kill: Kill) -> None:
    found = run([kill], FOUR, WithTable)
    assert {own.world for own in found.results.values()} == {3}
    check(found, model=WithTable)


@pytest.mark.parametrize("kill", KILLS, ids=str)
def test_a_worker_is_lost_in_it(kill: Kill) -> None:
    found = run([kill], FOUR)
    assert {own.world for own in found.results.values()} == {3}
    check(found)


def test_worker_is_lost_in_it_within_step_of_training() -> None:
    found = run([Kill(5, 4, "edge", after=(1, 2, 3))], FOUR, nested="before")
    assert [len(group) for group in found.groups] == [4, 3, 3], "the step of training is drawn again"
    check(found, nested="before")


@pytest.mark.parametrize("options", [{"nested": "before"}, {"lazy": True}], ids=str)
def test_some_draw_again_what_others_come_to(options: dict[str, Any]) -> None:
    found = run([Hold(4, 2, "after_step"), Kill(5, 4, "edge", after=(1, 3))], FOUR, **options)
    assert [len(group) for group in found.groups] == [4, 3], "those in it leave the step, and come back"
    check(found, **options)
    if "lazy" in options:
        assert [own.late for own in found.results.values()] == [[{"rows": 3 * 12.0}] * 2] * 3


def test_a_dropped_rest_is_dropped_still() -> None:
    found = run([], FOUR, loader=lambda: few(drop_last=True))
    assert all(not any(own.seen) for own in found.results.values())


def trains_on_few() -> None:
    """A step that trains, with three samples."""
    model = nn.Linear(13, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    for _ in er.remaining_epochs_until(1):
        for x, _ in few():
            wrapped(x).sum().backward()
            optimizer.step()


def trains_each_for_itself() -> None:
    """The same, with models that are averaged after steps."""
    model = nn.Linear(13, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy="local_sgd")
    for _ in er.remaining_epochs_until(1):
        for x, _ in few():
            wrapped(x).sum().backward()
            optimizer.step()


def nests() -> None:
    """A loop that the rank without a sample would miss."""
    for _ in er.remaining_epochs_until(1):
        for _batch in few():
            list(er.AdaptiveDataLoader(list(range(12)), batch_size=4))


def adds_up() -> None:
    """A collective of the user's."""
    for _ in er.remaining_epochs_until(1):
        for x, _ in few():
            er.all_reduce(x.sum())


@pytest.mark.parametrize("function", [trains_on_few, trains_each_for_itself, nests, adds_up])
def test_what_needs_a_sample_on_each_rank_is_refused(function: Any) -> None:
    errors: list[Any] = []

    def run_it() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(str(error))
            deadline = time.monotonic() + 30.0
            while len(errors) < len(FOUR) and time.monotonic() < deadline:
                time.sleep(0.01)
            raise

    with pytest.raises(RuntimeError, match=r"samples for 3 of 4 workers.*use at most 3 workers here"):
        run_job(run_it, [], first=FOUR)
    assert len(errors) == len(FOUR) and len(set(errors)) == 1


def test_a_worker_joins_after_sums_were_made_within_steps() -> None:
    found = run([Change(STEPS - 1, FOUR)], (1, 2), nested="before", every_step=True)
    assert found.groups == [(1, 2), FOUR]
    check(found, nested="before", every_step=True)
