"""What policies may ask for: checked where it is made, and the same after a way through plain values."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.adaptation import (
    Checkpoint,
    Report,
    Request,
    Resize,
    ScaleRate,
    SetBatch,
    SetStrategy,
    SetTopology,
    Stop,
)
from elastic_ray.adaptation.requests import from_plain, is_request, to_plain
from elastic_ray.sync import Strategy
from elastic_ray.sync.spec import Owner, Rule

WHOLE = st.integers(1, 1000)
REQUESTS: st.SearchStrategy[Any] = st.one_of(
    st.builds(Resize, to=WHOLE),
    st.builds(lambda a, b: Resize(min=min(a, b), max=max(a, b)), WHOLE, WHOLE),
    st.builds(SetBatch, WHOLE | st.none()),
    st.builds(ScaleRate, st.floats(1e-6, 1e6)),
    st.builds(SetStrategy, st.sampled_from(["all_reduce", "bf16", "auto"]), st.integers(0, 3)),
    st.just(SetStrategy(Strategy(rules=(Rule(pattern="*.bias", sync=Owner()),)))),
    st.builds(SetTopology, st.sampled_from(["native", "ring"]), st.integers(0, 3)),
    st.just(Checkpoint()),
    st.builds(Stop, st.text(max_size=20)),
    st.builds(Report, st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3)),
)


@given(REQUESTS)
def test_requests_travel_as_json(request: Request) -> None:
    assert is_request(request)
    assert from_plain(json.loads(json.dumps(to_plain(request)))) == request


NUMBERS: Any = np.array([2, 8]), np.float32(0.5)


@pytest.mark.parametrize("asked", [Resize(NUMBERS[0][0]), SetBatch(NUMBERS[0][1]), ScaleRate(NUMBERS[1])])
def test_numpys_numbers_travel_too(asked: Request) -> None:
    assert from_plain(json.loads(json.dumps(to_plain(asked)))) == asked


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Resize(0), "Resize(to) must be a whole number of workers, 1 or more, but got 0"),
        (lambda: Resize(2, min=1), "either to, or min and max"),
        (lambda: Resize(min=3, max=2), "Resize(min) must be at most Resize(max), but got 3 and 2"),
        (lambda: SetBatch(0), "SetBatch(batch_size) must be a whole number of samples, 1 or more"),
        (lambda: ScaleRate(0.0), "must be above 0 and finite, but got 0.0"),
        (lambda: ScaleRate(float("nan")), "must be above 0 and finite"),
        (lambda: SetStrategy("al_reduce"), "must be one of all_reduce, two_level"),
        (lambda: SetStrategy("bf16", model=-1), "SetStrategy(model) must be a whole number, 0 or more"),
        (lambda: SetTopology("mesh"), "SetTopology(topology) must be one of native, two_level"),
        (lambda: SetTopology("ring", model=-1), "SetTopology(model) must be a whole number, 0 or more"),
    ],
)
def test_values_out_of_range_are_refused_by_name(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Resize(True),
        lambda: Resize(2.0),
        lambda: SetBatch("64"),
        lambda: ScaleRate("2"),
        lambda: ScaleRate(True),
        lambda: SetStrategy(3),
        lambda: Stop(None),
        lambda: Report([1]),
        lambda: Report({"loss": object()}),
    ],
)
def test_other_types_are_refused(make: Any) -> None:
    with pytest.raises(TypeError):
        make()
