"""NNI on elastic jobs: an experiment with NNI's manager, and its tuners and assessors in Ray Tune without it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuning.nni.experiment import Experiment
    from tuning.nni.results import ExperimentFailedError, Outcome, Results
    from tuning.nni.searching import AssessorScheduler, NNISearch

_HOMES = {
    "AssessorScheduler": "tuning.nni.searching",
    "Experiment": "tuning.nni.experiment",
    "ExperimentFailedError": "tuning.nni.results",
    "NNISearch": "tuning.nni.searching",
    "Outcome": "tuning.nni.results",
    "Results": "tuning.nni.results",
}

__all__ = ["AssessorScheduler", "Experiment", "ExperimentFailedError", "NNISearch", "Outcome", "Results"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tuning.nni' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
