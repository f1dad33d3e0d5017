"""Choosing a strategy, without a group: candidates in their order, and the machine that measures, tries and keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ray.state.codec import decode, encode
from elastic_ray.sync import StrategyError
from elastic_ray.sync.choosing.candidates import candidates, consider, describe, what_is_done
from elastic_ray.sync.choosing.choice import (
    Choice,
    ChoiceSettings,
    Measured,
    Option,
    Phase,
    advance,
    begin,
    resume,
    watch_rows,
)
from elastic_ray.sync.naming import NAMED
from elastic_ray.sync.plan import lower
from elastic_ray.sync.profile import ModelProfile, OptimizerInfo, ParamInfo, Topology
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
    found = candidates(profile, Topology(nodes=("a", "b")), exact=True)
    assert [each.strategy.default for each in found] == [Reduce()], "of so few bytes nothing can be told apart"
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


STRATEGIES = [Strategy(default=Reduce(bucket_bytes=(i + 1) << 20), name=f"s{i}") for i in range(6)]


def options_of(order: Sequence[int], present: int = 1) -> list[Option]:
    return [Option(strategy=STRATEGIES[i], plain=i == 0, present=i == present) for i in order]


def run(
    how: ChoiceSettings, order: Sequence[int], real: Sequence[float], *, first: float = 1.0
) -> tuple[Choice, list[Strategy]]:
    """Until the end; each strategy's steps take what `real` says, the first after a change `first` times that."""
    choice, used = begin(STRATEGIES[1]), []
    for _ in range(2 * how.trial_steps * (how.trials + 8) + 1):
        if choice.settled:
            return choice, used
        slow = first if not used or used[-1] != choice.strategy else 1.0
        used.append(choice.strategy)
        measured = Measured(step_s=slow * real[STRATEGIES.index(choice.strategy)])
        choice = advance(choice, measured, how, lambda *_: options_of(order))
    raise AssertionError(f"it has not come to an end: {choice}")


SETTINGS = st.builds(
    ChoiceSettings,
    exact=st.booleans(),
    trials=st.integers(1, 4),
    trial_steps=st.integers(1, 5),
    gain=st.floats(0.0, 0.5),
)
FEW = st.lists(SECONDS, min_size=6, max_size=6)
ORDERS = st.permutations(range(6))


@given(SETTINGS, ORDERS, FEW)
@settings(deadline=None)
def test_it_ends_with_best_of_what_it_has_tried(how: ChoiceSettings, order: list[int], real: list[float]) -> None:
    choice, used = run(how, order, real)
    assert choice == run(how, order, real)[0], "equal numbers, equal choices"
    times = dict(zip([each.name for each in STRATEGIES], real, strict=True))
    tried = {strategy.name for strategy in used}
    assert len(tried) <= how.trials + 2
    assert times[choice.strategy.name] <= times["s1"], "never worse than what it came with"
    assert times[choice.strategy.name] <= min(times[name] for name in tried) / (1 - how.gain) * (1 + 1e-9)
    assert len(used) <= 2 * how.trial_steps * (how.trials + 6), "it takes so many steps at most"
    assert choice.reason


def test_a_little_faster_is_not_enough() -> None:
    how = ChoiceSettings(gain=0.05)
    assert run(how, range(6), [0.96, 1.0, 1.0, 1.0, 1.0, 1.0])[0].strategy.name == "s1"
    assert run(how, range(6), [0.94, 1.0, 1.0, 1.0, 1.0, 1.0])[0].strategy.name == "s0"


def test_the_first_step_of_a_trial_does_not_count() -> None:
    fast = [1.0, 1.0, 0.5, 1.0, 1.0, 1.0]
    assert run(ChoiceSettings(trial_steps=2), range(6), fast, first=9.0)[0].strategy.name == "s2"


def test_first_are_tried_and_plain_all_reduce_always_is() -> None:
    used = [strategy.name for strategy in run(ChoiceSettings(trials=2), [4, 1, 3, 2, 0], [1.0] * 6)[1]]
    assert list(dict.fromkeys(used)) == ["s1", "s4", "s3", "s0"]
    used = [strategy.name for strategy in run(ChoiceSettings(trials=2), [4, 1, 3, 2], [1.0] * 6)[1]]
    assert list(dict.fromkeys(used)) == ["s1", "s4", "s3"], "plain all-reduce is hopeless here"


def names(params: Sequence[ParamInfo], present: Strategy, *, world: int = 2) -> list[str]:
    topology = Topology(nodes=("a",) * world)
    found = consider(ModelProfile(params=tuple(params)), topology, present, exact=True)
    assert sum(each.present for each in found) == 1
    return [each.strategy.name for each in found]


def test_what_carries_least_in_the_fewest_collectives_comes_first() -> None:
    layer = ParamInfo(names=("w",), shape=(4000, 4000))
    plain = Strategy(name="mine")
    assert names([layer], plain) == ["all_reduce", "partitioned_ar", "ps_balanced"]
    layers = [ParamInfo(names=(f"w{number}",), shape=(200, 200)) for number in range(200)]
    found = names(layers, plain)
    assert found[0] == "all_reduce" and found[-1] == "ps_balanced" and "all_reduce of 1 MiB" in found
    table = ParamInfo(names=("t",), shape=(200_000, 128), table=True, rows=2000)
    small = ParamInfo(names=("w",), shape=(10, 10))
    assert names([table, small], plain) == ["parallax", "all_reduce"], "but for the present way, hopeless"
    many = dataclasses.replace(table, rows=60_000)
    assert names([many, small], plain)[:2] == ["parallax", "all_reduce"]
    most = dataclasses.replace(table, rows=120_000)
    assert names([most, small], plain)[0] == "all_reduce", "then rows do not travel either"


def test_one_lucky_trial_is_not_enough() -> None:
    """The rival's steps were short by chance: tried once more, they are not."""
    lucky = iter([0.5] * 5 + [1.0] * 99)
    choice, used = begin(STRATEGIES[1]), []
    while not choice.settled:
        used.append(choice.strategy.name)
        step_s = next(lucky) if choice.strategy == STRATEGIES[2] and choice.phase is not Phase.PROFILING else 1.0
        choice = advance(
            choice,
            Measured(step_s=step_s),
            ChoiceSettings(trials=2),
            lambda *_: options_of(range(6)),
        )
    assert choice.strategy == STRATEGIES[1] and used[-20:] == (["s1"] * 5 + ["s2"] * 5) * 2
    assert "not faster" in choice.reason


def test_short_steps_are_tried_for_longer() -> None:
    counts = [len(run(ChoiceSettings(), range(6), [seconds] * 6)[1]) for seconds in (1e-4, 1.0)]
    assert counts[0] == 2 * counts[1]


def test_it_chooses_anew_when_rows_drift() -> None:
    kept = run(ChoiceSettings(), range(6), [1.0] * 6)[0]
    assert watch_rows(kept, {}) is kept
    kept = watch_rows(kept, {"table": 100})
    assert kept.settled and kept.rows == (("table", 100),)
    assert watch_rows(kept, {"table": 190}) is kept and watch_rows(kept, {"table": 51}) is kept
    for now in (201, 49):
        again = watch_rows(kept, {"table": now})
        assert again.phase is Phase.PROFILING and again.strategy == kept.strategy
    assert watch_rows(begin(STRATEGIES[0]), {"table": 1}) == begin(STRATEGIES[0])


@given(ORDERS, FEW, st.integers(0, 40))
@settings(deadline=None)
def test_it_travels_at_any_moment(order: list[int], real: list[float], steps: int) -> None:
    choice = begin(STRATEGIES[1])
    for _ in range(steps):
        measured = Measured(step_s=real[STRATEGIES.index(choice.strategy)])
        choice = advance(choice, measured, ChoiceSettings(), lambda *_: options_of(order))
        assert Choice.from_state(decode(encode(choice.to_state()))) == choice
        assert resume(choice) == dataclasses.replace(choice, times=())
