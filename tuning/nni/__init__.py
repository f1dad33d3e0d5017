"""NNI on elastic jobs: experiments under NNI's manager, and NNI's tuners and assessors in Ray Tune."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.lazy_names import lazy_names

if TYPE_CHECKING:
    from tuning.nni.experiment import Experiment
    from tuning.nni.results import ExperimentFailedError, Outcome, Results
    from tuning.nni.searching import AssessorScheduler, NNISearch

_HOMES = {
    "tuning.nni.experiment": "Experiment",
    "tuning.nni.results": "ExperimentFailedError Outcome Results",
    "tuning.nni.searching": "AssessorScheduler NNISearch",
}

__all__ = ["AssessorScheduler", "Experiment", "ExperimentFailedError", "NNISearch", "Outcome", "Results"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
