"""The passes of a run's loaders, with fakes for all but the ledger of steps and the sums, which are pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.agreed_changes import AgreedChanges
from elastic_ray.consensus.intents import Announced, Intent, RanksDisagreeError
from elastic_ray.membership.messages import Returned
from elastic_ray.monitoring.monitoring import StepMeter
from elastic_ray.session.loader_passes import LoaderPasses
from elastic_ray.state.progress import PassProgress, RunProgress
from elastic_ray.steps.ledger import StepLedger, StepSums
from elastic_ray.steps.sample_tally import SampleTally
from elastic_ray.steps.step import LoaderStep
from elastic_ray.stragglers.gpu_types import TypeShares
from tests.session.steps import step_of


class Changes:
    """Finds a group at once, whose furthest rank has ended so many passes."""

    def __init__(self, clear_failure: Callable[[], None]) -> None:
        self.between, self.causes, self.furthest = list[bool](), list[str](), 0
        self.furthest_passes = 0
        self._clear_failure = clear_failure

    def check_group(self) -> None: ...

    def between_steps(self, can_switch: Callable[[int], bool]) -> None:
        self.between.append(can_switch(32))

    def regroup(self, cause: str) -> int:
        self.causes.append(cause)
        self._clear_failure()
        return self.furthest


class Votes:
    """All ranks agree, but for the first votes, which fail."""

    def __init__(self, failing: int = 0) -> None:
        self.failing, self.intents, self.details = failing, list[Intent](), list[int]()
        self.plans = list[Any]()

    def agree_on(self, what: Announced, payload: Any = (), plan: Any = None) -> None:
        self.vote(what, {}, plan=plan)

    def vote(self, what: Announced, added: Any, *, some_are_idle: bool = False, plan: Any = None) -> list[Any]:
        self.plans.append(plan)
        self.intents.append(what.intent)
        self.details.append(what.detail)
        if len(self.intents) <= self.failing:
            raise CommunicationFailedError("broke")
        return [(key, name, 2 * value) for key, sums in added.items() for name, value in sums.items()]


class State:
    """Where the run stands, and nothing to undo."""

    def __init__(self) -> None:
        self.progress, self.joined = RunProgress(), False

    def snapshot(self) -> None: ...

    def forget_snapshot(self) -> None: ...

    def roll_back(self) -> None: ...


class Parts:
    """A group, models and buffers."""

    generation, buffer_layout, world_size, mixed = 3, 7, 2, False
    gradients_wait = replaces_broken = False
    communicator: Any = "the group"

    def __init__(self) -> None:
        self.returned: tuple[Returned, ...] = ()
        self.models, self.synchronised, self.strategy_key = self, list[Any](), ""
        self.drifts, self.breaks, self.averaged = False, False, list[str]()

    def drift_layout(self, *, trained: bool) -> int:
        return (2 if trained else 1) if self.drifts else 0

    def after_step(self) -> None:
        if self.breaks:
            raise CommunicationFailedError("broke in an average")
        self.averaged.append("step")

    def collapse(self) -> None:
        self.averaged.append("consensus")

    def gain(self, scale: float) -> float:
        return scale / 2

    def sync_buffers(self, communicator: Any) -> None:
        self.synchronised.append(communicator)


class Clock:
    """Notes the shape of each step, None for one that trained nothing."""

    def __init__(self) -> None:
        self.edges, self.micros = list[BatchChoice | None](), 0

    def edge(
        self,
        shape: BatchChoice | None,
        micro_steps: int,
        samples: int,
        strategy: str | None,
        *,
        uneven: bool = False,
    ) -> None:
        self.edges.append(shape)

    def micro(self) -> None:
        self.micros += 1


class Policies:
    """Notes what is asked."""

    active = True

    def __init__(self) -> None:
        self.asked = list[str]()
        self.ended: PassProgress | None = None

    def before_step(self, step: LoaderStep) -> None:
        self.asked.append("before_step")

    def after_step(self, step: LoaderStep) -> None:
        self.asked.append("after_step")

    def end_epoch(self) -> None:
        self.asked.append("end_epoch")

    def ends(self, loader_pass: PassProgress) -> bool:
        return self.ended is loader_pass


class Stragglers:
    """Notes the steps that are reported to it."""

    slow = ()

    def __init__(self) -> None:
        self.uneven, self.steps = False, list[Any]()

    def after_step(self, sizes: Any) -> None:
        self.steps.append(sizes)


class Run:
    """The parts that the passes go through; a step may be begun in them."""

    faults, wishes = True, None

    def __init__(self, failing: int = 0) -> None:
        self.states, self.sums, self.clock, self.meter = State(), StepSums(), Clock(), StepMeter()
        self.stragglers = Stragglers()
        self.meter.ask()
        self.gpu_types = TypeShares(members=lambda: (), measured=lambda: ())
        self.ledger, self.agreed = StepLedger(self.states), AgreedChanges(SimpleNamespace())
        self.tally = SampleTally(self.ledger)
        self.consensus, self.group, self.adaptation = Votes(failing), Parts(), Policies()
        self.registry, self.changes, self.moments = self.group, Changes(self.ledger.clear_failure), list[str]()
        self.moment, self.told = self.moments.append, list[tuple[str, str, int]]()
        self.passes = LoaderPasses(self, self.changes, self.adaptation)

    def tell_once(self, kind: str, text: str, number: int) -> None:
        self.told.append((kind, text, number))

    def begin(self, loader_pass: PassProgress) -> None:
        self.passes.begin_step(step_of(loader_pass, self.passes.next_ordinal))


def test_step_without_gradients_is_voted_on_and_adds_up() -> None:
    run = Run()
    loader_pass = run.passes.enter()
    run.begin(loader_pass)
    run.sums.add(1, (-1, 0), "loss", 1.5)
    assert run.passes.edge(loader_pass)
    assert run.consensus.intents == [Intent.EDGE] and run.changes.between == [True]
    assert run.states.progress.sums == {(-1, 0): {"loss": 3.0}}
    run.begin(loader_pass)
    run.ledger.mark_reduced()
    assert run.passes.edge(loader_pass)
    assert run.consensus.intents == [Intent.EDGE], "the vote has ridden on the gradients"
    assert run.moments == ["edge", "edge"]


def test_sums_are_voted_on_even_where_gradients_were_reduced() -> None:
    run = Run()
    run.sums.new_key(0)
    run.begin(loader_pass := run.passes.enter())
    run.ledger.mark_reduced()
    assert run.passes.edge(loader_pass) and run.consensus.intents == [Intent.EDGE]


@pytest.mark.parametrize("trains", [True, False])
def test_models_are_averaged_after_steps_made_one_after_passes(trains: bool) -> None:
    run = Run()
    run.registry.drifts = True
    run.begin(loader_pass := run.passes.enter())
    if trains:
        run.ledger.mark_training()
    assert run.passes.edge(loader_pass)
    assert run.consensus.details == [2 if trains else 1] and run.registry.averaged == ["step"] * trains
    run.passes.end_pass(loader_pass, 64)
    assert run.registry.averaged == ["step"] * trains + ["consensus"]


def test_models_stay_as_they_are_within_a_step() -> None:
    run = Run()
    run.registry.drifts = True
    run.begin(run.passes.enter())
    run.ledger.mark_training()
    run.begin(inner := run.passes.enter())
    assert run.passes.edge(inner)
    run.passes.end_pass(inner, 64)
    assert run.consensus.details[:1] == [0] and run.registry.averaged == []


def test_group_that_breaks_in_an_average_loses_no_step() -> None:
    run = Run()
    run.registry.drifts = run.registry.breaks = True
    run.begin(loader_pass := run.passes.enter())
    run.ledger.mark_training()
    assert run.passes.edge(loader_pass), "it is committed"
    assert run.changes.causes == ["broke in an average"] and run.states.progress.steps == 1
    assert run.changes.between == [], "what was agreed on in another group does not count"


@pytest.mark.parametrize("trains", [True, False])
def test_a_committed_step_counts_with_its_generation_and_gain(trains: bool) -> None:
    run = Run()
    run.begin(loader_pass := run.passes.enter())
    for micro_steps, shape in ((2, BatchChoice(atomic_bsz=8, accum_steps=1)), (2, BatchChoice(atomic_bsz=8))):
        step = dataclasses.replace(step_of(loader_pass, micro_steps=micro_steps), shape=shape)
        run.passes.end_micro_step(step)  # one that is half a batch tells no time
    if trains:
        run.ledger.mark_training()
    assert run.passes.edge(loader_pass)
    progress = run.states.progress
    assert (progress.loader_steps, progress.lineage) == (1, 3)
    assert (progress.steps, progress.done) == ((1, 1.0) if trains else (0, 0.0))
    assert run.clock.edges == [BatchChoice(atomic_bsz=8) if trains else None] and run.clock.micros == 1


def test_a_step_whose_vote_fails_is_drawn_again_elsewhere() -> None:
    run = Run(failing=1)
    loader_pass = run.passes.enter()
    run.begin(loader_pass)
    assert not run.passes.edge(loader_pass)
    assert run.changes.causes == ["broke"] and (loader_pass.position, run.ledger.depth) == (0, 0)
    assert run.changes.between == [] and run.clock.edges == []
    run.begin(loader_pass)
    assert run.passes.edge(loader_pass) and loader_pass.position == 8


def test_failed_reduction_is_not_voted_on_sums_are_undone() -> None:
    run = Run()
    run.begin(loader_pass := run.passes.enter())
    run.sums.add(1, (-1, 0), "loss", 1.5)
    run.ledger.fail("gradients")
    assert not run.passes.edge(loader_pass)
    assert run.changes.causes == ["gradients"] and run.consensus.intents == []
    assert run.sums.take(1) == {}


def test_nothing_changes_after_a_step_within_another() -> None:
    run = Run()
    run.begin(outer := run.passes.enter())
    run.begin(inner := run.passes.enter())
    assert run.passes.edge(inner)
    run.passes.end_pass(inner, 8)
    assert run.changes.between == [] and run.clock.edges == []
    assert run.passes.edge(outer)
    assert run.changes.between == [True] and len(run.clock.edges) == 1


def test_step_around_a_lost_one_is_lost_with_it() -> None:
    run = Run(failing=1)
    run.begin(outer := run.passes.enter())
    run.begin(inner := run.passes.enter())
    lost = [(run.passes.edge(each), run.ledger.failure) for each in (inner, outer)]
    assert lost == [(False, "broke"), (False, None)]
    assert run.changes.causes == ["broke", "broke"] and outer.position == 0


def test_a_pass_ends_when_all_ranks_have_said_so() -> None:
    run = Run(failing=2)
    loader_pass = run.passes.enter()
    run.passes.end_pass(loader_pass, 64)
    assert run.consensus.intents == [Intent.END_OF_PASS] * 3 and len(run.changes.causes) == 2
    assert loader_pass.done and run.states.progress.ended_passes == 1 and run.changes.between == [True]
    assert run.group.synchronised == ["the group"]


def test_pass_ended_by_another_rank_needs_no_further_vote() -> None:
    run = Run(failing=1)
    run.changes.furthest = 1
    loader_pass = run.passes.enter()
    run.passes.end_pass(loader_pass, 64)
    assert loader_pass.done and run.consensus.intents == [Intent.END_OF_PASS]
    assert run.group.synchronised == []


def test_pass_left_by_another_rank_is_over_at_once() -> None:
    for at_the_end in (False, True):
        run = Run()
        loader_pass = run.passes.enter()
        run.changes.furthest_passes = 1
        if not at_the_end:
            run.passes.check_group(loader_pass)
            assert loader_pass.done
        run.passes.end_pass(loader_pass, 64)
        assert loader_pass.done and run.consensus.intents == [] and run.states.progress.ended_passes == 1


def test_a_nested_pass_does_not_end_with_another_ranks() -> None:
    run = Run()
    run.begin(run.passes.enter())
    nested = run.passes.enter()
    run.changes.furthest_passes = 1
    run.passes.check_group(nested)
    assert not nested.done


def test_after_pass_group_may_be_as_large_as_it() -> None:
    run = Run()
    run.passes.end_pass(run.passes.enter(), 31)
    assert run.changes.between == [False], "32 ranks are more than there are samples"


def test_a_left_loop_is_ended_before_the_next_begins() -> None:
    run = Run()
    first = run.passes.enter()
    run.begin(first)
    run.passes.abandon(first)
    run.passes.settle()
    assert first.done and first.position == 8 and run.changes.between == []
    assert run.consensus.intents == [Intent.EDGE, Intent.END_OF_PASS]
    run.passes.enter()
    assert run.changes.between == [True]


def test_an_epochs_end_ends_passes_and_carries_out_changes() -> None:
    run = Run()
    run.begin(left := run.passes.enter())
    run.passes.end_epoch()
    assert left.done and run.passes.step is None
    assert run.states.progress.epoch == 1 and run.changes.between == [True]


def test_what_decides_the_data_is_compared_once_per_group() -> None:
    run, told = Run(), list[int]()

    def facts() -> dict[str, int]:
        told.append(1)
        return {"seed": 3}

    loader_pass = run.passes.enter()
    assert all(run.passes.compare_plan(loader_pass, facts) for _ in range(3))
    assert run.consensus.intents == [Intent.PLAN] and run.consensus.plans[0].facts == {"seed": 3}
    run.group.generation = 4
    assert run.passes.compare_plan(loader_pass, facts) and run.consensus.intents == [Intent.PLAN] * 2
    run.group.generation, run.group.world_size = 5, 1
    assert run.passes.compare_plan(loader_pass, facts) and len(told) == 2, "one rank has nobody to compare with"


def test_step_is_cut_anew_if_the_comparing_group_breaks() -> None:
    run = Run(failing=1)
    assert not run.passes.compare_plan(run.passes.enter(), dict)
    assert run.changes.causes == ["broke"]


def test_after_broken_group_data_is_compared_with_the_step() -> None:
    run = Run()
    loader_pass = run.passes.enter()
    run.group.generation, run.group.replaces_broken = 4, True
    assert run.passes.compare_plan(loader_pass, lambda: {"seed": 3}) and not run.consensus.intents
    run.begin(loader_pass)
    run.ledger.mark_reduced()
    run.passes.edge(loader_pass)  # it has no vote otherwise
    assert run.consensus.intents == [Intent.EDGE] and run.consensus.plans[0].facts == {"seed": 3}
    run.begin(loader_pass)
    run.ledger.mark_reduced()
    run.passes.edge(loader_pass)
    run.passes.end_pass(loader_pass, 16)
    assert run.passes.compare_plan(run.passes.enter(), dict), "all ranks have come to the same place since"
    assert run.consensus.intents == [Intent.EDGE, Intent.END_OF_PASS, Intent.PLAN]


def test_a_nested_passs_data_is_compared_with_its_end() -> None:
    run = Run()
    run.begin(run.passes.enter())
    nested = run.passes.enter()
    assert run.passes.compare_plan(nested, lambda: {"seed": 3}) and not run.consensus.intents
    run.passes.end_pass(nested, 8)
    assert run.consensus.intents == [Intent.END_OF_PASS] and run.consensus.plans[0].facts == {"seed": 3}


def test_a_step_after_another_rank_has_returned_is_refused() -> None:
    run = Run()
    run.group.communicator = SimpleNamespace(rank=0)
    run.group.returned = (Returned(rank=1, steps=1),)
    loader_pass = run.passes.enter()
    assert run.passes.compare_plan(loader_pass, dict), (
        "the other one was a step ahead: this step is the same as its last"
    )
    run.begin(loader_pass)
    assert run.passes.edge(loader_pass)
    with pytest.raises(RanksDisagreeError, match=r"rank 1 has returned from the train function after 1 steps; rank 0"):
        run.passes.compare_plan(loader_pass, dict)
