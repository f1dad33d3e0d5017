"""SHELL: NNI's functions for trial code, for use in the workers of an elastic trial."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import nni.trial
from nni.runtime.trial_command_channel import TrialCommandChannel, set_default_trial_command_channel

import elastic_ray
from tuning.nni.wire import DEFAULT, FINAL, PARAMETER, TrialId


class ReportChannel(TrialCommandChannel):  # type: ignore[misc]  # NNI has no types
    """Channel that lets NNI's trial functions work in every worker of a trial; only rank 0's reports count."""

    def receive_parameter(self) -> Any:
        """Return the tuner's record for this trial (id and parameters), which is the same on every worker."""
        return json.loads(os.environ[PARAMETER])

    def send_metric(self, type: str, parameter_id: Any, trial_job_id: Any, sequence: int, value: Any) -> None:
        """Report ``value`` (number or mapping) to the job, which drops repeats; ``type`` "FINAL" means final result."""
        metrics = dict(value) if isinstance(value, Mapping) else {DEFAULT: value}
        elastic_ray.report({**metrics, FINAL: True} if type == "FINAL" else metrics)


def adopt(trial: TrialId) -> None:
    """Make NNI's functions in this process refer to the given trial instead of an earlier one."""
    nni.trial._experiment_id = trial.experiment
    nni.trial._trial_id = trial.trial
    nni.trial._sequence_id = trial.sequence
    nni.trial._params = None
    nni.trial.overwrite_intermediate_seq(0)
    set_default_trial_command_channel(ReportChannel())
