"""Importance of each hyperparameter of a sweep, computed by Optuna (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

LEAST_TRIALS = 8
_DECADES = 100.0  # a parameter whose values differ by such a factor was drawn by its logarithm


def importance(trials: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], str]:
    """Return each varying parameter's PED-ANOVA importance, largest first, and why it is unknown ("" if known)."""
    told = [row for row in trials if row["score"] is not None]
    if len(told) < LEAST_TRIALS:
        return {}, f"it is known from {LEAST_TRIALS} trials with a value on; {len(told)} have one"
    try:
        import optuna
    except ImportError:
        return {}, "it needs Optuna where this page is served: pip install optuna"
    names = set.intersection(*(set(row["parameters"]) for row in told))
    values = {name: [row["parameters"][name] for row in told] for name in sorted(names)}
    kinds = {name: _distribution(each) for name, each in values.items() if len(set(map(repr, each))) > 1}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize" if told[0]["mode"] == "max" else "minimize")
    for row in told:
        given = {name: row["parameters"][name] for name in kinds}
        study.add_trial(optuna.trial.create_trial(params=given, distributions=kinds, value=row["score"]))
    if not kinds:
        return {}, "its trials differ in no parameter"
    found = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.PedAnovaImportanceEvaluator(), params=list(kinds)
    )
    return {name: float(part) for name, part in found.items()}, ""


def _distribution(values: Sequence[Any]) -> BaseDistribution:
    """Return a distribution that the values may have been drawn from."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)
    if not numbers or not all(math.isfinite(each) for each in values):
        return CategoricalDistribution(sorted(set(values), key=repr))
    low, high = min(values), max(values)
    log = low > 0 and high / low >= _DECADES
    if all(isinstance(each, int) for each in values):
        return IntDistribution(int(low), int(high), log=log)
    return FloatDistribution(float(low), float(high), log=log)
