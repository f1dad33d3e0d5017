"""What ``report`` takes for metrics: plain data of bounded size leaves the worker, and nothing else."""

from __future__ import annotations

import collections
import enum
import json
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.run.current import set_session
from elastic_ray.state.plain_metrics import MOST_CHARACTERS, plain_metrics


class Phase(str, enum.Enum):
    WARM = "warm"


class Level(enum.IntEnum):
    HIGH = 3


Pair = collections.namedtuple("Pair", ["low", "high"])

PLAIN = [
    (np.float64(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.float16(0.5), 0.5),
    (np.longdouble(0.5), 0.5),
    (np.int64(7), 7),
    (np.bool_(True), True),
    (np.str_("a"), "a"),
    (np.array(2.5), 2.5),
    (np.array([2.5]), 2.5),
    (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
    (np.array([0.5, 1.5], dtype=np.longdouble), [0.5, 1.5]),
    (np.zeros(0), []),
    (torch.tensor(0.5), 0.5),
    (torch.nn.Parameter(torch.tensor([[0.5]])), 0.5),
    (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), [1.0, 2.0]),
    (torch.tensor(True), True),
    (Phase.WARM, "warm"),
    (Level.HIGH, 3),
    (Pair(1, np.float32(2.0)), (1, 2.0)),
    (collections.OrderedDict(a=[torch.tensor(3)]), {"a": [3]}),
    (collections.Counter("aab"), {"a": 2, "b": 1}),
    (None, None),
    (1 << 1000, 1 << 1000),
]


@pytest.mark.parametrize(("given", "wanted"), PLAIN, ids=lambda value: type(value).__name__)
def test_what_is_usual_becomes_plain(given: Any, wanted: Any) -> None:
    found = plain_metrics({"x": given})["x"]
    assert found == wanted and type(found) is type(wanted)
    assert names_of_classes(found) == set()


def names_of_classes(value: Any) -> set[str]:
    """What unpickling the value would import."""
    wanted = ("GLOBAL", "STACK_GLOBAL", "INST", "REDUCE", "NEWOBJ")
    return {op.name for op, _, _ in pickletools.genops(pickle.dumps(value)) if op.name in wanted}


def test_names_of_a_users_class_become_strings_nan_passes() -> None:
    found = plain_metrics({Phase.WARM: float("nan"), "x": {Phase.WARM: np.float32("inf")}})
    assert math.isnan(found["warm"]) and found["x"] == {"warm": math.inf}
    assert {type(name) for name in (*found, *found["x"])} == {str} and names_of_classes(found) == set()


class Trap:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"a": [1, {"b": Trap()}]}, r"metrics\['a'\]\[1\]\['b'\] is a \S*Trap: report a number"),
        ({"a": Path("x")}, r"metrics\['a'\] is a pathlib\S*Path"),
        ({"a": {1, 2}}, r"metrics\['a'\] is a set"),
        ({"a": 1j}, "is a complex"),
        ({"a": np.array([1j])}, r"is a numpy.ndarray"),
        ({"a": np.array([Trap()])}, r"is a numpy.ndarray"),
        ({"a": torch.tensor(1j)}, r"is a torch.Tensor"),
        ({"a": b"x"}, "is a bytes"),
        ({"a": {0: 1.0}}, r"keys of metrics must be strings, but metrics\['a'\] has 0, a int"),
        ({0: 1.0}, "keys of metrics must be strings, but metrics has 0, a int"),
    ],
)
def test_other_types_are_refused_by_name(bad: dict[Any, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        plain_metrics(bad)


def itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def wide() -> Any:
    found: Any = 1
    for _ in range(18):
        found = [found, found, found, found]
    return found


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (itself(), r"not be nested deeper than 20 levels, but metrics\['a'\]\[0\].* holds itself"),
        (wide(), r"fit into 256 KiB .* but metrics\['a'\]\["),
        ("x" * MOST_CHARACTERS, r"but metrics\['a'\], a str, exceeds"),
        ("\0" * (MOST_CHARACTERS // 5), r"but metrics\['a'\], a str, exceeds"),
        (np.broadcast_to(np.float32(0), (10**6, 10**6)), r"but metrics\['a'\], a numpy.ndarray, exceeds"),
        (torch.zeros(1).expand(10**9), r"but metrics\['a'\], a torch.Tensor, exceeds"),
        (1 << 5000, r"integers among metrics must be below 2\*\*1024, but metrics\['a'\] is larger"),
    ],
    ids=["itself", "wide", "text", "escapes", "array", "tensor", "integer"],
)
def test_what_is_too_much_is_refused_by_name(bad: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plain_metrics({"a": bad})


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
nested = st.recursive(leaves, lambda of: st.lists(of, max_size=5) | st.dictionaries(st.text(), of, max_size=5))


@pytest.mark.thorough
@given(st.dictionaries(st.text(), nested, max_size=20))
def test_what_is_plain_stays_as_it_is(metrics: dict[str, Any]) -> None:
    try:
        found = plain_metrics(metrics)
    except ValueError:
        assert any(abs(value) >= 1 << 1024 for value in every(metrics) if type(value) is int)
        return
    assert repr(found) == repr(metrics)
    assert len(json.dumps(found)) <= MOST_CHARACTERS


def every(value: Any) -> list[Any]:
    if isinstance(value, (list, dict)):
        return [each for item in (value.values() if isinstance(value, dict) else value) for each in every(item)]
    return [value]


def test_report_raises_where_it_is_called() -> None:
    set_session(None)
    with pytest.raises(TypeError, match=r"is a .*Trap"):
        er.report({"loss": Trap()})
    er.report({"loss": torch.tensor(0.25)})
    assert current_session().controller.metrics == {"loss": 0.25}  # type: ignore[attr-defined]
    set_session(None)
