"""Results of an NNI experiment: its trials, the best trial, and an error that carries the results so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a trial.

    Attributes:
        trial: NNI's id for the trial.
        sequence: Number of the trial in the experiment, from 0.
        status: NNI's status: "SUCCEEDED", "EARLY_STOPPED", "FAILED", "USER_CANCELED", "RUNNING"...
        parameters: Parameters that the tuner chose.
        value: Last reported metric value; None if it was never reported.
        reports: Metric value at each report.
        workers: Number of workers at each report.
        path: Directory for the trial's events and checkpoints on the experiment's storage; empty if it never started.
        error: Reason for the failure; empty if the trial did not fail.

    Examples:
        >>> from tuning.nni import Outcome
        >>> Outcome(trial="a1", sequence=0, status="SUCCEEDED", value=0.97).value
        0.97
    """

    trial: str
    sequence: int
    status: str
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    value: float | None = None
    reports: tuple[float, ...] = ()
    workers: tuple[int, ...] = ()
    path: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Results of an experiment: all trials, in numerical order.

    Attributes:
        experiment: NNI's id for the experiment, as shown by ``nnictl experiment list``.
        trials: All trials, finished or not.
        mode: "max" if a larger value is better, "min" otherwise.

    Examples:
        >>> from tuning.nni import Outcome, Results
        >>> trials = tuple(Outcome(trial=f"t{n}", sequence=n, status="SUCCEEDED", value=n / 4) for n in range(3))
        >>> Results(experiment="digits", trials=trials).best.trial
        't2'
    """

    experiment: str
    trials: tuple[Outcome, ...]
    mode: str = "max"

    @property
    def finished(self) -> tuple[Outcome, ...]:
        """Trials with status "SUCCEEDED" and a reported value."""
        return tuple(each for each in self.trials if each.status == "SUCCEEDED" and each.value is not None)

    @property
    def best(self) -> Outcome:
        """Finished trial with the best value according to ``mode``.

        Raises:
            LookupError: No trial has finished.
        """
        if not self.finished:
            found = ", ".join(f"{each.trial}: {each.status}" for each in self.trials) or "there were none"
            raise LookupError(f"no trial of experiment {self.experiment} has finished ({found})")
        sign = 1.0 if self.mode == "max" else -1.0
        return max(self.finished, key=lambda each: sign * (each.value or 0.0))


class ExperimentFailedError(RuntimeError):
    """Error raised if the experiment cannot continue; its ``results`` contain the trials so far.

    Args:
        message: Reason for the failure.
        results: Results of the trials so far.
    """

    def __init__(self, message: str, results: Results) -> None:
        super().__init__(message)
        self.results = results

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.results)
