"""Optimizer state in tiles, while workers come, go and die at bad moments: bit by bit as replicated training."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ray.errors import StateLostError
from elastic_ray.sync.spec import Owner
from tests.loop.changing import Change, Hold, Kill
from tests.sync.tiles.scripts import GROWS_AND_SHRINKS
from tests.sync.tiles.trained import Case, check, run


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_two_to_three_to_four_to_two_and_kill(optimizer: str) -> None:
    check(Case(optimizer), GROWS_AND_SHRINKS, (1, 2))


@pytest.mark.thorough
@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("optimizer", ["adagrad", "rmsprop", "adafactor", "fused adamw", "foreach sgd"])
def test_other_optimizers(optimizer: str) -> None:
    check(
        Case(optimizer),
        [Change(3, (1, 2, 3, 4)), Kill(9, 2, "after_step", last=True), Change(15, (3, 4, 5))],
        (1, 2, 3),
    )


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("strategy", ["partitioned_ps", "uneven_partitioned_ps", Owner(unit="tile", copies=3)])
def test_other_tiles(strategy: Any) -> None:
    check(
        Case(strategy=strategy),
        [Change(3, (1, 2, 3, 4)), Kill(9, 2, "after_step", last=True), Change(15, (3, 4))],
        (1, 2, 3),
    )


# Where replicated workers die for the same to become of the step: it is drawn again, or it counts.
AS_REPLICATED = {"forward": "forward", "backward": "backward", "optimizer_step": "backward", "publish": "after_step"}


@pytest.mark.thorough
@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("moment", [*AS_REPLICATED, "after_step", "edge"])
def test_worker_dies_at_any_moment_and_then_the_next(moment: str) -> None:
    found, wanted = (
        [Kill(4, 2, when, last=True), Kill(6, 1, when, last=True), Change(9, (3, 4, 5))]
        for when in (moment, AS_REPLICATED.get(moment, moment))
    )
    check(Case(), found, (1, 2, 3, 4), as_replicated=wanted)


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("moment", ["allreduce", "vote"])
def test_worker_dies_when_it_is_open_whether_step_counts(moment: str) -> None:
    check(Case("sgd"), [Kill(4, 2, moment), Kill(6, 1, moment), Change(9, (3, 4, 5))], (1, 2, 3, 4), exact=False)


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize("held", [(2, 3), (1, 3), (1,), (3,)])
def test_workers_that_have_voted_make_a_survivors_update(held: tuple[int, ...]) -> None:
    """Of the four, one makes the update and dies; those that are held do not know that it was decided."""
    heard = tuple({1, 2, 3} - set(held))
    script = [Kill(3, 4, "publish", after=heard), *(Hold(3, worker, "vote") for worker in held)]
    check(Case(), script, (1, 2, 3, 4), as_replicated=[Kill(3, 4, "after_step", last=True)])


@pytest.mark.thorough
def test_such_an_update_has_the_learning_rate_of_others() -> None:
    script = [Kill(3, 4, "publish", after=(1,)), Hold(3, 2, "vote"), Hold(3, 3, "vote")]
    case = Case(rule="linear", batch=[(0.0, 6), (0.02, 12)])
    check(case, script, (1, 2, 3, 4), as_replicated=[Kill(3, 4, "after_step", last=True)])


@pytest.mark.thorough
def test_update_that_no_survivor_has_made_is_made_anew() -> None:
    script = [Kill(3, 4, "publish"), *(Hold(3, worker, "vote") for worker in (1, 2, 3))]
    check(Case(), script, (1, 2, 3, 4), as_replicated=[Kill(3, 4, "backward", last=True)])


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("next_one", [1, 2, 3])
def test_decided_means_recoverable_also_when_another_dies(next_one: int) -> None:
    """Two have heard the decision, one of the others has not; then another dies before states are exchanged."""
    script = [Kill(3, 4, "publish"), Hold(3, 3, "vote"), Kill(3, next_one, "receiving")]
    check(Case(strategy=Owner(unit="tile", copies=3)), script, (1, 2, 3, 4), exact=False)


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("worker", [2, 3], ids=["member", "joiner"])
def test_a_worker_dies_while_tiles_are_about_to_move(worker: int) -> None:
    check(Case("sgd"), [Change(2, (1, 2, 3, 4)), Kill(3, worker, "receiving")], (1, 2), exact=False)


def test_with_one_owner_loss_names_workers_that_held_tiles() -> None:
    with pytest.raises(StateLostError, match=r"33% of the optimizer state of model 0 was lost .*\(w2\): each .* 1 of"):
        run(Case(strategy=Owner(unit="tile", copies=1)), [Kill(3, 2, "forward")], (1, 2, 3))


def test_tiles_whose_owners_leave_and_die_are_lost() -> None:
    """In one change: a leaver hands over what nobody else holds, and no more than that delays the change."""
    with pytest.raises(StateLostError, match=r"50% of the optimizer state .*\(w1, w2\): each part lies with 2 of them"):
        run(Case("sgd"), [Change(2, (2, 3, 4)), Kill(3, 2, "receiving")], (1, 2, 3, 4))


def test_with_one_owner_planned_changes_lose_nothing() -> None:
    check(
        Case(strategy=Owner(unit="tile", copies=1)), [Change(3, (1, 2, 3)), Change(7, (3,)), Change(9, (3, 4))], (1, 2)
    )


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("strategy", ["zero1", Owner(unit="tile", copies=1)])
def test_no_worker_holds_more_than_its_share(strategy: Any) -> None:
    copies = 2 if strategy == "zero1" else 1
    found = run(Case(strategy=strategy), [Change(3, (1, 2, 3)), Change(7, (1, 2, 3, 4))], (1, 2))
    numel = sum(p.numel() for p in found.results[1].parameters)
    for outcome in found.results.values():
        assert outcome.held[-1] <= 2 * numel * (copies / 4 + 0.05) + 400  # counts of steps
    assert max(found.results[4].held) <= 2 * numel * (copies / 4 + 0.05) + 400, "a joiner has never held more"
