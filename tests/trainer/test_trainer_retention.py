"""Which checkpoints a run keeps."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.checkpoints.interval import CheckpointRetention

scores = st.one_of(st.none(), st.floats(allow_nan=True), st.just("text"), st.integers(-5, 5))


def value(score: Any, order: str) -> float:
    if isinstance(score, str) or score is None or math.isnan(score):
        return -math.inf
    return float(score) if order == "max" else -float(score)


@given(st.lists(scores, max_size=20), st.one_of(st.none(), st.integers(1, 5)), st.sampled_from(["max", "min"]))
def test_best_and_latest_are_kept_nothing_dropped_twice(given_scores: Any, keep: Any, order: str) -> None:
    retention = CheckpointRetention(num_to_keep=keep, score_attribute="score", score_order=order)
    present: list[str] = []
    for i, score in enumerate(given_scores):
        present.append(f"c{i}")
        for dropped in retention.add(f"c{i}", {} if score is None else {"score": score}):
            present.remove(dropped)
        assert [path for path, _ in retention.kept] == present
        assert retention.latest is not None
        assert retention.latest[0] == f"c{i}"
        assert keep is None or len(present) <= keep + 1
    if keep is not None and len(given_scores) >= keep:
        ranked = sorted(range(len(given_scores)), key=lambda i: (value(given_scores[i], order), i))
        best_possible = [value(given_scores[i], order) for i in ranked[-keep:]]
        held = sorted(value(given_scores[int(path[1:])], order) for path in present)
        assert held[-keep:] == best_possible


@given(st.integers(1, 5), st.integers(0, 12))
def test_without_a_score_the_newest_are_kept(keep: int, number: int) -> None:
    retention = CheckpointRetention(num_to_keep=keep)
    for i in range(number):
        retention.add(f"c{i}", {"loss": -i})
    assert [path for path, _ in retention.kept] == [f"c{i}" for i in range(max(0, number - keep), number)]


def test_the_latest_stays_although_it_is_worst() -> None:
    retention = CheckpointRetention(num_to_keep=1, score_attribute="acc")
    assert retention.add("a", {"acc": 0.9}) == ()
    assert retention.add("b", {"acc": 0.1}) == ()
    assert retention.add("c", {"acc": 0.2}) == ("b",)
    assert [path for path, _ in retention.kept] == ["a", "c"]


@pytest.mark.parametrize("bad", [{"num_to_keep": 0}, {"score_order": "best"}])
def test_bad_rules_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"must be .*, but got"):
        CheckpointRetention(**bad)
