"""What users may write for a strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ray.sync import Strategy, StrategyError
from elastic_ray.sync.builders import PS, resolve_strategy
from elastic_ray.sync.plan import ModelProfile, ParamInfo, Topology

MODEL = ModelProfile(params=(ParamInfo(names=("w",), shape=(2, 2)),))


def build(given: object) -> Strategy:
    return resolve_strategy(given).build(MODEL, Topology())


def test_name_builder_strategy_and_a_path_mean_the_same(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(build("ps").to_json())
    assert build("ps") == build(PS()) == build(build("ps")) == build(path) == build(str(path))


@pytest.mark.parametrize("name", ["allreduce", "", "PS"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(
        StrategyError, match=f"strategy must be one of all_reduce, two_level, .*, auto, .* but got '{name}'"
    ):
        resolve_strategy(name)


def test_a_class_is_no_builder() -> None:
    with pytest.raises(TypeError, match="call it"):
        resolve_strategy(PS)
    with pytest.raises(TypeError, match="a name, a builder, a Strategy or a path, but got 7"):
        resolve_strategy(7)


def test_a_path_is_named_where_it_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"absent\.json' cannot be read: .*No such file"):
        resolve_strategy(tmp_path / "absent.json")
    bad = tmp_path / "bad.json"
    bad.write_text('{"version": 7}')
    with pytest.raises(StrategyError, match=r"bad\.json': .*version 1, but got 7"):
        resolve_strategy(bad)
    bad.write_bytes(b"\xff\xfe{}")
    with pytest.raises(StrategyError, match=r"bad\.json' cannot be read"):
        resolve_strategy(bad)
