"""Shards move when the group changes, and outlive the loss of a worker at any moment."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from elastic_ray.membership.worker_side import LostGroupError
from elastic_ray.sync.optimizer_tiles.moves import StateLostError
from tests.loop.changing import Change, Hold, Kill
from tests.sync.sharded_parameters.sharded import STEPS, Case, Net, Run, check, run


@pytest.mark.thorough
def test_shards_follow_group_from_two_to_four_to_one() -> None:
    check(Case(), [Change(3, (1, 2, 3, 4)), Change(7, (2, 3, 4)), Change(11, (3,))], (1, 2))


@pytest.mark.thorough
def test_the_first_update_frees_what_is_no_more_held() -> None:
    """Of two workers, that held everything, two hold more than others until then."""
    found = check(Case(), [Change(3, (1, 2, 3, 4))], (1, 2))
    moments = 2 * sum(p.numel() for p in Net().parameters())
    for own in found.results.values():
        assert max(own.held[-STEPS + 6 :]) <= moments * 2 / 4 * 1.35, "two shards of four"
        assert own.rank > 1 or max(own.held) >= moments


@pytest.mark.thorough
def test_uneven_micro_batches_weigh_by_samples_in_every_group() -> None:
    """Unclipped: clipping would hide gradients that are all too large or too small."""
    check(Case(micro=2, clip=False, optimizer="sgd"), [Change(3, (1, 2, 3, 4)), Change(8, (3, 4))], (1, 2))


MOMENTS = ["forward", "backward", "allreduce", "vote", "optimizer_step", "after_step", "edge"]


IN_EVERY_RUN = {("backward", False), ("vote", True), ("edge", False)}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("moment", "last"),
    [
        pytest.param(moment, last, marks=() if (moment, last) in IN_EVERY_RUN else pytest.mark.slow)
        for moment in MOMENTS
        for last in (False, True)
    ],
)
def test_a_lost_worker_takes_nothing_with_it(moment: str, last: bool) -> None:
    check(Case(), [Kill(5, 2, moment, last=last)], (1, 2, 3))


@pytest.mark.thorough
def test_who_heard_makes_what_those_decide_who_have_not() -> None:
    """Worker 1 hears the vote's end and is lost before it says so; 3 has voted and waits."""
    check(Case(), [Hold(5, 3, "vote"), Kill(5, 1, "edge")], (1, 2, 3))


@pytest.mark.thorough
def test_loss_after_loss_and_worker_in_place_of_each() -> None:
    script = [Kill(3, 2, "backward", joins=(5,)), Kill(6, 1, "vote", joins=(6,)), Kill(9, 5, "after_step")]
    check(Case(optimizer="sgd"), script, (1, 2, 3, 4))


@pytest.mark.slow
def test_a_loss_while_rows_move_is_made_good() -> None:
    check(Case(), [Change(4, (1, 2, 3, 4)), Kill(5, 3, "receiving")], (1, 2))


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize(
    "worker", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("moment", ["vote", "restore"])
def test_a_loss_before_second_copies_arrived_is_made_good(worker: int, moment: str) -> None:
    """Of two workers that keep what they have until the first update of four, and of two that have one copy only."""
    found = check(Case(), [Change(3, (1, 2, 3, 4)), Kill(4, worker, moment, joins=(5,))], (1, 2))
    assert found.groups == [(1, 2), (1, 2, 3, 4), tuple(sorted({1, 2, 3, 4, 5} - {worker}))]


@pytest.mark.thorough
def test_workers_leave_before_second_copies_have_arrived() -> None:
    check(Case(), [Change(3, (1, 2, 3, 4)), Change(4, (3, 4)), Change(5, (3, 4, 5))], (1, 2))


def _save_after_change(run: Run, step: int) -> None:
    if step == 4:
        run.model.state_dict()
        run.optimizer.state_dict()


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("first", [(1, 2), (1, 2, 3)])
def test_the_whole_is_asked_for_before_second_copies_arrived(first: tuple[int, ...]) -> None:
    """Some ranks follow several others then, some none; and rows of a lone worker lie anywhere in its memory."""
    check(Case(between=_save_after_change), [Change(3, (1, 4, 5, 6))], first)


def _without_gradients(run: Run, step: int) -> None:
    if not hasattr(run.model, "spoiled"):
        run.model.register_forward_hook(_spoil)
    run.model.spoiled = step in (4, 7)


def _spoil(model: nn.Module, _: object, output: Tensor) -> None:
    if model.spoiled and output.requires_grad:
        output.register_hook(lambda grad: grad * float("nan"))


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize(
    "script", [[Change(6, (1, 2, 3, 4))], [Change(3, (1, 2, 3, 4)), Change(4, (3, 4)), Kill(5, 4, "restore")]]
)
def test_a_group_without_updates_ends_or_is_left(script: list[Change | Kill]) -> None:
    """Its one update, of step 7 or of step 4, is left out: gradients are not finite."""
    check(Case(between=_without_gradients, nonfinite="skip"), script, (1, 2))


@pytest.mark.thorough
@pytest.mark.parametrize("lost", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_loss_while_another_leaves_is_made_good(lost: int) -> None:
    """The leaver, and the one that follows it or that it follows."""
    check(
        Case(), [Change(4, tuple(each for each in (1, 2, 3, 4) if each != 2)), Kill(5, lost, "receiving")], (1, 2, 3, 4)
    )


def test_two_neighbours_lost_at_once_lose_the_state() -> None:
    with pytest.raises((StateLostError, LostGroupError), match="rows of parameters of model 0 were lost"):
        run(Case(), [Kill(5, 2, "edge", after=(3,)), Kill(5, 3, "receiving")], (1, 2, 3, 4))


@pytest.mark.slow
def test_two_others_lost_at_once_lose_nothing() -> None:
    check(Case(), [Kill(5, 1, "forward", after=(3,)), Kill(5, 3, "receiving")], (1, 2, 3, 4))
