"""Policies on several ranks in lockstep: all apply a request, or none; failures and differences are told by name."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ray.adaptation import Policy, PolicyError, PolicyView, Report, Request, Resize, ScaleRate, SetBatch, Stop
from elastic_ray.adaptation.policy import Answer, check_policies
from elastic_ray.adaptation.runner import PolicyRunner, SharedValues


class Rank:
    """One rank's runner, what it has applied and told."""

    def __init__(self, *policies: Policy) -> None:
        self.applied = list[Request]()
        self.told = list[str]()
        self.told_here = list[str]()
        self.refuses = ""
        self.runner = PolicyRunner(self, self._tell, self._tell_here)
        self.runner.add(policies)

    def _tell(self, kind: str, text: str, detail: Mapping[str, Any]) -> None:
        assert kind == "policy"
        self.told.append(text)

    def _tell_here(self, kind: str, text: str, detail: Mapping[str, Any]) -> None:
        self.told_here.append(text)

    def apply(self, request: Request, values: SharedValues) -> str:
        if not self.refuses:
            self.applied.append(request)
            if isinstance(request, ScaleRate):
                values.scale_rate(request.factor)
        return self.refuses


def step(ranks: list[Rank], number: int, *, lost: bool = False) -> None:
    """One step of all ranks: their sums, then, unless it is lost, its end."""
    remembered = [copy.deepcopy(rank.runner.capture()) for rank in ranks]
    for rank in ranks:
        rank.runner.call("before_step", PolicyView(step=number - 1))
    rows = [rank.runner.ballot.values(at, len(ranks)) for at, rank in enumerate(ranks)]
    sums = [sum(column) for column in zip(*rows, strict=True)]
    for rank, before in zip(ranks, remembered, strict=True):
        rank.runner.ballot.conclude(sums, len(ranks))
        if lost:
            rank.runner.ballot.start()
            rank.runner.restore(before)
        else:
            rank.runner.complete(number)
            rank.runner.call("after_step", PolicyView(step=number))


class Asks(Policy):
    """Asks after one step."""

    def __init__(self, at: int, what: Callable[[], Answer]) -> None:
        self.at, self.seen = at, 0
        self._what = what

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def after_step(self, view: PolicyView) -> Answer:
        self.seen += 1
        return self._what() if view.step == self.at else None


def test_a_request_is_applied_everywhere_after_the_next_step() -> None:
    ranks = [Rank(Asks(2, lambda: [SetBatch(64), ScaleRate(0.5)])) for _ in range(3)]
    for number in (1, 2):
        step(ranks, number)
        assert not any(rank.applied for rank in ranks)
    step(ranks, 3)
    assert all(rank.applied == [SetBatch(64), ScaleRate(0.5)] for rank in ranks)
    assert all(rank.runner.values.rate_factor == 0.5 for rank in ranks)
    assert ranks[0].told == [
        "Asks.after_step after step 3: SetBatch(batch_size=64)",
        "Asks.after_step after step 3: ScaleRate(factor=0.5)",
    ]
    step(ranks, 4)
    assert len(ranks[0].applied) == 2


def test_lost_step_keeps_the_request_and_the_policys_state() -> None:
    ranks = [Rank(Asks(1, lambda: SetBatch(64))) for _ in range(2)]
    step(ranks, 1)
    for _ in range(3):
        step(ranks, 2, lost=True)
        assert not ranks[0].applied
    joiner = Rank(Asks(1, lambda: SetBatch(64)))
    joiner.runner.restore(copy.deepcopy(ranks[0].runner.capture()))
    ranks.append(joiner)
    step(ranks, 2)
    assert all(rank.applied == [SetBatch(64)] for rank in ranks)
    assert [rank.runner.capture()["states"] for rank in ranks] == [[{"seen": 2}]] * 3


class Fails(Policy):
    """Does what it should not, after step 1."""

    def __init__(self, how: str) -> None:
        self.how = how
        if how == "blocks":
            self.deadline_s = 0.2

    def after_step(self, view: PolicyView) -> Any:
        if view.step != 1:
            return None
        if self.how == "raises":
            raise ValueError("oops")
        if self.how == "blocks":
            threading.Event().wait(2.0)
        return 3 if self.how == "type" else None


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "Fails.after_step: ValueError: oops"),
        ("type", "Fails.after_step: TypeError: a hook returns a request"),
        ("blocks", "Fails.after_step: it has not returned within 0.2 s; it is not asked any more"),
    ],
)
def test_failures_name_policy_hook_and_reason_and_run_continues(how: str, text: str) -> None:
    ranks = [Rank(Fails(how), Asks(1, lambda: SetBatch(8))) for _ in range(2)]
    for number in (1, 2, 3):
        step(ranks, number)
    assert len([told for told in ranks[0].told if told.startswith(text)]) == 1
    assert all(rank.applied == [SetBatch(8)] for rank in ranks)
    assert all(bool(rank.runner.values.off) == (how == "blocks") for rank in ranks)


@pytest.mark.parametrize("how", ["raises", "type", "blocks"])
def test_a_strict_policy_ends_the_run_on_every_rank(how: str) -> None:
    ranks = [Rank(Fails(how)) for _ in range(2)]
    for rank in ranks:
        for policy in rank.runner._policies:
            policy.strict = True
    step(ranks, 1)
    for rank in ranks:
        rank.runner.ballot.conclude([2 * value for value in rank.runner.ballot.values(0, 2)], 2)
        with pytest.raises(PolicyError, match=r"policy Fails failed in after_step"):
            rank.runner.complete(2)


def test_a_policy_that_differs_between_ranks_is_left_out() -> None:
    ranks = [Rank(Asks(1, lambda at=at: SetBatch(8 + at)), Asks(1, lambda: Stop("done"))) for at in range(2)]
    for number in (1, 2, 3):
        step(ranks, number)
    assert all(rank.applied == [Stop("done")] for rank in ranks)
    assert "does not say the same on all ranks" in ranks[0].told[0]
    assert all(list(rank.runner.values.off) == [0] for rank in ranks)


def test_policy_that_fails_on_one_rank_is_told_there() -> None:
    ranks = [Rank(Fails("")), Rank(Fails("raises"))]
    for number in (1, 2):
        step(ranks, number)
    assert "does not say the same" in ranks[0].told[0] and not ranks[0].told_here
    assert "ValueError: oops" in ranks[1].told_here[0]


def test_a_refusal_is_told_once_and_raises_where_strict() -> None:
    always = Asks(1, lambda: None)
    always.after_step = lambda view: SetBatch(8)
    rank = Rank(always)
    rank.refuses = "the batch is fixed"
    for number in (1, 2, 3):
        step([rank], number)
    assert rank.told == ["Asks.after_step asked for SetBatch(batch_size=8), which is refused: the batch is fixed"]
    always.strict = True
    with pytest.raises(PolicyError, match="the batch is fixed"):
        step([rank], 4)


class Counts(Policy):
    """Counts steps, and asks by what it counted."""

    def __init__(self, every: int, start: int = 0) -> None:
        self.every, self.count, self.begun = every, start, 0

    def before_step(self, view: PolicyView) -> None:
        self.begun += 1

    def after_step(self, view: PolicyView) -> Answer:
        self.count += 1
        return ScaleRate(2.0) if self.count % self.every == 0 else None


@settings(max_examples=60, deadline=None)
@given(
    every=st.integers(1, 4),
    fates=st.lists(st.sampled_from(["kept", "lost", "grows", "shrinks"]), min_size=1, max_size=25),
)
def test_whatever_is_lost_all_ranks_have_applied_the_same(every: int, fates: list[str]) -> None:
    ranks, number = [Rank(Counts(every)) for _ in range(2)], 0
    for fate in fates:
        number += fate != "lost"
        step(ranks, number if fate != "lost" else number + 1, lost=fate == "lost")
        if fate == "grows":
            joiner = Rank(Counts(every))
            joiner.runner.restore(copy.deepcopy(ranks[0].runner.capture()))
            ranks.append(joiner)
        if fate == "shrinks" and len(ranks) > 1:
            del ranks[0]
    captured = [rank.runner.capture() for rank in ranks]
    assert all(each == captured[0] for each in captured)
    asked = number // every - (number > 0 and number % every == 0)
    assert ranks[0].runner.values.rate_factor == 2.0**asked
    assert captured[0]["states"] == ([{"count": number, "begun": number}] if number else [{}])


def test_settings_of_run_are_not_overwritten_by_earlier_state() -> None:
    before = Rank(Counts(every=3))
    step([before], 1)
    after = Rank(Counts(every=5))
    after.runner.restore(before.runner.capture())
    policy = after.runner._policies[0]
    assert isinstance(policy, Counts) and (policy.every, policy.count) == (5, 1)


def test_state_must_be_plain_and_the_attribute_is_named() -> None:
    policy = Counts(1)
    policy.seen = {"x": [{1, 2}]}  # type: ignore[attr-defined]
    with pytest.raises(PolicyError, match=r"Counts.seen\['x'\]\[0\] is \{1, 2\} of type set"):
        Rank(policy).runner.check_plain()


@pytest.mark.parametrize("given_", [Policy, [Policy], 3, [3], "policy"])
def test_what_is_no_policy_is_refused(given_: Any) -> None:
    with pytest.raises(TypeError, match="polic"):
        check_policies(given_)


def test_a_word_for_strict_is_refused() -> None:
    policy = Policy()
    policy.strict = "no"
    with pytest.raises(TypeError, match=r"Policy\.strict must be True or False, but got 'no'"):
        check_policies(policy)


def test_one_policy_several_or_none_may_be_given() -> None:
    policy = Policy()
    assert check_policies(None) == () and check_policies(policy) == (policy,)
    assert check_policies([policy, policy]) == (policy, policy)


def test_a_report_at_the_very_end_is_still_told() -> None:
    class Last(Policy):
        def after_train(self, view: PolicyView) -> Answer:
            return [Report({"steps": view.step}), SetBatch(3)]

    rank = Rank(Last())
    rank.runner.call("after_train", PolicyView(step=7))
    rank.runner.end(7)
    assert rank.told == ["Last.after_train after step 7: Report(metrics={'steps': 7})"]


class Wishes(Policy):
    """Asks for a size after step 1, and fails for good or differs after step 3."""

    def __init__(self, how: str = "", to: int = 3, rank: int = 0) -> None:
        self.how, self.to, self.rank = how, to, rank
        if how == "blocks":
            self.deadline_s = 0.2

    def after_step(self, view: PolicyView) -> Answer:
        if view.step == 3 and self.how == "blocks":
            threading.Event().wait(1.0)
        if view.step == 3 and self.how == "differs":
            return SetBatch(64 + self.rank)
        return Resize(to=self.to) if view.step == 1 else None


class WishingRank(Rank):
    """A rank that takes wishes note of."""

    def apply(self, request: Request, values: SharedValues) -> str:
        if isinstance(request, Resize):
            values.wish_for(request.bounds)
        return super().apply(request, values)


@pytest.mark.parametrize("how", ("", "blocks", "differs"))
def test_a_wish_ends_with_the_policy_whose_it_is(how: str) -> None:
    ranks = [WishingRank(Wishes(how, rank=at), Asks(2, lambda: SetBatch(64))) for at in range(2)]
    for number in (1, 2, 3):
        step(ranks, number)
    assert [rank.runner.values.wish for rank in ranks] == [(3, 3)] * 2
    for number in (4, 5):
        step(ranks, number)
    assert [rank.runner.values.wish for rank in ranks] == [None if how else (3, 3)] * 2


def test_a_wish_outlives_other_policies_but_not_its_own() -> None:
    ranks = [WishingRank(Fails("blocks"), Wishes()) for _ in range(2)]
    for number in (1, 2, 3):
        step(ranks, number)
    assert all(rank.runner.values.off and rank.runner.values.wish == (3, 3) for rank in ranks)
    state = ranks[0].runner.capture()
    same, other = WishingRank(Fails("blocks"), Wishes()), WishingRank(Wishes())
    same.runner.restore(copy.deepcopy(state))
    other.runner.restore(copy.deepcopy(state))
    assert same.runner.values.wish == (3, 3) and other.runner.values.wish is None


def test_copies_that_come_another_way_are_asked_once() -> None:
    rank = Rank(Wishes(), Wishes(), Wishes(to=2))
    rank.runner.add([copy.deepcopy(Wishes()), Fails("raises"), Fails("raises")])
    assert len(rank.runner.capture()["names"]) == 5
    rank.runner.add([Wishes(), Wishes(), Wishes()])
    assert len(rank.runner.capture()["names"]) == 6


class _Owner(Policy):
    owns_batch = True

    def before_step(self, view: PolicyView) -> Answer:
        return SetBatch(64)


def test_the_owner_of_the_batch_alone_sets_it() -> None:
    class Other(Policy):
        strict = True

        def before_step(self, view: PolicyView) -> Answer:
            return [SetBatch(8), ScaleRate(2.0)]

    ranks = [Rank(_Owner(), Other()) for _ in range(2)]
    step(ranks, 1)
    assert all(rank.applied == [SetBatch(64), ScaleRate(2.0)] for rank in ranks)


def test_batches_to_come_are_told_by_all_policies() -> None:
    class Told(Policy):
        def __init__(self, *pairs: Any) -> None:
            self.pairs = list(pairs)

        def coming_batches(self, view: PolicyView) -> Any:
            return self.pairs

    view = PolicyView(samples=100)
    good, more = Told((5, 64), (50.5, 128)), Told(*((100 + each, 256) for each in range(20)))
    for bad in (Told((5, 0)), Told((float("nan"), 8)), Told(3), Told(("soon", 8))):
        found = Rank(bad, good, more).runner.coming_batches(view)
        assert found[:3] == ((105.0, 64), (150.5, 128), (200.0, 256)) and len(found) == 16
