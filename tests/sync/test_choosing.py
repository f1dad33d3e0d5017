"""Choosing a strategy, without a group: candidates in their order, their race, and the one that is kept."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ray.state.codec import decode, encode
from elastic_ray.state.layout import digest
from elastic_ray.sync import StrategyError
from elastic_ray.sync.builders import NAMED
from elastic_ray.sync.choosing.candidates import candidates, consider, describe, what_is_done
from elastic_ray.sync.choosing.choice import (
    UNHEARD,
    Choice,
    Measured,
    Standing,
    Step,
    advance,
    leave,
    most_candidates,
    standing,
    watch_rows,
)
from elastic_ray.sync.plan import ModelProfile, OptimizerInfo, ParamInfo, Topology, lower
from elastic_ray.sync.spec import Reduce, Rows, Strategy

SECONDS = st.floats(1e-6, 10.0)

SHAPES = st.one_of(
    st.tuples(st.integers(1, 500)),
    st.tuples(st.integers(1, 3000), st.integers(1, 64)),
    st.tuples(st.integers(1, 64), st.integers(1, 64), st.integers(1, 3), st.integers(1, 3)),
)


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile:
    params = []
    for index in range(draw(st.integers(1, 6))):
        shape = draw(SHAPES)
        is_table = len(shape) == 2 and draw(st.booleans())
        names = tuple(f"p{index}.{twin}" for twin in range(draw(st.integers(1, 2))))
        sparse = is_table and draw(st.booleans())
        params.append(ParamInfo(names=names, shape=shape, table=is_table, sparse=sparse, group=draw(st.integers(0, 1))))
    takes, only = draw(st.booleans()), draw(st.booleans())
    return ModelProfile(params=tuple(params), optimizer=OptimizerInfo(takes_sparse=takes, only_sparse=only))


@given(profiles(), st.integers(2, 5), st.booleans())
@settings(deadline=None)
def test_candidates_are_never_refused_and_never_the_same(profile: ModelProfile, world: int, exact: bool) -> None:
    topology = Topology(nodes=("a",) * world)
    found = candidates(profile, topology, exact=exact)
    assert len(found) <= 50
    for each in found:
        assert lower(each.strategy, profile, topology) == each.plan
        assert each.strategy.exact or not exact
    assert len({each.plan.digest for each in found}) == len(found)
    assert len({each.strategy.name for each in found}) == len(found), "people must be able to tell them apart"
    assert found == candidates(profile, topology, exact=exact)
    try:
        lower(Strategy(), profile, topology)
    except StrategyError:
        return
    assert found[0].plan.buckets == lower(Strategy(), profile, topology).buckets, "plain all-reduce is the first"


def test_a_small_dense_model_has_few_candidates() -> None:
    profile = ModelProfile(params=(ParamInfo(names=("w",), shape=(10, 10)),))
    found = candidates(profile, Topology(nodes=("a", "a")), exact=True)
    assert [each.strategy.default for each in found] == [Reduce()], "of so few bytes nothing can be told apart"
    found = candidates(profile, Topology(nodes=("a", "a", "b", "b")), exact=True)
    assert [each.strategy.name for each in found] == ["all_reduce", "two_level"], "but messages between nodes"
    large = ModelProfile(params=(ParamInfo(names=("w",), shape=(2000, 1000)),))
    found = candidates(large, Topology(nodes=("a", "b")), exact=True)
    assert [type(each.strategy.default).__name__ for each in found][-2:] == ["Reduce", "Owner"]
    alone = candidates(large, Topology(nodes=("a", "b")), exact=True, works=lambda plan: _plain(plan.strategy))
    assert [each.strategy.default for each in alone] == [Reduce()]


def _plain(strategy: Strategy) -> bool:
    return strategy.default == Reduce()


def test_names_are_those_of_builders_where_they_make_same() -> None:
    dense = ParamInfo(names=("w",), shape=(2000, 2000))
    table = ParamInfo(names=("t",), shape=(2000, 10), table=True)
    topology = Topology(nodes=("a", "b"))
    for params in [(dense, table), (dense, dataclasses.replace(table, sparse=True)), (dense,)]:
        profile = ModelProfile(params=params)
        by_name = {each.strategy.name: each for each in candidates(profile, topology, exact=False)}
        named = by_name.keys() & NAMED.keys()
        assert {"partitioned_ar", "ps_balanced", "bf16", "powersgd"} <= named or params[-1].sparse
        for name in named:
            built = lower(NAMED[name]().build(profile, topology), profile, topology)
            assert what_is_done(built) == what_is_done(by_name[name].plan), name
        if len(params) == 2:
            assert "parallax" in named


@pytest.mark.parametrize("sync", [Reduce(), Reduce(parts=3), Rows(), Rows(update="dense")])
def test_a_way_has_a_text(sync: Reduce | Rows) -> None:
    assert describe(sync)


def names(params: Sequence[ParamInfo], present: Strategy, *, most: int = 10) -> list[str]:
    topology = Topology(nodes=("a", "a"))
    found = consider(ModelProfile(params=tuple(params)), topology, present, exact=True, most=most)
    return [each.name for each in found]


def test_what_carries_least_in_the_fewest_collectives_comes_first() -> None:
    layer = ParamInfo(names=("w",), shape=(4000, 4000))
    mine = Strategy(name="mine")
    assert names([layer], mine) == ["all_reduce", "partitioned_ar", "ps_balanced"]
    layers = [ParamInfo(names=(f"w{number}",), shape=(200, 200)) for number in range(200)]
    found = names(layers, mine)
    assert (
        found[0] == "all_reduce"
        and found[-1] == "ps_balanced"
        and {"all_reduce of 1 MiB", "all_reduce of 25 MiB"} <= set(found)
    )
    table = ParamInfo(names=("t",), shape=(200_000, 128), table=True, rows=2000)
    small = ParamInfo(names=("w",), shape=(10, 10))
    assert names([table, small], mine) == ["all_reduce", "parallax"], "the present one first, however hopeless"
    many = dataclasses.replace(table, rows=60_000)
    rows = NAMED["parallax"]().build(ModelProfile(params=(many, small)), Topology())
    assert names([many, small], rows)[:2] == ["parallax", "all_reduce"]


def test_your_own_is_first_and_plain_among_few() -> None:
    layers = [ParamInfo(names=(f"w{number}",), shape=(200, 200)) for number in range(200)]
    mine = Strategy(default=Reduce(bucket_bytes=3 << 20), name="mine")
    found = names(layers, mine, most=3)
    assert found[0] == "mine" and len(found) == 3 and "all_reduce" in found
    assert names(layers, mine, most=2) == ["mine", "all_reduce"]


# -- the race --------------------------------------------------------------------------------------------------------

COUNTS, BUDGETS = st.integers(1, 12), st.integers(12, 200)


def race(count: int, budget: int, took_s: Callable[[int, int], float | None]) -> tuple[list[Step], Standing]:
    """Until there is a winner; `took_s` is given who has the step, and its number."""
    history: list[Step] = []
    while not (now := standing(history, count, budget)).over:
        assert len(history) < budget
        history.append((now.turn, took_s(now.turn, len(history))))
    return history, now


@given(COUNTS, BUDGETS, st.data())
@settings(deadline=None)
def test_the_fastest_wins_within_the_budget(count: int, budget: int, data: st.DataObject) -> None:
    count = min(count, most_candidates(budget))
    real = data.draw(st.lists(SECONDS, min_size=count, max_size=count, unique=True))
    history, end = race(count, budget, lambda turn, _: real[turn])
    assert real[end.turn] == min(real) and len(history) <= budget
    assert count == 1 or {turn for turn, _ in history} == set(range(count)), "each has its turn"
    assert count == 1 or all(took_s in (None, real[each]) for each, took_s in enumerate(end.times))
    assert race(count, budget, lambda turn, _: real[turn]) == (history, end), "equal times, equal races"


@given(st.integers(2, 6), st.data())
@settings(deadline=None)
def test_first_steps_and_lost_ones_do_not_count(count: int, data: st.DataObject) -> None:
    real = data.draw(st.lists(SECONDS, min_size=count, max_size=count, unique=True))
    lost = data.draw(st.sets(st.integers(0, 40), max_size=1))
    before = -1

    def took_s(turn: int, number: int) -> float | None:
        nonlocal before
        changes, before = turn != before, turn
        return None if number in lost else 100.0 if changes else real[turn]

    assert race(count, 40, took_s)[1].turn == min(range(count), key=lambda each: real[each])


@given(st.integers(2, 6), st.floats(1.0, 1.05), st.integers(0, 5))
@settings(deadline=None)
def test_a_machine_that_becomes_slower_favours_nobody(count: int, drift: float, best: int) -> None:
    """Within a race every step is up to 5 % longer than the one before; one candidate takes 0.6 of the others' time."""
    real = [0.6 if each == best % count else 1.0 for each in range(count)]
    assert race(count, 40, lambda turn, number: real[turn] * min(drift**number, 1.5))[1].turn == best % count


@pytest.mark.parametrize("drift", [1.004, 0.996])
@pytest.mark.parametrize("best", [0, 1])
def test_the_last_two_take_turns(drift: float, best: int) -> None:
    real = [0.95 if each == best else 1.0 for each in range(2)]
    assert race(2, 40, lambda turn, number: real[turn] * drift**number)[1].turn == best


def test_only_steps_after_one_of_the_same_count() -> None:
    took = iter([9.0, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 9.0, 3.0, 4.0])
    history, end = race(2, 12, lambda turn, _: next(took))
    assert [turn for turn, _ in history] == [0] * 3 + [1] * 6 + [0] * 3
    assert end.times == (2.0, 5.0) and end.turn == 0


def test_a_round_begins_with_whose_turn_it_was() -> None:
    for count, best, changes in ((4, 0, 3 + 3 + 2), (6, 5, 5 + 2 + 1 + 2)):  # four go there and back
        turns = [turn for turn, _ in race(count, 40, lambda turn, _, best=best: 1.0 + 0.1 * abs(turn - best))[0]]
        assert list(dict.fromkeys(turns)) == list(range(count))
        assert sum(a != b for a, b in itertools.pairwise(turns)) == changes


@given(st.integers(2, 4), st.integers(0, 3))
@settings(deadline=None)
def test_a_slow_start_favours_nobody(count: int, best: int) -> None:
    """The first steps of a training take up to half as long again."""
    real = [0.85 if each == best % count else 1.0 for each in range(count)]
    assert race(count, 40, lambda turn, number: real[turn] * (1 + 0.5 * 0.8**number))[1].turn == best % count


@given(st.integers(2, 6), st.integers(0, 40))
@settings(deadline=None)
def test_one_step_that_something_else_slows_decides_nothing(count: int, at: int) -> None:
    real = [1.0 + 0.2 * each for each in range(count)]
    slow = race(count, 40, lambda turn, number: real[turn] * (50.0 if number == at else 1.0))
    assert slow[1].turn == 0


# -- the choice ------------------------------------------------------------------------------------------------------

STRATEGIES = [Strategy(default=Reduce(bucket_bytes=(i + 1) << 20), name=f"s{i}") for i in range(6)]
FEW = st.lists(SECONDS, min_size=6, max_size=6, unique=True)


def begin(at: int = 1) -> Choice:
    return Choice(strategy=STRATEGIES[at])


def options(rows: Mapping[str, int], present: Strategy) -> list[Strategy]:
    return [present, *(each for each in STRATEGIES if each != present)]


def run(
    real: Sequence[float], choice: Choice | None = None, *, known: int = 0, known_s: float = 0.0, most: int = 41
) -> tuple[Choice, list[str]]:
    """Until nothing is measured any more; each strategy's steps take what `real` says."""
    choice, used = choice or begin(), []
    while choice.measures and len(used) < most:
        used.append(choice.strategy.name)
        step_s = real[STRATEGIES.index(choice.strategy)] if len(used) > 1 else None
        measured = Measured(step_s=step_s, rows={"table": 7}, known=known, known_s=known_s)
        choice = advance(choice, measured, 40, options)
    return choice, used


@given(FEW)
@settings(deadline=None)
def test_it_keeps_the_fastest_after_forty_steps_at_most(real: list[float]) -> None:
    choice, used = run(real)
    assert choice.settled and len(used) <= 40
    assert choice.strategy == STRATEGIES[real.index(min(real))]
    assert choice.rows == (("table", 7),) and choice.strategy.name in choice.reason
    assert choice.measured[choice.strategy.name] == min(real)


def test_where_there_is_nothing_else_one_step_is_enough() -> None:
    choice = advance(begin(), Measured(), 40, lambda rows, present: [present])
    assert choice.settled and choice.strategy == STRATEGIES[1] and "no other" in choice.reason


def test_what_earlier_jobs_found_is_kept_without_a_race() -> None:
    choice, used = run([1.0, 1.0, 1.0, 0.5, 1.0, 1.0], known=digest("s3"), known_s=0.4)
    assert choice.settled and choice.strategy == STRATEGIES[3]
    assert used == ["s1", *["s3"] * 5] and "earlier jobs" in choice.reason
    found = run([1.0] * 6, known=digest("a strategy of another release"), known_s=1.0)[1]
    assert len(set(found)) == 6, "it is not among these: they race"


@pytest.mark.parametrize("known_s", [0.2, 2.3])
def test_what_earlier_jobs_found_on_another_link_is_not(known_s: float) -> None:
    real = [0.3, 1.0, 1.0, 1.0, 1.0, 1.0]
    choice, used = run(real, known=digest("s3"), known_s=known_s, most=60)
    assert choice.settled and choice.strategy == STRATEGIES[0]
    assert used[:7] == ["s1", *["s3"] * 6] and len(used) <= 6 + 40


def test_a_race_waits_for_what_earlier_jobs_found() -> None:
    choice = begin()
    for _ in range(9):
        assert advance(choice, Measured(step_s=1.0, known=UNHEARD), 40, options) == choice
    assert run([1.0 + each for each in range(6)])[0].strategy == STRATEGIES[0]
    doubtful = dataclasses.replace(choice, doubts=True)
    assert advance(doubtful, Measured(known=UNHEARD), 40, options).options, "it would not be believed"


def test_what_is_found_late_ends_a_race() -> None:
    choice = run([1.0] * 6, most=9)[0]
    assert not choice.settled
    choice = advance(choice, Measured(step_s=1.0, known=digest("s5"), known_s=1.0), 40, options)
    assert choice.settled and choice.strategy == STRATEGIES[5] and not choice.measured


def test_it_chooses_anew_when_rows_drift() -> None:
    kept = run([1.0 + 0.1 * each for each in range(6)])[0]
    assert watch_rows(kept, {}) is kept
    kept = watch_rows(dataclasses.replace(kept, rows=()), {"table": 100})
    assert kept.settled and kept.rows == (("table", 100),)
    assert watch_rows(kept, {"table": 190}) is kept and watch_rows(kept, {"table": 51}) is kept
    for now in (201, 49):
        again = watch_rows(kept, {"table": now})
        assert not again.settled and again.strategy == kept.strategy
        assert run([1.0] * 6, again, known=digest("s5"), known_s=1.0)[1] != ["s0"], "of other rows nothing is known"
    assert watch_rows(begin(), {"table": 1}) == begin()


@given(FEW, st.integers(0, 45))
@settings(deadline=None)
def test_it_travels_at_any_moment(real: list[float], steps: int) -> None:
    choice = run(real, most=steps)[0]
    assert Choice.from_state(decode(encode(choice.to_state()))) == choice
    assert leave(choice) == (choice.strategy if choice.settled else STRATEGIES[1])
