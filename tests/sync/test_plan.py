"""Plans: every parameter once, owners balanced, equal on all ranks, and refusals that name the parameter."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.sync import AllReduce, Parallax, Strategy, StrategyError
from elastic_ray.sync.builders import NAMED, PSLoadBalancing, exactly, resolve_strategy
from elastic_ray.sync.plan import ModelProfile, OptimizerInfo, ParamInfo, Topology, lower
from elastic_ray.sync.spec import Owner, Reduce, Rows, Rule

MB = 1 << 18  # elements of float32


def profile(*params: ParamInfo, optimizer: OptimizerInfo | None = None) -> ModelProfile:
    return ModelProfile(params=params, optimizer=optimizer or OptimizerInfo())


def param(name: str, *shape: int, **more: object) -> ParamInfo:
    return ParamInfo(names=(name,), shape=shape, **more)


def ranks(world_size: int) -> Topology:
    return Topology(nodes=("node-0",) * world_size)


shapes = st.lists(st.integers(1, 3000), min_size=1, max_size=2).map(tuple)
models = st.lists(
    st.tuples(shapes, st.integers(0, 2), st.sampled_from(["float32", "float64"])), min_size=1, max_size=20
).map(
    lambda rows: profile(
        *(
            ParamInfo(names=(f"p{i}",), shape=shape, group=group, dtype=dtype, itemsize=4 if dtype == "float32" else 8)
            for i, (shape, group, dtype) in enumerate(sorted(rows, key=lambda row: row[1]))
        )
    )
)


@given(models, st.sampled_from([Reduce(), Reduce(bucket_bytes=4096), Owner()]), st.integers(1, 9))
def test_every_parameter_is_in_one_bucket_of_its_kind(model: ModelProfile, sync: Reduce | Owner, world: int) -> None:
    plan = lower(Strategy(default=sync), model, ranks(world))
    placed = [i for bucket in plan.buckets for i in bucket.params]
    assert sorted(placed) == list(range(len(model.params)))
    for bucket in plan.buckets:
        kinds = {(model.params[i].group, model.params[i].dtype) for i in bucket.params}
        assert len(kinds) == 1 and bucket.group == model.params[bucket.params[0]].group
        assert 0 <= bucket.owner < world
        assert list(bucket.params) == sorted(bucket.params, reverse=True), "as backward fills them"


@given(models, st.integers(1, 9))
def test_plans_are_equal_where_arguments_are_by_world(model: ModelProfile, world: int) -> None:
    strategy = Strategy(default=Owner())
    one, other = lower(strategy, model, ranks(world)), lower(strategy, model, ranks(world))
    assert one == other and one.digest == other.digest < 1 << 40
    named = lower(dataclasses.replace(strategy, name="other"), model, ranks(world))
    assert named.digest != one.digest


@given(st.lists(st.integers(1, 4 * MB), min_size=1, max_size=40), st.integers(1, 8))
def test_owners_hold_at_most_one_bucket_over_their_share(sizes: list[int], world: int) -> None:
    model = profile(*(param(f"p{i}", size) for i, size in enumerate(sizes)))
    plan = lower(Strategy(default=Owner()), model, ranks(world))
    held = [0] * world
    for bucket in plan.buckets:
        held[bucket.owner] += sum(model.params[i].nbytes for i in bucket.params)
    largest = max(sum(model.params[i].nbytes for i in bucket.params) for bucket in plan.buckets)
    assert max(held) <= sum(held) / world + largest


def test_buckets_of_all_reduce_are_those_of_torch_ddp() -> None:
    model = profile(*(param(f"p{i}", MB) for i in range(260)))
    plan = lower(AllReduce().build(model, ranks(1)), model, ranks(1))
    assert [len(bucket.params) for bucket in plan.buckets] == [1, *[25] * 10, 9], "1 MiB first, then 25 MiB"
    assert plan.buckets[0].params == (259,), "the last parameter has its gradient first"


@pytest.mark.parametrize("sync", [Reduce(), Owner()])
def test_a_small_model_has_smaller_buckets(sync: Reduce | Owner) -> None:
    sizes = {count: profile(*(param(f"p{i}", MB // 2) for i in range(count))) for count in (4, 64)}
    largest = {
        count: max(len(bucket.params) for bucket in lower(Strategy(default=sync), model, ranks(2)).buckets)
        for count, model in sizes.items()
    }
    assert largest == {4: 2, 64: 8}, "an eighth of the model, and at least 1 MiB"


@pytest.mark.parametrize("sync", [Reduce, Owner])
def test_bucket_size_of_a_user_counts_as_it_is(sync: type[Reduce | Owner]) -> None:
    model = profile(*(param(f"p{i}", MB // 2) for i in range(64)))
    for size, buckets in ((4 * MB, 32), (4 << 20, 8), (25 << 20, 2), (1 << 30, 1)):
        plan = lower(Strategy(default=sync(bucket_bytes=size)), model, ranks(2))
        assert len(plan.buckets) == buckets, size


def test_the_first_rule_that_matches_holds() -> None:
    model = profile(param("table.weight", 10, 4), param("net.0.weight", 4, 4), param("net.0.bias", 4))
    strategy = Strategy(
        rules=(Rule(pattern="*.bias", sync=Owner()), Rule(pattern="net.*", sync=Reduce(parts=2))), default=Reduce()
    )
    ways = {model.params[i].name: b.sync for b in lower(strategy, model, ranks(2)).buckets for i in b.params}
    assert ways == {"table.weight": Reduce(), "net.0.weight": Reduce(parts=2), "net.0.bias": Owner()}


def test_tied_parameters_have_one_strategy() -> None:
    tied = ParamInfo(names=("embed.weight", "head.weight"), shape=(10, 4))
    for pattern in ("*.weight", "embed.*", "head.*"):
        one = Strategy(rules=(Rule(pattern=pattern, sync=Rows()),))
        assert lower(one, profile(tied), ranks(2)).buckets[0].sync == Rows(), "a rule for one name is for the tensor"
    two = Strategy(rules=(Rule(pattern="embed.*", sync=Rows()), Rule(pattern="head.*", sync=Owner())))
    with pytest.raises(StrategyError, match=r"tied parameters need one strategy, but embed\.weight and head\.weight"):
        lower(two, profile(tied), ranks(2))


@pytest.mark.parametrize(
    ("pattern", "told"),
    [("encoder.*", "no trainable parameter has such a name"), ("net.0.*", "earlier rules match all that it does")],
)
def test_a_rule_without_effect_is_refused(pattern: str, told: str) -> None:
    model = profile(param("net.0.weight", 4, 4), param("net.1.weight", 4, 4))
    strategy = Strategy(rules=(Rule(pattern="net.*", sync=Owner()), Rule(pattern=pattern, sync=Reduce(parts=2))))
    with pytest.raises(StrategyError, match=f"the rule for '{pattern.replace('*', '.')}' is of no effect: {told}"):
        lower(strategy, model, ranks(2))


def test_a_rule_for_frozen_parts_takes_effect_later() -> None:
    frozen = ModelProfile(params=(param("net.weight", 4, 4),), frozen=("encoder.weight",))
    strategy = Strategy(rules=(Rule(pattern="encoder.*", sync=Owner()),))
    assert lower(strategy, frozen, ranks(2)).buckets[0].sync == Reduce()


def test_what_an_optimizer_cannot_step_is_refused_by_name() -> None:
    table = param("table.weight", 100, 8, sparse=True, table=True)
    adam = OptimizerInfo(name="Adam", takes_sparse=False)
    with pytest.raises(StrategyError, match=r"Adam cannot step the sparse gradient of table\.weight: use SGD"):
        lower(Parallax().build(profile(table), ranks(1)), profile(table, optimizer=adam), ranks(1))
    dense = Parallax(update="dense").build(profile(table), ranks(1))
    assert lower(dense, profile(table, optimizer=adam), ranks(1)).buckets[0].sync == Rows(update="dense")
    only = OptimizerInfo(name="SparseAdam", only_sparse=True)
    with pytest.raises(StrategyError, match=r"SparseAdam steps sparse gradients only, but that of table\.weight"):
        lower(dense, profile(table, optimizer=only), ranks(1))
    with pytest.raises(StrategyError, match=r"table\.weight has sparse gradients, which only Rows synchronises"):
        lower(Strategy(default=Owner()), profile(table), ranks(1))


def test_rows_are_for_tables() -> None:
    model = profile(param("conv.weight", 4, 4, 3, 3))
    with pytest.raises(StrategyError, match=r"Rows needs a table of two dimensions, but conv\.weight has shape"):
        lower(Strategy(default=Rows()), model, ranks(1))


def test_parallax_gives_rows_to_tables_alone() -> None:
    model = profile(
        param("a[0].weight", 10, 4, table=True), param("a0.weight", 10, 4), param("b.weight", 9, 4, sparse=True)
    )
    strategy = Parallax().build(model, ranks(1))
    ways = {model.params[i].name: b.sync for b in lower(strategy, model, ranks(2)).buckets for i in b.params}
    assert ways == {"a[0].weight": Rows(), "a0.weight": Reduce(), "b.weight": Rows()}


@given(st.text(alphabet="ab.[]*?!-0", min_size=1))
def test_an_exact_pattern_matches_its_name_alone(name: str) -> None:
    model = profile(param(name, 3, 3), param(f"{name}x", 3, 3))
    plan = lower(Strategy(rules=(Rule(pattern=exactly(name), sync=Owner()),)), model, ranks(1))
    assert {model.params[i].name for b in plan.buckets if b.sync == Owner() for i in b.params} == {name}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_name_builds_a_strategy_to_plan_and_keep(name: str) -> None:
    model = profile(param("table.weight", 100, 8, table=True), param("net.weight", 8, 8), param("net.bias", 8))
    strategy = resolve_strategy(name).build(model, ranks(4))
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert lower(strategy, model, ranks(4)).buckets


def test_sparse_parameters_have_rows_under_every_dense_strategy() -> None:
    model = profile(param("table.weight", 100, 8, sparse=True), param("net.weight", 8, 8))
    plan = lower(PSLoadBalancing().build(model, ranks(2)), model, ranks(2))
    assert {bucket.sync for bucket in plan.buckets} == {Rows(), Owner()}
