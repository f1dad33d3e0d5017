"""What numbers are refused, and how that is said."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

import elastic_ray as er
import tuning
from placement import MemoryNeed, NodeType, Tenant
from placement.allocator.config import AllocatorConfig
from placement.autoscaling.autoscaler import AutoscalerConfig, Autoscaling
from placement.checks import check_choice, check_number, check_switch, check_whole, is_whole
from placement.errors import InputError


@pytest.mark.parametrize(
    ("value", "limits", "said"),
    [
        (-1, {"least": 0}, "x must be 0 or more, but got -1"),
        (0.0, {"above": 0, "unit": "seconds"}, "x must be above 0 seconds, but got 0.0"),
        (math.nan, {"least": 1, "unit": "sample"}, "x must be 1 sample or more, but got nan"),
        (math.inf, {"least": 0, "finite": True}, "x must be 0 or more and finite, but got inf"),
        (1.0, {"above": 1}, "x must be above 1, but got 1.0"),
        (1, {"least": 0, "below": 1}, "x must be 0 or more and below 1, but got 1"),
        (1.5, {"above": 0, "most": 1, "finite": True}, "x must be above 0 and at most 1, but got 1.5"),
        ("1", {"least": 0, "unit": "seconds"}, "x must be a number of seconds, but got '1'"),
        (True, {"least": 0}, "x must be a number, but got True"),
        (10**400, {"least": 0, "finite": True}, f"x must be 0 or more and finite, but got 1{79 * '0'}"),
    ],
)
def test_numbers_outside_their_range_are_refused(value: object, limits: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        check_number("x", value, error=InputError, **limits)
    assert str(caught.value) == said


def whole(cls: Any) -> Any:
    """Return a value of a configuration class, to be changed in one field."""
    node = NodeType(name="t4", resources={"CPU": 8.0})
    fields: dict[Any, dict[str, Any]] = {
        Tenant: {"name": "vision"},
        NodeType: {"name": "t4", "resources": {"CPU": 8.0}},
        Autoscaling: {"node_types": (node,)},
        tuning.Promise: {"metric": "loss", "mode": "min"},
        MemoryNeed: {"available_bytes": 80, "sharded_bytes": 10},
    }
    return cls(**fields.get(cls, {}))


WRONG = (object(), -0.5, math.nan, "", "\n", b"x", [1, "a"], {1: 2}, {"CPU": math.nan}, True, 10**400, lambda: 1)
ANY_NAME = ("tenant", "name", "metric", "priority")  # texts, or numbers that may be negative


@pytest.mark.parametrize(
    "cls",
    [
        *(AllocatorConfig, Autoscaling, AutoscalerConfig, NodeType, Tenant, MemoryNeed),
        *(tuning.Promise, tuning.Sweep, er.SchedulingConfig, er.ElasticConfig),
    ],
)
def test_an_operators_wrong_value_is_refused_by_name(cls: Any) -> None:
    """Otherwise the allocator fails with it, later and in another process, and with it every job."""
    good = whole(cls)
    for field in dataclasses.fields(cls):
        said = []
        for value in WRONG:
            try:
                dataclasses.replace(good, **{field.name: value})
            except (TypeError, ValueError) as error:
                said.append(str(error))
        assert not [each for each in said if "supported between" in each or "object is not" in each], field.name
        assert len(said) >= (len(WRONG) - 4 if field.name in ANY_NAME else len(WRONG) - 1), field.name


INT64: Any = np.int64
FLOAT32: Any = np.float32


@pytest.mark.parametrize(
    "config",
    [
        er.SchedulingConfig(
            priority=INT64(3),
            weight=FLOAT32(2),
            budget_usd=FLOAT32(5),
            sizes=(INT64(2), INT64(4)),
            unit=INT64(2),
        ),
        er.SchedulingConfig(unit=er.Unit(tp=INT64(2)), multiple_of=INT64(2)),
        er.ElasticConfig(lease_s=FLOAT32(9), warm_workers_per_node=INT64(1)),
        AllocatorConfig(priorities={"a": INT64(3)}, log_length=INT64(9)),
        Autoscaling(node_types=(NodeType(name="a", resources={"CPU": 8.0}),), max_nodes=INT64(4)),
        Tenant(name="a", weight=FLOAT32(2), quota={"GPU": INT64(4)}),
        NodeType(name="a", resources={"CPU": FLOAT32(8)}, max_nodes=INT64(4)),
        MemoryNeed(available_bytes=INT64(80), sharded_bytes=INT64(10)),
    ],
)
def test_numpys_numbers_become_pythons(config: Any) -> None:
    """Journals, notes and the page are JSON: a controller with one of NumPy's would end its job."""
    json.dumps(dataclasses.asdict(config))
    if isinstance(config, er.SchedulingConfig):
        assert {type(size) for size in config.allowed_sizes.sizes} <= {int} and type(config.unit_size) is int


def test_the_ends_of_ranges_are_in_them_or_not() -> None:
    check_number("x", 0, least=0)
    check_number("x", math.inf, above=0)
    check_number("x", np.float32(1), most=1, below=2)
    assert [is_whole(each) for each in (0, 3, np.int64(2), -1, True, 1.0, "1", None)] == [True] * 3 + [False] * 5
    with pytest.raises(ValueError, match="x must be a whole number, 2 or more, but got 1"):
        check_whole("x", 1, least=2)
    check_whole("x", np.int64(-1), least=None)


def test_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="x must be a number, but got '1'"):
        check_number("x", "1")
    with pytest.raises(TypeError, match=r"x must be a whole number of steps, 0 or more, but got 1\.0"):
        check_whole("x", 1.0, unit="steps")
    with pytest.raises(TypeError, match="x must be True or False, but got 1"):
        check_switch("x", 1)
    with pytest.raises(ValueError, match="x must be one of a, b, but got 'c'"):
        check_choice("x", "c", ("a", "b"))
