"""Ready-made policies that follow a metric, and the cap on costs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ray.adaptation import (
    CostCap,
    EarlyStop,
    Interference,
    LossPlateau,
    NoiseScaleBatch,
    PolicyView,
    Resize,
    ScaleRate,
    Stop,
    ThroughputScaling,
    UtilityCost,
)
from tests.adaptation.scripted import ScriptedRun, listed


def answers(policy: Any, values: list[float], steps_between: int = 3) -> list[list[Any]]:
    """What a policy asks for after each report; views in between tell of the same report."""
    found = []
    for number, value in enumerate(values, 1):
        view = PolicyView(metrics={policy.metric: value, "other": 0.0}, reports=number)
        asked = listed(policy.after_step(view))
        for _ in range(steps_between):
            assert not listed(policy.after_step(view)), "one report counts once"
        found.append(asked)
    return found


def test_training_stops_after_reports_without_an_improvement() -> None:
    asked = answers(EarlyStop("loss", patience=2), [1.0, 0.9, 0.95, 0.9])
    assert asked[:3] == [[], [], []]
    assert asked[3] == [Stop("loss has not been better than 0.9 in the last 2 reports")]


def test_an_improvement_exceeds_min_delta_in_the_modes_direction() -> None:
    grows = [0.5, 0.55, 0.65, 0.7]
    assert [len(each) for each in answers(EarlyStop("accuracy", mode="max", min_delta=0.1, patience=1), grows)] == [
        *(0, 1, 0, 1)
    ]
    assert not any(answers(EarlyStop("accuracy", mode="max", patience=1), grows))


def test_a_report_without_the_metric_does_not_count() -> None:
    policy = EarlyStop("loss", patience=1)
    assert policy.watches == ("loss",)
    assert not listed(policy.after_step(PolicyView())), "no report yet"
    policy.after_step(PolicyView(metrics={"loss": 1.0}, reports=1))
    assert not listed(policy.after_step(PolicyView(metrics={}, reports=2)))
    assert listed(policy.after_step(PolicyView(metrics={"loss": 1.0}, reports=3)))


@settings(max_examples=150)
@given(
    st.lists(st.floats(-10, 10).map(lambda value: round(value, 2)), max_size=40),
    st.sampled_from(["min", "max"]),
    st.sampled_from(["rel", "abs"]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([0.0, 1e-4, 0.3]),
)
def test_rates_are_those_of_torchs_reduce_on_plateau(
    values: list[float], mode: Any, threshold_mode: Any, patience: int, cooldown: int, threshold: float
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        mode=mode,
        factor=0.5,
        patience=patience,
        threshold=threshold,
        threshold_mode=threshold_mode,
        cooldown=cooldown,
        min_lr=0.1,
    )
    ours = LossPlateau(
        mode=mode,
        factor=0.5,
        patience=patience,
        threshold=threshold,
        threshold_mode=threshold_mode,
        cooldown=cooldown,
        min_factor=0.1,
    )
    rate = 1.0
    for asked, value in zip(answers(ours, values, steps_between=1), values, strict=True):
        theirs.step(value)
        for request in asked:
            assert isinstance(request, ScaleRate)
            rate *= request.factor
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"])


def test_settings_default_to_torchs_and_to_what_docs_show() -> None:
    torchs = inspect.signature(torch.optim.lr_scheduler.ReduceLROnPlateau).parameters
    ours = vars(LossPlateau())
    assert {name: ours[name] for name in ours.keys() & torchs.keys()} == {
        **{name: torchs[name].default for name in ("mode", "factor", "patience", "threshold", "threshold_mode")},
        "cooldown": torchs["cooldown"].default,
    }
    scaling = {"every": 100, "stride": 4, "passes_to_stay": 3, "steps_to_stay": 100}
    for policy, settings_ in (
        (EarlyStop(), {"metric": "loss", "patience": 3, "min_delta": 0.0, "mode": "min"}),
        (NoiseScaleBatch(), {"factor": 1.0, "smoothing": 0.9, "hysteresis": 1.5, "growth": 2.0, "every": 50}),
        (Interference(), {"threshold": 0.8, "window": 5, "rest": 50, "model": 0}),
        (ThroughputScaling(), {"threshold": 0.1, **scaling}),
        (UtilityCost("1,2"), {"price": 1.0, **scaling}),
        (CostCap(1, price_per_worker_hour=1), {"shrink_at": None, "shrink_to": 1}),
    ):
        assert {**vars(policy), **settings_} == vars(policy)
        assert (policy.strict, policy.deadline_s) == (False, 2.0)


def costing(policy: CostCap, workers: int) -> ScriptedRun:
    """A run whose steps take 9 s: with 4 workers at 10 USD an hour 0.1 USD each."""
    return ScriptedRun(policy=policy, view=PolicyView(workers=workers, max_workers=8), step_s=lambda view: 9.0)


@given(st.floats(0.5, 5.0), st.integers(1, 8))
def test_run_ends_within_its_cap_and_not_steps_before(usd: float, workers: int) -> None:
    script = costing(CostCap(usd, price_per_worker_hour=10.0), workers)
    while not script.stopped:
        script.step()
    spent, step = script.view.worker_s / 3600 * 10, 9.0 * workers / 3600 * 10
    assert usd - 4 * step <= spent <= usd + 1e-9 or spent <= 4 * step


def test_few_workers_before_the_cap() -> None:
    script = costing(CostCap(2.0, price_per_worker_hour=10.0, shrink_at=0.5, shrink_to=1), 4)
    while not script.stopped:
        script.step()
    (shrunk, resize), (_, stop), *_ = script.asked
    assert (shrunk, resize) == (10, Resize(to=1)), "after ten steps of 0.1 USD"
    assert isinstance(stop, Stop) and "2 USD are the cap" in stop.reason
    assert script.view.worker_s / 3600 * 10 == pytest.approx(2.0, abs=0.06)


def test_a_run_that_is_small_already_is_not_resized() -> None:
    script = costing(CostCap(1.0, price_per_worker_hour=10.0, shrink_at=0.1, shrink_to=2), 2)
    while not script.stopped:
        script.step()
    assert {type(request) for _, request in script.asked} == {Stop}


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: EarlyStop(""), TypeError, r"EarlyStop\(metric\) must be the name of a metric"),
        (
            lambda: EarlyStop(patience=0),
            ValueError,
            r"EarlyStop\(patience\) must be a whole number, 1 or more, but got 0",
        ),
        (lambda: EarlyStop(min_delta=-1), ValueError, r"\(min_delta\) must be 0 or more"),
        (lambda: EarlyStop(mode="up"), ValueError, r"\(mode\) must be one of min, max, but got 'up'"),
        (lambda: LossPlateau(factor=1.0), ValueError, r"LossPlateau\(factor\) must be above 0 and below 1"),
        (lambda: LossPlateau(threshold_mode="x"), ValueError, r"\(threshold_mode\) must be one of rel, abs"),
        (
            lambda: CostCap(0, price_per_worker_hour=1),
            ValueError,
            r"CostCap\(usd\) must be above 0 and finite, but got 0",
        ),
        (lambda: CostCap(1, price_per_worker_hour=0), ValueError, r"\(price_per_worker_hour\) must be above 0"),
        (lambda: CostCap(1, price_per_worker_hour=1, shrink_at=1.0), ValueError, r"\(shrink_at\).*below 1"),
        (lambda: CostCap("1", price_per_worker_hour=1), TypeError, r"\(usd\) must be a number, but got '1'"),
    ],
)
def test_arguments_are_checked_by_name(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()
