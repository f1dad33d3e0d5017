"""The tuner of one rank, in a group that takes no time: what it keeps, gives up, and passes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from elastic_ray.state.codec import decode, encode
from elastic_ray.state.layout import digest
from elastic_ray.sync.builders import Auto
from elastic_ray.sync.plan import ModelProfile, ParamInfo, SyncPlan, Topology, lower
from elastic_ray.sync.spec import Strategy
from elastic_ray.sync.switching import strategy_in_force
from elastic_ray.sync.switching.strategy_in_force import StrategyTuner
from placement.cluster.jobs import FoundStrategy

PARAMS = (
    ParamInfo(names=("table",), shape=(1000, 64), table=True, sparse=True),
    ParamInfo(names=("layer",), shape=(1024, 1024)),
)


class Collectives:
    """Of two ranks, of which the other one does what this one does."""

    rank, world_size, timeout_s, backend = 0, 2, 1.0, "gloo"

    def __init__(self) -> None:
        self.gradients, self.gathered = self, 0

    def gather_ints(self, values: Sequence[int], *, with_gradients: bool) -> list[list[int]]:
        assert with_gradients, "nothing else may be met there"
        self.gathered += 1
        return [list(values)] * 2

    def __getattr__(self, operation: str) -> Any:
        return lambda *arguments: None


class Run:
    """A run, and the model of which it consists."""

    def __init__(self, nodes: tuple[str, ...] = ("a", "b")) -> None:
        self.group = self.ledger = self.registry = self.consensus = self.state = self.progress = self.membership = self
        self.known_strategies: dict[str, FoundStrategy] | None = {}
        self.communicator = Collectives()
        self.nodes, self.step, self.steps = nodes, object(), 0
        self.device = torch.device("cpu")
        self.profile = ModelProfile(params=PARAMS)
        self.told: list[tuple[str, str, dict[str, Any]]] = []
        self.rows = {"table": 20}
        self.plan = lower(first(), self.profile, self.topology)
        self.tuner = StrategyTuner(self, Auto(), self, first(), 0)
        self.tuner.enter_group()

    @property
    def topology(self) -> Topology:
        return Topology(nodes=self.nodes)

    @property
    def touched(self) -> dict[str, int]:
        return self.rows

    def works(self, plan: SyncPlan) -> bool:
        return True

    def have_chosen(self, number: int) -> bool:
        return True

    def wait(self, work: object) -> None: ...

    def notify(self, *event: Any) -> None:
        self.told.append(event)

    def train(self, steps: int = 1, *, follow: bool = True) -> None:
        """Steps as the engine takes them."""
        for _ in range(steps):
            self.step = object()
            self.tuner.remember()
            self.tuner.notify(lambda: "the table")
            if follow:
                self.plan = lower(self.tuner.strategy, self.profile, self.topology)
            self.tuner.reduced()
            self.steps += 1

    def complete(self) -> None:
        for _ in range(200):
            self.train()
            if self.tuner.choice.settled:
                return self.train()
        raise AssertionError(f"not settled: {self.tuner.choice}")

    def group_of(self, *nodes: str) -> None:
        self.nodes = nodes
        self.tuner.enter_group()


def first() -> Strategy:
    return Auto().build(ModelProfile(params=PARAMS), Topology())


def tried(run: Run) -> Strategy:
    """Train until another strategy is tried than the first of the race."""
    while not run.tuner.choice.options or run.tuner.strategy == run.tuner.choice.options[0]:
        run.train()
    return run.tuner.strategy


@pytest.mark.parametrize("steps", [3, 12, 22])
def test_a_lost_step_leaves_nothing_behind(steps: int) -> None:
    run = Run()
    run.train(steps)
    before = run.tuner.capture()
    run.train()
    assert run.tuner.capture() != before
    run.tuner.roll_back()
    assert run.tuner.capture() == before


def test_one_step_is_measured_once_however_often_it_reduces() -> None:
    run = Run()
    run.train()
    gathered = run.communicator.gathered
    run.tuner.reduced()
    assert run.communicator.gathered == gathered


def test_steps_of_another_strategy_than_tried_do_not_count() -> None:
    run = Run()
    tried(run)
    steps = run.tuner.choice.steps
    run.train(50, follow=False)
    assert not run.tuner.choice.settled and run.tuner.choice.steps == steps


def test_a_choice_is_told_once_and_settles_the_group() -> None:
    run = Run()
    run.complete()
    run.train(5)
    ((kind, text, detail),) = run.told
    assert kind == "strategy" and text.startswith("strategy for 2 workers: ") and detail["table"] == "the table"
    gathered = run.communicator.gathered
    run.steps = 1
    run.train(50)
    assert run.communicator.gathered == gathered, "nothing is measured any more"


def test_another_group_form_is_measured_a_known_one_not() -> None:
    run = Run()
    run.complete()
    there = run.tuner.choice
    run.group_of("x", "y")
    assert run.tuner.choice == there, "other nodes of the same form"
    run.group_of("x", "x")
    assert not run.tuner.choice.settled and not run.tuner.choice.options, "one node is another form"
    run.group_of("x")
    assert run.tuner.choice.settled and run.tuner.strategy == there.strategy
    run.group_of("a", "b")
    assert run.tuner.choice == there


def test_a_trial_does_not_outlast_its_group() -> None:
    run = Run()
    at = tried(run)
    run.group_of("a", "b", "c")
    assert run.tuner.strategy != at and not run.tuner.choice.options
    run.group_of("a", "b")
    assert run.tuner.strategy == at and run.tuner.choice.steps


def test_it_chooses_anew_when_other_rows_are_touched() -> None:
    run = Run()
    run.complete()
    run.plan = lower(run.tuner.strategy, run.profile, run.topology)
    run.train(130)
    assert run.tuner.choice.settled and dict(run.tuner.choice.rows)["table"] == 20
    run.rows = {"table": 50}
    for _ in range(65):
        run.train()
        if not run.tuner.choice.settled:
            break
    assert not run.tuner.choice.settled
    run.complete()
    assert dict(run.tuner.choice.rows)["table"] == 50


@pytest.mark.parametrize("steps", [0, 5, 22, 35, 150])
def test_a_joiner_goes_on_where_the_others_are(steps: int) -> None:
    run, joiner = Run(), Run(("a",))
    run.train(steps)
    joiner.tuner.restore(decode(encode(run.tuner.capture())))
    assert joiner.tuner.capture() == run.tuner.capture()
    for each in (run, joiner):
        each.group_of("a", "b")
    assert joiner.tuner.choice == run.tuner.choice
    for each in (run, joiner):
        each.group_of("a", "b", "b")
    assert joiner.tuner.capture() == run.tuner.capture()


def test_the_second_job_of_a_kind_races_not() -> None:
    run, second = Run(), Run(("x", "y"))
    run.complete()
    found = run.tuner.found
    assert found and all(form.startswith("0 gloo ") for form in found)
    (best,) = found.values()
    assert best.name == run.tuner.strategy.name
    # here a step takes no time: what was measured of it scatters by more than a factor of two
    second.known_strategies = {form: FoundStrategy(name=best.name, step_s=best.step_s) for form in found}
    second.train(2)
    assert second.tuner.choice.settled and second.tuner.strategy.name == best.name
    assert not second.tuner.found, "others' race is not told as one's own"


def test_a_race_waits_until_the_controller_has_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.known_strategies = None
    run.train(5)
    assert not run.tuner.choice.options
    monkeypatch.setattr(strategy_in_force, "_HEARING_S", 0.0)
    run.train(2)
    assert run.tuner.choice.options, "an allocator that is away keeps no job from its race"


def test_only_what_rank_0_knows_counts() -> None:
    run = Run()
    run.known_strategies = {"0 gloo 2 on 1": FoundStrategy(name="parallax", step_s=1.0)}
    run.train()
    assert not run.tuner.choice.settled, "of another form"
    gather = run.communicator.gather_ints
    told: list[list[int]] = []

    def of_rank_1(values: Sequence[int], *, with_gradients: bool) -> list[list[int]]:
        rows = gather(values, with_gradients=with_gradients)
        told.append(list(values))
        return [rows[0], [digest("parallax"), 10**9, *rows[1][2:]]]

    run.communicator.gather_ints = of_rank_1
    run.train(2)
    assert told and not run.tuner.choice.settled
