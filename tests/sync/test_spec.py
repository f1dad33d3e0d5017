"""Strategies as data: what they refuse, and that nothing of them is lost on the way through JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.sync import Strategy, StrategyError
from elastic_ray.sync.spec import Average, Owner, Reduce, Rows, Rule, Wire

wires = st.one_of(
    st.builds(Wire, dtype=st.sampled_from(["native", "bf16", "fp16", "int8"])),
    st.builds(Wire, rank=st.integers(1, 64)),
)
cast = st.builds(Wire, dtype=st.sampled_from(["native", "bf16", "fp16"]))
reduces = st.one_of(
    st.builds(Reduce, bucket_bytes=st.integers(1024, 1 << 30), wire=wires),
    st.builds(Reduce, parts=st.integers(1, 64), axis=st.integers(-1, 4), seed=st.integers(0, 9), wire=cast),
)
owners = st.builds(Owner, placement=st.sampled_from(["balanced", "first"]), wire=cast)
syncs = st.one_of(reduces, owners, st.builds(Rows, update=st.sampled_from(["auto", "sparse", "dense"])))
averages = st.builds(
    Average,
    algorithm=st.sampled_from(["local_sgd", "diloco", "sma", "pair"]),
    period=st.integers(1, 1000),
    alpha=st.floats(0.01, 1.0),
    outer_lr=st.floats(0.01, 2.0),
    outer_momentum=st.floats(0.0, 0.99),
    until=st.none() | st.integers(1, 10**6),
)
strategies = st.one_of(
    st.builds(
        Strategy,
        rules=st.lists(st.builds(Rule, pattern=st.text(min_size=1), sync=syncs), max_size=4).map(tuple),
        default=syncs,
        name=st.text(max_size=20).filter(lambda name: (name + "x").isprintable()),
    ),
    st.builds(Strategy, average=averages),
)


@given(strategies)
def test_json_keeps_everything(strategy: Strategy) -> None:
    text = strategy.to_json()
    assert Strategy.from_json(text) == strategy
    assert Strategy.from_json(text).to_json() == text


def test_strategy_names_neither_ranks_nor_addresses_nor_the_world() -> None:
    kinds = (Strategy, Rule, Reduce, Owner, Rows, Average, Wire)
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert not {"world_size", "rank_of", "address", "node", "owner"} & fields


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Wire(dtype="fp8"), "dtype must be one of native, bf16, fp16, int8, but got 'fp8'"),
        (lambda: Wire(rank=-1), "rank must be a whole number, 0 or more, but got -1"),
        (lambda: Wire(rank=True), "rank must be a whole number"),
        (lambda: Wire(dtype="bf16", rank=4), "rank=4 needs dtype='native'"),
        (lambda: Reduce(bucket_bytes=0), "bucket_bytes must be a whole number, 1024 or more"),
        (lambda: Reduce(parts=0), "parts must be a whole number, 1 or more"),
        (lambda: Reduce(wire="bf16"), "wire must be a Wire, but got 'bf16'"),
        (lambda: Owner(placement="rank 0"), "placement must be one of balanced, first"),
        (lambda: Owner(wire=Wire(rank=2)), "owned tensors keep no residuals"),
        (lambda: Rows(update="maybe"), "update must be one of auto, sparse, dense"),
        (lambda: Average(algorithm="easgd"), "algorithm must be one of local_sgd, diloco, sma, pair"),
        (lambda: Average(period=0), "period must be a whole number, 1 or more"),
        (lambda: Average(alpha=0.0), "alpha must be a number above 0 and up to 1"),
        (lambda: Average(alpha=float("nan")), "alpha must be a number above 0 and up to 1"),
        (lambda: Average(outer_momentum=1.0), "outer_momentum must be a number"),
        (lambda: Rule(pattern="", sync=Rows()), "pattern must be a glob"),
        (lambda: Rule(pattern="a", sync=Average()), "sync must be a Reduce or Owner or Rows"),
        (lambda: Strategy(rules=[Rule(pattern="a", sync=Rows())]), "rules must be a tuple"),
        (lambda: Strategy(average=Average(), default=Owner()), "average excludes rules and a default"),
    ],
)
def test_what_is_out_of_range_is_refused_by_field(make: Any, told: str) -> None:
    with pytest.raises(StrategyError) as error:
        make()
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "JSON as Strategy.to_json() writes it"),
        ("[]", "an object of version 1, but got a list"),
        ('{"version": 2}', "an object of version 1, but got 2"),
        ('{"version": true}', "an object of version 1, but got True"),
        ("[" * 100_000, "JSON as Strategy.to_json() writes it"),
        ('{"version": 1, "version": 1}', "key 'version' occurs twice"),
        ('{"version": 1, "name": "\\u001b[2J"}', "name must be printable"),
        ('{"version": 1, "name": 7}', "name must be printable"),
        ('{"version": 1, "default": {"kind": []}}', "kind must be one of reduce, owner, rows"),
        (
            '{"version": 1, "default": {"kind": "reduce", "parts": 1000000000}}',
            "parts must be a whole number, 64 or less",
        ),
        ('{"version": 1, "default": {"kind": "reduce", "bucket_bytes": 1' + "0" * 400 + "}}", "or less, but got 1000"),
        (" " * (1 << 20) + "{}", "at most 1048576 characters"),
        ('{"version": 1, "defaults": {}}', "has no field defaults"),
        ('{"version": 1, "default": {"kind": "magic"}}', "kind must be one of reduce, owner, rows"),
        ('{"version": 1, "default": {"kind": "reduce", "bucket": 1}}', "Reduce has no field bucket"),
        ('{"version": 1, "default": {"kind": "reduce", "wire": "bf16"}}', "Wire must be a JSON object"),
        ('{"version": 1, "rules": {}}', "rules must be a list"),
        ('{"version": 1, "rules": [{"kind": "rows"}]}', "pattern must be a glob"),
    ],
)
def test_json_that_is_no_strategy_is_refused(text: str, told: str) -> None:
    with pytest.raises(StrategyError) as error:
        Strategy.from_json(text)
    assert told in str(error.value)


def test_json_without_what_has_a_default_is_read() -> None:
    rows = {"version": 1, "rules": [{"pattern": "*.table", "kind": "rows"}]}
    assert Strategy.from_json(json.dumps(rows)) == Strategy(rules=(Rule(pattern="*.table", sync=Rows()),))


@pytest.mark.parametrize(
    ("strategy", "exact", "residuals"),
    [
        (Strategy(), True, False),
        (Strategy(default=Owner()), True, False),
        (Strategy(default=Reduce(wire=Wire(dtype="bf16"))), False, False),
        (Strategy(default=Reduce(wire=Wire(dtype="int8"))), False, True),
        (Strategy(default=Reduce(wire=Wire(rank=4))), False, True),
        (Strategy(average=Average()), False, False),
    ],
)
def test_each_says_as_data_what_it_keeps(strategy: Strategy, exact: bool, residuals: bool) -> None:
    assert (strategy.exact, strategy.keeps_residuals) == (exact, residuals)
    assert strategy.invariant
