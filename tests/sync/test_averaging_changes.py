"""Rounds of averaged models while workers come, leave and die: all hold one model again, no sample counts twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.data.order import IndexOrder
from elastic_ray.loop.api import current_session
from elastic_ray.state.progress import BITS, sample_hashes
from elastic_ray.sync import Strategy
from elastic_ray.sync.spec import Average
from tests.loop.changing import Change, Kill, Outcome, run_job
from tests.sync.averages import AVERAGES
from tests.sync.drifting import BATCH, EPOCHS, SAMPLES, STEPS, Loop, Seen, adam, sgd, weights

pytestmark = pytest.mark.slow  # each of many scripted kills leaves gloo threads behind in this process

OF_EPOCH = SAMPLES // BATCH
MOMENTS = ("forward", "backward", "optimizer_step", "after_step", "edge")


def round_of(step: int, average: Average) -> range:
    """The steps of the round that ``step`` is in: up to an average, within an epoch."""
    first = max(step // average.period * average.period, step // OF_EPOCH * OF_EPOCH)
    last = min((step // average.period + 1) * average.period, (step // OF_EPOCH + 1) * OF_EPOCH)
    return range(first, last)


def check(average: Average, script: Sequence[Change | Kill], first: Sequence[int], make: Any = sgd) -> Outcome:
    """All that are left end with one model, and each epoch has used each sample once."""
    outcome = run_job(Loop(Strategy(average=average), make), script, first=first)
    assert sorted(outcome.results) == sorted(outcome.groups[-1])
    found = [model for model, _ in outcome.results.values()]
    assert all(torch.equal(each, found[0]) for each in found), "all end with one model"
    assert found[0].isfinite().all() and outcome.told == []
    for epoch, (_, _, detail) in enumerate(outcome.passes):
        order = IndexOrder(samples=SAMPLES).epoch_order(3, epoch)
        assert detail["proof"]["samples"] == SAMPLES
        assert detail["proof"]["hash"] == int(sample_hashes(order[:]).sum()) & BITS
    assert len(outcome.passes) == EPOCHS
    return outcome


def seen_in(outcome: Outcome, step: int) -> dict[int, list[Seen]]:
    """What each worker has seen of a step, as often as it was drawn."""
    found = {worker: [each for each in seen if each.step == step] for worker, (_, seen) in outcome.results.items()}
    return {worker: seen for worker, seen in found.items() if seen}


def drawn(outcome: Outcome, step: int) -> list[int]:
    """The samples of a step, as it was drawn last by those who are left."""
    return sorted(sample for seen in seen_in(outcome, step).values() for sample in seen[-1].samples)


def batch_of(step: int) -> list[int]:
    order = IndexOrder(samples=SAMPLES).epoch_order(3, step // OF_EPOCH)
    return sorted(order[step % OF_EPOCH * BATCH : (step % OF_EPOCH + 1) * BATCH].tolist())


def same(models: Sequence[Tensor]) -> Tensor:
    """The one model that all hold."""
    assert all(torch.equal(each, models[0]) for each in models)
    return models[0]


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("name", AVERAGES)
def test_the_group_changes_between_rounds(name: str, make: Any) -> None:
    average = AVERAGES[name]
    outcome = check(average, [Change(1, (1, 2, 3, 4)), Change(6, (1, 2, 4))], (1, 2), make)
    edges = [round_of(step, average).stop for step in (1, 6)]
    worlds = [seen_in(outcome, step)[1][0].world for step in range(STEPS)]
    assert worlds == [2] * edges[0] + [4] * (edges[1] - edges[0]) + [3] * (STEPS - edges[1])
    for edge in edges:
        before = same([seen.before for (seen,) in seen_in(outcome, edge).values()])
        if name != "diloco" and edge == edges[0]:
            last = torch.stack([seen.after for (seen,) in seen_in(outcome, edge - 1).values()])
            torch.testing.assert_close(before, last.mean(0), rtol=0, atol=1e-9)
    for step in range(edges[0], edges[1]):
        left_since = [] if step >= edges[1] else [3]
        assert set(drawn(outcome, step)) <= set(batch_of(step))
        assert len(drawn(outcome, step)) == BATCH * (4 - len(left_since)) // 4
    assert all(drawn(outcome, step) == batch_of(step) for step in (*range(edges[0]), *range(edges[1], STEPS)))


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_lost_round_is_drawn_again(moment: str, name: str, make: Any) -> None:
    # A step's counters move with its end: what comes after the update is in the same step.
    outcome = check(AVERAGES[name], [Kill(4, 2, moment, last=True)], (1, 2, 3), make)
    assert outcome.groups[-1] == (1, 3)
    steps = round_of(4, AVERAGES[name])
    for step in range(STEPS):
        seen = seen_in(outcome, step)
        assert {len(each) for each in seen.values()} == {1 + (step in steps and step <= 4)}, step
        if step >= steps.start:
            assert drawn(outcome, step) == batch_of(step), "who is left draws all of it"
    first = [seen_in(outcome, steps.start)[worker] for worker in (1, 3)]
    again = same([each[-1].before for each in first])
    mean = torch.stack([each[0].before for each in first]).mean(0)
    torch.testing.assert_close(again, mean, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", AVERAGES)
def test_a_worker_dies_when_its_round_is_agreed_on(name: str) -> None:
    average = AVERAGES[name]
    step = round_of(6, average).stop if average.period > 1 else 6
    step = step // average.period * average.period
    outcome = check(average, [Kill(step, 2, "average", last=True)], (1, 2, 3))
    assert all(len(each) == 1 for at in range(step) for each in seen_in(outcome, at).values()), "the round counts"
    assert all(drawn(outcome, at) == batch_of(at) for at in range(step, STEPS))


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("moment", [*MOMENTS, "average"])
def test_a_worker_dies_while_others_are_anywhere(moment: str, name: str) -> None:
    step = 6 if moment == "average" else 4
    outcome = check(AVERAGES[name], [Kill(step, 1, moment)], (1, 2, 3, 4))
    assert all(drawn(outcome, at) == batch_of(at) for at in range(round_of(step, AVERAGES[name]).stop, STEPS))


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("name", AVERAGES)
def test_who_misses_a_rounds_vote_adds_its_steps(name: str, make: Any) -> None:
    """The others have counted its samples, and do not draw them again."""
    average = AVERAGES[name]
    last = round_of(4, average).stop - 1
    ends, missing = dict[int, Tensor](), list[str]()

    def inside(step: int, model: Any) -> None:
        session = current_session()
        if step == last:
            ends.setdefault(session.rank, weights(model))
        if step == last and session.worker == "w2" and session.worker not in missing:
            vote = session.passes._vote
            missing.append(session.worker)

            def missed(*args: Any) -> None:
                session.passes._vote = vote
                vote(*args)
                raise CommunicationFailedError("the end of the vote was lost")

            session.passes._vote = missed  # a step further than scripted faults reach

    outcome = run_job(Loop(Strategy(average=average), make, inside), [], first=(1, 2, 3))
    assert [len(outcome.groups), outcome.told] == [2, []]
    assert all(drawn(outcome, at) == batch_of(at) for at in range(STEPS))
    assert all(len(each) == 1 for at in range(STEPS) for each in seen_in(outcome, at).values())
    before = same([seen.before for (seen,) in seen_in(outcome, last + 1).values()])
    torch.testing.assert_close(before, torch.stack(list(ends.values())).mean(0), rtol=0, atol=1e-9)


def test_who_leaves_leaves_its_part_behind() -> None:
    models: dict[int, Tensor] = {}

    def note(step: int, model: Any) -> None:
        if step == 3:
            models[current_session().rank] = weights(model)

    loop = Loop(Strategy(average=Average(algorithm="sma", period=1, alpha=0.1)), inside=note)
    outcome = run_job(loop, [Change(3, (2, 3))], first=(1, 2, 3, 4))
    before = same([seen.before for (seen,) in seen_in(outcome, 4).values()])
    torch.testing.assert_close(before, torch.stack(list(models.values())).mean(0), rtol=0, atol=1e-9)


def test_a_whole_story() -> None:
    script = [Change(1, (1, 2)), Change(2, (1, 2, 3)), Kill(5, 1, "backward"), Change(6, (2, 3, 4)), Change(9, (4,))]
    for average in AVERAGES.values():
        check(average, script, first=(1,))
