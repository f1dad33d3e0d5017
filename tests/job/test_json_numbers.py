"""Numbers that JSON has no words for: files of a run are JSON all the same, and read back as the numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.checkpoints.run_directory import EVENTS_FILE, PROGRESS_FILE, REPORTS_FILE, RunStorage
from elastic_ray.events import EventKind, JobEvent, Report
from elastic_ray.json_numbers import dump, load

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def strictly(text: str) -> Any:
    """Read JSON as other programs do, which know neither NaN nor Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def same(one: Any, other: Any) -> bool:
    """Compare, with NaN equal to itself."""
    return repr(one) == repr(other)


@given(values)
def test_whatever_is_written_is_json_and_comes_back(value: Any) -> None:
    text = dump(value)
    strictly(text)
    assert same(load(text), value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_files_of_a_run_are_json_with_any_number(tmp_path: Path, number: float, kind: Any) -> None:
    metrics = {"loss": kind(number), "deep": {"each": [kind(number), 1.5]}}
    expected = {"loss": number, "deep": {"each": [number, 1.5]}}
    storage = RunStorage(str(tmp_path / "run"))
    storage.create()
    (source := tmp_path / "source").mkdir()
    kept = storage.persist_checkpoint(source, 0, metrics=metrics)
    storage.reports.append([Report(index=1, metrics=metrics).to_json()])
    event = JobEvent(
        kind=EventKind.BATCH, time_s=1.0, from_workers=1, to_workers=1, reason="r", detail={"noise": float(number)}
    )
    storage.events.append([event.to_json()])
    for file in (Path(kept.path) / PROGRESS_FILE, tmp_path / "run" / EVENTS_FILE, tmp_path / "run" / REPORTS_FILE):
        strictly(file.read_text())
    assert same(storage.stored_checkpoints()[0].metrics, expected)
    assert same(storage.read_reports(1, 1)[1].metrics, expected)
    assert same(storage.read_events()[0].detail, {"noise": number})


@pytest.mark.parametrize("own", ["NaN", math.nan, ["NaN"], [], 1.5, {"__float__": "Infinity"}], ids=repr)
def test_a_users_own_object_of_that_key_comes_back(own: Any) -> None:
    assert same(load(dump({"__float__": own})), {"__float__": own})
