"""Importance of a sweep's parameters."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from elastic_ray.observe.page.importance import LEAST_TRIALS, importance


def trials(number: int, **fixed: Any) -> list[dict[str, Any]]:
    """The score is the learning rate's alone."""
    dice = random.Random(0)
    drawn = [
        {"lr": 10 ** dice.uniform(-4, 0), "width": dice.choice([8, 16]), "net": dice.choice("ab")}
        for _ in range(number)
    ]
    return [{"parameters": {**each, **fixed}, "score": -abs(each["lr"] - 0.01), "mode": "max"} for each in drawn]


def test_the_parameter_that_matters_comes_first() -> None:
    pytest.importorskip("optuna")
    found, why = importance([*trials(24, seed=3), {"parameters": {}, "score": None, "mode": "max"}])
    assert not why and next(iter(found)) == "lr" and found["lr"] > 0.6
    turned, _ = importance([{**row, "mode": "min", "score": -row["score"]} for row in trials(24)])
    assert turned == pytest.approx(found), "what is better is the best of a loss as well"
    assert set(found) == {"lr", "width", "net"} and sum(found.values()) == pytest.approx(1.0)


def test_too_little_says_why_there_is_none() -> None:
    pytest.importorskip("optuna")
    assert importance(trials(LEAST_TRIALS - 1)) == ({}, "it is known from 8 trials with a value on; 7 have one")
    alike = [{"parameters": {"lr": 0.1}, "score": 1.0, "mode": "min"}] * LEAST_TRIALS
    assert importance(alike) == ({}, "its trials differ in no parameter")


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert importance(trials(9)) == ({}, "it needs Optuna where this page is served: pip install optuna")
