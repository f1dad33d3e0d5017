"""The ledger of steps alone, on a state of a few lines."""

from __future__ import annotations

import pytest

from elastic_ray.state.progress import PassProgress, RunProgress
from elastic_ray.steps.ledger import StepLedger
from elastic_ray.steps.step import LoaderStep
from tests.session.steps import step_of


class State:
    """Says what it was asked for."""

    def __init__(self) -> None:
        self.progress, self.asked = RunProgress(), list[str]()

    def snapshot(self, depth: int = 0) -> None:
        self.asked.append(f"snapshot {depth}")

    def discard_snapshot(self) -> None:
        self.asked.append("forget")

    def roll_back(self, depth: int = 0) -> None:
        self.asked.append(f"roll back {depth}")

    def lose_round(self) -> None:
        self.progress.sums = {}

    def start_from(self, progress: RunProgress) -> None:
        """No other rank's is received."""


def gain(scale: float) -> float:
    return scale / 2


def begun(ledger: StepLedger, state: State, **options: int) -> LoaderStep:
    """A step of the epoch's next pass."""
    step = step_of(state.progress.passes[ledger.start_pass()], ledger.next_ordinal, **options)
    ledger.start(step)
    return step


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def ledger(state: State) -> StepLedger:
    ledger = StepLedger(state)
    ledger.start_epoch()
    return ledger


def test_a_committed_step_counts_samples_gain_and_generation(ledger: StepLedger, state: State) -> None:
    step = begun(ledger, state)
    assert ledger.may_apply()
    ledger.applied()
    assert ledger.commit(ledger.end(step.loader_pass), 7, gain)
    run = state.progress
    assert (run.steps, run.loader_steps, run.done, run.lineage, run.optimizers_stepped) == (1, 1, 1.0, 7, 0)
    assert step.loader_pass.position == 8 and ledger.step is None
    assert state.asked == ["snapshot 0", "forget"]


def test_a_step_that_trains_nothing_is_no_optimizer_step(ledger: StepLedger, state: State) -> None:
    begun(ledger, state)
    assert not ledger.commit(ledger.end(), 1, gain)
    assert (state.progress.steps, state.progress.loader_steps) == (0, 1)


def test_a_backward_pass_without_an_update_trains(ledger: StepLedger, state: State) -> None:
    begun(ledger, state)
    ledger.mark_training()
    assert ledger.commit(ledger.end(), 1, gain) and state.progress.steps == 1


def test_what_a_survivor_has_applied_is_not_applied_again(ledger: StepLedger, state: State) -> None:
    """The first of two optimizers has stepped when the gradients of the second are lost."""
    first = begun(ledger, state)
    assert ledger.may_apply()
    ledger.applied()
    ledger.fail("gone")
    assert not ledger.may_apply(), "nothing more of a lost step"
    lost = ledger.undo(ledger.end())
    ledger.clear_failure()
    ledger.resume(lost, "gone")
    assert state.asked == ["snapshot 0", "roll back 0"] and not ledger.failed
    ledger.start(step_of(first.loader_pass))
    assert not ledger.may_apply()
    assert ledger.may_apply()


def test_errors_lose_a_step_and_are_raised_outside(ledger: StepLedger, state: State) -> None:
    with pytest.raises(ConnectionError, match="gone"):
        ledger.lose_by(ConnectionError("gone"))
    begun(ledger, state)
    ledger.lose_by(ConnectionError("gone"))
    assert ledger.failure == "gone"


def test_only_the_last_micro_step_applies(ledger: StepLedger, state: State) -> None:
    step = begun(ledger, state, micro_steps=2)
    assert ledger.accumulating and not ledger.may_apply()
    step.start_micro(1)
    assert not ledger.accumulating and ledger.may_apply()


def test_an_update_that_fails_half_way_ends_the_run(ledger: StepLedger, state: State) -> None:
    begun(ledger, state)
    ledger.updating = True
    assert ledger.updating
    for call in (ledger.may_apply, ledger.end):
        with pytest.raises(RuntimeError, match="failed half-way"):
            call()


def test_a_nested_pass_counts_no_step_and_is_forgotten(ledger: StepLedger, state: State) -> None:
    outer = begun(ledger, state)
    begun(ledger, state)
    assert (ledger.depth, ledger.outermost, ledger.needs_vote) == (2, outer, True)
    assert not ledger.commit(ledger.end(), 1, gain)
    assert (ledger.step, len(state.progress.passes)) == (outer, 2)
    ledger.reduced = True
    ledger.end()
    assert not ledger.needs_vote
    ledger.commit(outer, 1, gain)
    assert len(state.progress.passes) == 1 and ledger.next_ordinal == 1


@pytest.mark.parametrize(("reduced", "all_stay"), [(True, True), (False, True), (True, False)])
def test_surrounding_step_is_lost_unless_its_gradients_are_there(
    ledger: StepLedger, state: State, reduced: bool, all_stay: bool
) -> None:
    begun(ledger, state)
    if reduced:
        ledger.reduced = True
    begun(ledger, state)
    lost = ledger.undo(ledger.end())
    ledger.clear_failure()
    ledger.resume(lost, "gone", all_stay=all_stay)
    assert ledger.failure == (None if reduced and all_stay else "gone")


def test_pass_within_lost_step_continues_before_step_is_lost(ledger: StepLedger, state: State) -> None:
    begun(ledger, state)
    inner = begun(ledger, state)
    lost = ledger.undo(ledger.end())
    ledger.clear_failure()
    state.progress.commit(1)  # as another rank had made the inner pass's step, which is not the one that is lost
    ledger.resume(lost, "gone")
    assert ledger.failure == "gone"
    ledger.start(step_of(inner.loader_pass))
    assert not ledger.failed
    ledger.fail("gone, too")
    assert ledger.failure == "gone, too"
    again = ledger.undo(ledger.end())
    ledger.clear_failure()
    ledger.resume(again, "gone, too")
    ledger.start(step_of(inner.loader_pass))
    assert not ledger.failed
    ledger.commit(ledger.end(), 1, gain)
    assert ledger.failure == "gone, too" and not ledger.may_apply()


def test_a_surrounding_step_made_by_another_rank_is_kept(ledger: StepLedger, state: State) -> None:
    outer = begun(ledger, state)
    begun(ledger, state)
    lost = ledger.undo(ledger.end())
    ledger.clear_failure()
    outer.loader_pass.advance(8)
    ledger.resume(lost, "gone")
    assert not ledger.failed


@pytest.mark.parametrize("deeper", [0, 1])
def test_a_left_step_fails_only_steps_around_it(ledger: StepLedger, state: State, deeper: int) -> None:
    steps = [begun(ledger, state) for _ in range(2 + deeper)]
    ledger.reduced = True
    lost = ledger.undo(ledger.end())
    ledger.leave_steps(deeper)
    steps[deeper].loader_pass.advance(8)  # as another rank has committed it
    ledger.clear_failure()
    ledger.resume(lost, "gone", all_stay=False)
    left = ledger.end()
    assert left is steps[deeper] and ledger.end_left(left)
    assert ledger.failure == ("gone" if deeper else None)


@pytest.mark.parametrize("waits", [True, False])
def test_reduced_gradients_waiting_for_update_go_with_their_group(
    ledger: StepLedger, state: State, waits: bool
) -> None:
    begun(ledger, state)
    ledger.reduced = True
    begun(ledger, state)
    ledger.fail("gone")
    lost = ledger.undo(ledger.end(), waits=waits)
    ledger.clear_failure()
    ledger.resume(lost, "gone")
    assert ledger.failed is waits


def test_who_joins_within_an_epoch_replays_it_without_effects(ledger: StepLedger, state: State) -> None:
    state.progress.start_pass(0)
    state.progress.start_pass(1)
    state.progress.add_sums([((0, 0), "loss", 1.0)])
    ledger.start_replay()
    assert ledger.replaying and not ledger.may_apply()
    state.progress.add_sums([((0, 0), "loss", 5.0)])
    state.progress.count_report(0)
    assert ledger.start_pass() == 0 and ledger.replaying
    assert ledger.start_pass() == 1 and not ledger.replaying
    assert state.progress.sums == {(0, 0): {"loss": 1.0}} and state.progress.reports == 0
    assert state.asked == ["snapshot 0", "roll back 0"]


def test_left_steps_are_given_back_once_innermost_first(ledger: StepLedger, state: State) -> None:
    outer, inner = begun(ledger, state), begun(ledger, state)
    ledger.abandon(PassProgress())
    assert ledger.pop_abandoned() is None, "none of these"
    ledger.abandon(outer.loader_pass)
    ledger.abandon(inner.loader_pass)  # whose iterator was kept for longer
    assert ledger.pop_abandoned() is inner
    ledger.end()
    assert ledger.pop_abandoned() is outer
    ledger.end()
    assert ledger.pop_abandoned() is None


def test_checkpoint_counts_step_whose_update_is_in_the_model(ledger: StepLedger, state: State) -> None:
    begun(ledger, state)
    assert (ledger.resume_point(gain).steps, ledger.resume_point(gain).samples_left) == (0, 64)
    assert ledger.may_apply()
    ledger.applied()
    point = ledger.resume_point(gain)
    assert (point.steps, point.done, point.samples_left, point.passes) == (1, 1.0, 56, ((8, False),))
    assert state.progress.steps == 0, "the run itself has not continued"


def test_passes_that_are_no_nested_loops_are_refused(ledger: StepLedger, state: State) -> None:
    outer = begun(ledger, state)
    begun(ledger, state)
    with pytest.raises(RuntimeError, match="nested but not interleaved"):
        ledger.end(outer.loader_pass)
    ledger.end()
    ledger.end(outer.loader_pass)
    with pytest.raises(RuntimeError, match="belongs to the epoch"):
        ledger.end(outer.loader_pass)


def test_a_nested_steps_accumulators_are_numbered_by_position(ledger: StepLedger, state: State) -> None:
    """Ranks that have lost that step draw it again; others come to it for the first time."""
    outer = begun(ledger, state)
    around = ledger.number_in_step("here")
    nested = begun(ledger, state)
    first = [ledger.number_in_step("here") for _ in range(2)]
    ledger.undo(ledger.end())
    ledger.start(step_of(nested.loader_pass, nested.ordinal))
    assert [ledger.number_in_step("here") for _ in range(2)] == first
    ledger.commit(ledger.end(), 1, gain)
    ledger.start(step_of(nested.loader_pass, nested.ordinal))
    assert len({ledger.number_in_step("here"), *first, around}) == 4
    assert outer.made_at == {"[] here": 1}, "what nested steps made is not kept"


def test_a_pass_over_whole_batches_neither_trains_nor_nests(ledger: StepLedger, state: State) -> None:
    ledger.start_pass()
    ledger.start(step_of(state.progress.passes[0], whole=True))
    with pytest.raises(RuntimeError, match="for evaluation"):
        ledger.mark_training()
    with pytest.raises(RuntimeError, match="no loader may be iterated"):
        ledger.start_pass()


def test_left_nested_steps_keep_the_outermost_snapshot(ledger: StepLedger, state: State) -> None:
    """It may be lost later, with what its code has changed before the nested pass."""
    for _ in range(3):
        begun(ledger, state)
    ledger.leave_steps(1)
    ledger.clear_failure()
    assert ledger.has_left and state.asked[3:] == ["roll back 1", "snapshot 1"]


def test_leaving_the_outermost_step_later_rolls_back(ledger: StepLedger, state: State) -> None:
    """The group in which only nested steps were to be left has broken before it was entered."""
    for _ in range(3):
        begun(ledger, state)
    ledger.leave_steps(1)
    ledger.leave_steps(0)
    assert state.asked[3:] == ["roll back 1", "roll back 0"]


def test_left_code_sees_its_sums_of_lost_rounds(ledger: StepLedger, state: State) -> None:
    """It may divide by them."""
    first = PassProgress()
    ledger.start_round(first, (), 1, ends_pass=False, copies=False)
    begun(ledger, state)
    state.progress.sums = {(0, 0): {"samples": 8.0}}
    ledger.leave_steps(0)
    assert not state.progress.sums, "what joiners are sent"
    ledger.clear_failure()
    assert state.progress.sums == {(0, 0): {"samples": 8.0}}
