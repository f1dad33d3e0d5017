"""Policies that misbehave, on two ranks in lockstep: the run continues without them, or ends on both where strict."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ray.adaptation import Policy, PolicyError, PolicyView, Request, ScaleRate, SetBatch, SetStrategy
from elastic_ray.adaptation.runner import PolicyRunner, SharedValues, flag_and_digest


class Worker:
    """One rank: its policies, what was applied, and what was told."""

    def __init__(self, *policies: Policy) -> None:
        self.applied, self.told = list[Request](), list[str]()
        self.runner = PolicyRunner(self, self.notify, self.notify)
        self.runner.add(policies)
        self.steps = 0

    def notify(self, kind: str, text: str, detail: Mapping[str, Any]) -> None:
        self.told.append(text)

    def apply(self, request: Request, values: SharedValues) -> str:
        self.applied.append(request)
        if isinstance(request, ScaleRate):
            values.scale_rate(request.factor)
        if isinstance(request, SetBatch):
            values.hold_batch(request.batch_size)
        return ""

    def state(self) -> dict[str, Any]:
        """All that travels to joiners."""
        return {"steps": self.steps, "applied": list(self.applied), "runner": self.runner.capture()}

    def take(self, state: Mapping[str, Any]) -> None:
        """Continue from another's state."""
        state = copy.deepcopy(dict(state))
        self.steps, self.applied = state["steps"], state["applied"]
        self.runner.restore(state["runner"])


def sums_of(workers: list[Worker]) -> list[float]:
    rows = [each.runner.ballot.values(rank, len(workers)) for rank, each in enumerate(workers)]
    return [sum(column) for column in zip(*rows, strict=True)]


def commit(worker: Worker, sums: list[float], world: int) -> None:
    worker.runner.ballot.conclude(sums, world)
    worker.steps += 1
    worker.runner.complete(worker.steps)
    worker.runner.call("after_step", PolicyView(step=worker.steps))


def step(workers: list[Worker]) -> None:
    sums = sums_of(workers)
    for worker in workers:
        commit(worker, sums, len(workers))


class Bad(Policy):
    """Does something in step 2 that it should not, on the ranks given."""

    def __init__(self, does: Callable[[Bad, PolicyView], Any], rank: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.here = rank in ranks
        self.seen: list[int] = []
        self._does = does
        self._rank = rank
        if does is ATTACKS["blocks"][0]:
            self.deadline_s = 0.3

    def state_dict(self) -> Mapping[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("here", "_does", "_rank", "strict")}

    def after_step(self, view: PolicyView) -> Any:
        self.seen.append(view.step)
        return self._does(self, view) if view.step == 2 and self.here else None


def _raise(error: BaseException) -> Any:
    raise error


def _set(policy: Bad, name: str, value: Any) -> None:
    setattr(policy, name, value)


ATTACKS: dict[str, tuple[Callable[[Bad, PolicyView], Any], str]] = {
    "blocks": (lambda p, v: threading.Event().wait(1.5), "has not returned within 0.3 s"),
    "raises": (lambda p, v: _raise(ValueError("oops")), "ValueError: oops"),
    "exits": (lambda p, v: _raise(SystemExit(3)), "it raised SystemExit: 3"),
    "endless": (lambda p, v: (ScaleRate(0.5) for _ in itertools.count()), "1000 requests at most"),
    "generator that raises": (lambda p, v: (_raise(KeyError("k")) for _ in range(1)), "KeyError: 'k'"),
    "not plain": (lambda p, v: _set(p, "lock", threading.Lock()), "Bad.lock"),
    "own hook": (lambda p, v: _set(p, "after_step", lambda view: None), "Bad.after_step"),
    "circular": (lambda p, v: p.seen.append(p.seen), "RecursionError"),
    "mixed keys": (lambda p, v: [_set(p, "keys", {1: 2, "a": 3}), 5][1:], "but returned 5"),
    "changes the view": (lambda p, v: setattr(v, "step", 9), "FrozenInstanceError"),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_misbehaving_policy_is_named_and_the_others_are_heard(
    attack: str, ranks: tuple[int, ...], strict: bool
) -> None:
    does, text = ATTACKS[attack]
    workers = [Worker(Bad(does, rank, ranks), Bad(lambda p, v: SetBatch(8), rank)) for rank in (0, 1)]
    for worker in workers:
        worker.runner._policies[0].strict = strict
    step(workers)
    step(workers)
    if strict:
        sums = sums_of(workers)
        for worker in workers:
            with pytest.raises(PolicyError, match="policy Bad"):
                commit(worker, sums, 2)
        return
    for _ in range(3):
        step(workers)
    assert all(worker.applied == [SetBatch(8)] for worker in workers)
    told = [said for worker in workers for said in worker.told]
    assert any(text in said and "Bad" in said for said in told), told
    assert workers[0].runner.capture() == workers[1].runner.capture()
    assert bool(workers[0].runner.values.off) == (ranks == (1,) or attack == "blocks")
    joiner = Worker(Bad(does, 2, ()), Bad(does, 2, ()))
    joiner.take(workers[0].state())
    assert joiner.runner.capture() == workers[0].runner.capture()


def test_a_hook_that_fails_changes_no_state() -> None:
    worker = Worker(Bad(ATTACKS["raises"][0], 0))
    for _ in range(3):
        step([worker])
    assert worker.runner.capture()["states"] == [{"seen": [1, 3]}]


def test_chance_switches_a_policy_off_and_leaves_equal_values() -> None:
    dice = random.Random(1)
    workers = [Worker(Bad(lambda p, v: ScaleRate(dice.random() + 0.1), rank)) for rank in (0, 1)]
    for _ in range(4):
        step(workers)
    assert not workers[0].applied and workers[0].runner.values.off.keys() == {0}
    assert "neither by chance" in workers[0].told[0]


def test_nan_and_mixed_keys_in_state_are_equal_everywhere() -> None:
    def odd(policy: Bad, view: PolicyView) -> Any:
        _set(policy, "last", float("nan"))
        _set(policy, "keys", {1: float("inf"), "a": (1, 2)})
        return SetBatch(4)

    workers = [Worker(Bad(odd, rank)) for rank in (0, 1)]
    for _ in range(3):
        step(workers)
    assert all(worker.applied == [SetBatch(4)] for worker in workers)
    assert flag_and_digest([{"a": 1, 2: 3}]) == flag_and_digest([{2: 3, "a": 1}]) != flag_and_digest([{"2": 3, "a": 1}])


class Counts(Policy):
    """Its counter is made by a hook, not at the beginning."""

    def after_step(self, view: PolicyView) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return ScaleRate(2.0) if self.count == 1 else None


def test_lost_step_takes_back_new_attributes_and_changed_lists() -> None:
    workers = [Worker(Counts(), Bad(lambda p, v: None, 0)) for _ in range(2)]
    before = workers[0].state()
    step(workers)
    after = workers[0].state()
    step(workers)
    assert after["runner"]["states"] == [{"count": 1}, {"seen": [1]}]
    for worker in workers:
        worker.take(before)
        assert worker.runner.capture()["states"] == [{}, {}]
    step(workers)
    assert workers[0].state() == after


def test_two_of_class_are_two_one_twice_is_one() -> None:
    one, other = Counts(), Counts()
    worker = Worker(one, other, one)
    worker.runner.add([other])
    for _ in range(3):
        step([worker])
    assert worker.applied == [ScaleRate(2.0)] * 2 and (one.count, other.count) == (3, 3)


def test_thread_that_changes_attributes_does_not_tear_what_travels() -> None:
    over = threading.Event()

    class Threaded(Policy):
        def __init__(self) -> None:
            self.table = {0: 0}

        def after_step(self, view: PolicyView) -> Any:
            if view.step == 1:
                threading.Thread(target=self._churn, daemon=True).start()

        def _churn(self) -> None:
            number = 0
            while not over.is_set():
                number += 1
                table = self.table
                table[number % 5000] = number

    try:
        worker = Worker(Threaded())
        for _ in range(100):
            step([worker])
            assert copy.deepcopy(worker.runner.capture()) == worker.runner.capture()
        assert all("Threaded.after_step" in said for said in worker.told)
    finally:
        over.set()


class Random(Policy):
    """Asks by a script that all ranks have."""

    def __init__(self, script: list[Any]) -> None:
        self.count = 0
        self._script = script

    def state_dict(self) -> Mapping[str, Any]:
        return {"count": self.count}

    def after_step(self, view: PolicyView) -> Any:
        self.count += 1
        return self._script[view.step % len(self._script)]


requests = st.sampled_from([SetBatch(64), SetBatch(None), ScaleRate(0.5), ScaleRate(4.0), SetStrategy("bf16")])
answers = st.lists(st.none() | requests | st.lists(requests, max_size=3), min_size=1, max_size=6)
# What happens in a step: how many ranks have committed it when the group breaks (None: it does not break), who dies
# then, and how many join.
steps = st.lists(st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), max_size=10)


@settings(max_examples=50, deadline=None)
@given(script=answers, second=answers, happens=steps, world=st.integers(1, 4))
def test_whoever_dies_whenever_all_ranks_have_applied_the_same(
    script: list[Any], second: list[Any], happens: list[tuple[int, int, int] | None], world: int
) -> None:
    """Against one rank that nothing happens to: same requests, same order, policies' state of the committed steps."""

    def new() -> Worker:
        return Worker(Random(script), Random(second))

    workers, alone = [new() for _ in range(world)], new()
    for event in happens:
        committed, victim, joiners = event or (len(workers), None, 0)
        before = [each.state() for each in workers]
        sums = sums_of(workers)
        for worker in workers[:committed]:
            commit(worker, sums, len(workers))
        if event is not None:
            kept = [n for n in range(len(workers)) if n != victim or len(workers) == 1]
            for n in kept:
                if n >= committed:
                    workers[n].take(before[n])  # its step is lost
            furthest = max((workers[n] for n in kept), key=lambda each: each.steps)
            survivors = [workers[n] for n in kept]
            newcomers = [new() for _ in range(joiners)]
            for worker in [*(each for each in survivors if each.steps < furthest.steps), *newcomers]:
                worker.take(furthest.state())
            workers = [*survivors, *newcomers]
            for worker in workers:
                worker.runner.ballot.start()
        while alone.steps < workers[0].steps:
            step([alone])
        for worker in workers:
            assert worker.state() == alone.state()
            assert worker.runner.capture()["states"] == [{"count": alone.steps} if alone.steps else {}] * 2
