"""``boa``: widths within a budget, against all others by brute force, and what they are in a simulation."""

from __future__ import annotations

import itertools
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from placement.policies.baselines.boa import BoaPolicy, JobClass, boa_widths
from placement.simulator.cli import main
from tests.placement.views import cluster, view

times = st.lists(st.floats(1.0, 1e4), min_size=1, max_size=4)
some = st.lists(st.tuples(st.floats(0.1, 50.0), times), min_size=1, max_size=3)


def classes_of(drawn: list[tuple[float, list[float]]]) -> dict[str, JobClass]:
    return {
        f"c{i}": JobClass(per_h=per_h, seconds={2**k: seconds for k, seconds in enumerate(curve)})
        for i, (per_h, curve) in enumerate(drawn)
    }


def cost(classes: dict[str, JobClass], widths: dict[str, int]) -> tuple[float, float]:
    """GPUs in use on average, and jobs in the system."""
    present = {name: each.per_h * each.seconds[widths[name]] / 3600.0 for name, each in classes.items()}
    return sum(present[name] * widths[name] for name in classes), sum(present.values())


@settings(max_examples=150)
@given(some, st.floats(1.0, 4.0))
def test_no_widths_within_the_budget_are_much_better(drawn: list[tuple[float, list[float]]], factor: float) -> None:
    classes = classes_of(drawn)
    options = [
        dict(zip(classes, each, strict=True)) for each in itertools.product(*(c.seconds for c in classes.values()))
    ]
    budget = factor * min(cost(classes, each)[0] for each in options)
    widths = boa_widths(classes, budget)
    used, jobs = cost(classes, widths)
    assert used <= budget * (1 + 1e-9)
    # The linear program's optimum lies between the widths for this budget and those for what they really use: at
    # equal GPUs nothing is better, for all that is chosen lies on the frontier's hull.
    best = min(jobs_ for used_, jobs_ in (cost(classes, each) for each in options) if used_ <= used * (1 + 1e-12))
    assert jobs <= best * (1 + 1e-9)


@given(some, st.floats(1.0, 3.0), st.floats(1.0, 3.0))
def test_more_money_is_never_slower(drawn: list[tuple[float, list[float]]], one: float, other: float) -> None:
    classes = classes_of(drawn)
    least = sum(min(k * t for k, t in each.seconds.items()) * each.per_h / 3600.0 for each in classes.values())
    poor, rich = (cost(classes, boa_widths(classes, least * each))[1] for each in sorted((one, other)))
    assert rich <= poor * (1 + 1e-9)


def test_a_budget_that_is_too_small_is_refused() -> None:
    classes = {"a": JobClass(per_h=2.0, seconds={1: 3600.0, 2: 2000.0})}
    with pytest.raises(ValueError, match=r"a budget must be at least 2 GPUs on average .* but got 1.5"):
        boa_widths(classes, 1.5)
    assert boa_widths(classes, 2.0) == {"a": 1} and boa_widths(classes, 2.3) == {"a": 2}
    assert BoaPolicy().told(classes, 1.0).widths == {"a": 1}, "without a budget as much as is needed"
    with pytest.raises(ValueError, match="at least 2 GPUs"):
        BoaPolicy(budget_usd_per_h=3.0, usd=2.0).told(classes, 64.0)


def test_a_width_does_not_change_with_the_other_jobs() -> None:
    policy = BoaPolicy(widths={"resnet": 3})
    alone = policy.decide([view("a", fingerprint="resnet")], cluster(8), 0.0)
    beside = policy.decide([view(job, fingerprint="resnet") for job in "ab"], cluster(8), 0.0)
    assert alone["a"].workers == beside["a"].workers == beside["b"].workers == 3
    crowded = policy.decide([view(job, fingerprint="resnet") for job in "abcd"], cluster(8), 0.0)
    assert sorted(each.workers for each in crowded.values()) == [2, 2, 2, 2]


def test_the_simulator_tells_it_the_arrivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["--demo", "--policy", "boa", "--quiet", "--processes", "1", "--json", str(out)]) == 0
    assert "boa" in capsys.readouterr().out and out.exists()
    assert main(["--demo", "--policy", "boa", "--budget", "0.001", "--quiet", "--processes", "1"]) == 2
    assert "a budget must be at least" in capsys.readouterr().err
    assert main(["--demo", "--policy", "goodput", "--budget", "5", "--quiet"]) == 2
    assert "--policy boa" in capsys.readouterr().err
