"""Averaged models while workers come, leave and die: all hold one model again, and no sample counts twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_ray.sync import Strategy
from elastic_ray.sync.spec import Average
from tests.loop.changing import Change, Kill, Outcome, run_job
from tests.sync.averages import AVERAGES
from tests.sync.drifting import BATCH, EPOCHS, SAMPLES, STEPS, Loop, Seen, adam, sgd

pytestmark = pytest.mark.slow  # each of many scripted kills leaves gloo threads behind in this process

BEFORE = ("forward", "backward", "allreduce")
AFTER = ("optimizer_step", "after_step", "edge", "average")


def check(average: Average, script: Sequence[Change | Kill], first: Sequence[int], make: Any = sgd) -> Outcome:
    """All that are left end with one model."""
    outcome = run_job(Loop(Strategy(average=average), make), script, first=first)
    assert sorted(outcome.results) == sorted(outcome.groups[-1])
    found = [model for model, _ in outcome.results.values()]
    assert all(torch.equal(each, found[0]) for each in found), "all end with one model"
    assert found[0].isfinite().all() and outcome.told == []
    return outcome


def seen_in(outcome: Outcome, step: int) -> dict[int, list[Seen]]:
    """What each worker has seen of a step, as often as it was drawn."""
    found = {worker: [each for each in seen if each.step == step] for worker, (_, seen) in outcome.results.items()}
    return {worker: seen for worker, seen in found.items() if seen}


def same(models: Sequence[Tensor]) -> Tensor:
    """The one model that all hold."""
    assert all(torch.equal(each, models[0]) for each in models)
    return models[0]


def applied(outcome: Outcome) -> list[int]:
    """How often each sample counts in the models of those that are left."""
    counts = [0] * SAMPLES
    for _, seen in outcome.results.values():
        for each in seen:
            for sample in each.samples if each.applied else ():
                counts[sample] += 1
    return counts


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("name", AVERAGES)
def test_a_job_grows(name: str, make: Any) -> None:
    outcome = check(AVERAGES[name], [Change(1, (1, 2, 3, 4)), Change(6, (1, 2, 3, 4, 5))], (1, 2), make)
    worlds = [next(iter(seen_in(outcome, step).values()))[0].world for step in range(STEPS)]
    assert worlds == [2] * 2 + [4] * 5 + [5] * (STEPS - 7)
    for step in (2, 7):
        before = same([seen.before for (seen,) in seen_in(outcome, step).values()])
        if name != "diloco":
            last = torch.stack([seen.after for (seen,) in seen_in(outcome, step - 1).values()])
            torch.testing.assert_close(before, last.mean(0), rtol=0, atol=1e-9)
    assert applied(outcome) == [EPOCHS] * SAMPLES


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("name", AVERAGES)
def test_a_job_grows_and_shrinks(name: str, make: Any) -> None:
    outcome = check(AVERAGES[name], [Change(2, (1, 2, 3, 4)), Change(5, (1, 2, 4))], (1, 2), make)
    worlds = [seen_in(outcome, step)[1][0].world for step in range(STEPS)]
    assert worlds == [2] * 3 + [4] * 3 + [3] * (STEPS - 6)
    for step in (3, 6):
        same([seen.before for (seen,) in seen_in(outcome, step).values()])


def test_who_leaves_leaves_its_part_behind() -> None:
    models: dict[int, Tensor] = {}
    average = Average(algorithm="sma", alpha=0.1)

    class Kept(Loop):
        """Notes the models after the step in which two workers leave."""

    def note(step: int, model: Any) -> None:
        if step == 3:
            from elastic_ray.loop.api import current_session
            from tests.sync.drifting import weights

            models[current_session().rank] = weights(model)

    outcome = run_job(Kept(Strategy(average=average), inside=note), [Change(3, (2, 3))], first=(1, 2, 3, 4))
    before = same([seen.before for (seen,) in seen_in(outcome, 4).values()])
    torch.testing.assert_close(before, torch.stack(list(models.values())).mean(0), rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("moment", BEFORE + AFTER)
def test_a_worker_dies(moment: str, name: str, make: Any) -> None:
    step = 6 if moment == "average" else 4
    outcome = check(AVERAGES[name], [Kill(step, 2, moment, last=True)], (1, 2, 3), make)
    assert outcome.groups[-1] == (1, 3)
    lost = [EPOCHS - count for count in applied(outcome)]
    # What the dead one had taken; of the step in progress only if it was agreed on.
    agreed = {"allreduce": (step, step + 1, step + 2), "average": (step,)}.get(moment, (step + (moment in AFTER),))
    assert min(lost) >= 0 and sum(lost) in [BATCH // 3 * steps for steps in agreed]
    if moment in ("forward", "backward"):
        first = same([seen[-1].before for seen in seen_in(outcome, step).values()])
        survivors = [seen[-1].after for seen in seen_in(outcome, step - 1).values()]
        if name in ("local_sgd", "sma"):  # the others have averaged after step 3
            mean = torch.stack(survivors).mean(0)
            assert (first - mean).abs().max() < (1e-9 if name == "local_sgd" else 0.1)
    elif moment != "average":
        same([seen[-1].before for seen in seen_in(outcome, step + 1).values()])


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("moment", BEFORE + AFTER)
def test_a_worker_dies_while_others_are_anywhere(moment: str, name: str) -> None:
    step = 6 if moment == "average" else 4
    outcome = check(AVERAGES[name], [Kill(step, 1, moment)], (1, 2, 3, 4))
    lost = [EPOCHS - count for count in applied(outcome)]
    # A rank that has not heard that a step was agreed on loses its own share of it, but none counts twice.
    assert min(lost) >= 0 and sum(lost) <= BATCH // 4 * (step + 3)


def test_a_whole_story() -> None:
    script = [Change(1, (1, 2)), Change(2, (1, 2, 3)), Kill(5, 1, "backward"), Change(6, (2, 3, 4)), Change(8, (4,))]
    for average in AVERAGES.values():
        check(average, script, first=(1,))
